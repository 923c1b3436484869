/* Integer weights in panels, activations in units of 32, and the integer product of the two.
 *
 * A unit of activations is 32 of a row: int16 before codes of 8 bits, int8 before those of 4 and 5. All int16 units of a
 * row have one scale, its factor, which meets each output once.
 * Scales of int8 units are whole multiples, 0 .. 32,767, of a factor of their row: the
 * instruction that adds up 16-bit sums multiplies by them on the way. Errors of
 * int8 grow with a unit's scale, and a few units of a row hold what is far larger than the rest: those whose scale stands
 * out get a second int8 code for each input, of what the first left over, in 256ths of its step. The products of those
 * are a sparse matter of each row's own.
 * All of a unit is one cache line; second codes, and int16 codes, are another. A panel of codes
 * holds, per unit, 8 steps of 4 inputs of 2 VL outputs; a vector is VL outputs x 4 inputs as bytes.
 * Codes of 4 bits: one vector a step, low nibbles for the first VL outputs of the panel, high nibbles for the other VL.
 * Codes of 8 bits: two vectors a step, stored with 128 added; 128 times the sum of the activations is taken off.
 * Codes of 5 bits: likewise, 0 .. 31; without a minimum those of -16 .. 15 with 16 added, which -16 times the scale, as
 * a minimum, takes off.
 *
 * Products of bytes: VNNI and plain C multiply into 32-bit sums; where AE_SPLIT (no VNNI) into 16-bit
 * sums, which a whole unit of nibbles cannot overflow (8 steps x 2 x 15 x 127 = 30,480), nor half a unit of 5 bits
 * (4 steps x 2 x 31 x 127 = 31,496); two of them times a scale fit
 * 32 bits (2 x 31,496 x 32,767 = 2,064,058,864). Products of wide segments: codes
 * become 16-bit integers, a step being two: inputs 0 and 2 of its four, then 1 and 3. Their 32-bit sums cannot overflow
 * (32 x 255 x 32,767 = 267,378,720, and 128 taken off half of that). Every way yields the same integer.
 *
 * Where all inputs of an output share a scale, its whole sum is one integer. So that 32 bits hold it, int16 codes of such
 * a weight are smaller the more inputs there are (29,127 at most of 576 inputs, 2,047 of 8,192). Half a step, squared and
 * summed over a row, is still no more than int8 codes with a scale for each unit may be off: of n units with the greatest
 * magnitudes t, n max(t)^2 / 2,047^2 is below the sum of t^2 / 127^2 as long as n < 260. Of more than AE_WHOLE_INPUTS,
 * sums are of units.
 */
#ifndef AE_QUANTISED_H
#define AE_QUANTISED_H

#include "api.h"
#include "simd.h"

enum { AE_UNIT = 32, AE_STEPS = 8, AE_OFFSET = 128, AE_OFFSET5 = 16, AE_MOST = 127, AE_MOST_SCALE = 32767,
       AE_MOST_WIDE = 32767 };

/* The most inputs of which one integer is the sum. */
enum { AE_WHOLE_INPUTS = 8192 };

/* A unit has second codes if its scale is more than AE_OUT times the mean of its row: 3 % of those of SmolLM2's prose. */
enum { AE_OUT = 3 };

/* [0]: of all 32 inputs; [1], [2]: of the first and the last 16. */
typedef struct {
    int8_t code[AE_UNIT]; /* of a wide unit none: its int16 codes stand apart */
    float scale;        /* of int8 codes in factors of their row; of second ones in those factors' 256ths; else 1 */
    float sums[3];      /* scale * sum of codes, second ones included */
    int32_t offsets[3]; /* -AE_OFFSET * sum of codes; of second codes: their unit, their row */
    uint32_t pair;      /* the scale of an int8 unit as an integer, twice: in both halves */
} ae_x_unit;

#if defined(__AVX2__) && AE_VL == 8 || defined(__AVX512BW__)
#define AE_FAST_STEP 1
#define AE_UNROLL_STEPS AE_UNROLL
#else /* a step is some 20 instructions: one copy of it will do */
#define AE_FAST_STEP 0
#define AE_UNROLL_STEPS
#endif

/* Keeps a sum in its register and its additions in order: compilers like to turn 8 steps into a tree and spill it. */
#if defined(AE_PIN) /* emulated.h */
#elif defined(__x86_64__) && AE_FAST_STEP
#define AE_PIN(v) __asm__ volatile("" : "+v"(v))
#else
#define AE_PIN(v) (void)0
#endif

#if AE_VL == 16 && defined(__AVX512VNNI__)
#define AE_SPLIT 0
AE_INLINE vi codes_step(vi sum, vu w, vu x) { return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x); }
AE_INLINE vi pairs_step(vi sum, vu w, vu x) { return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)w, (__m512i)x); }

#elif AE_VL == 16 && defined(__AVX512BW__)
#define AE_SPLIT 1
AE_INLINE vi multiply_bytes(vu w, vu x) { return (vi)_mm512_maddubs_epi16((__m512i)w, (__m512i)x); }
AE_INLINE vi multiply_pairs(vu w, vu x) { return (vi)_mm512_madd_epi16((__m512i)w, (__m512i)x); }
AE_INLINE vi add_16(vi a, vi b) { return (vi)_mm512_add_epi16((__m512i)a, (__m512i)b); }

#elif AE_VL == 8 && defined(__AVXVNNI__)
#define AE_SPLIT 0
AE_INLINE vi codes_step(vi sum, vu w, vu x)
{
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
}
AE_INLINE vi pairs_step(vi sum, vu w, vu x)
{
    return (vi)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
}

#elif AE_VL == 8 && defined(__AVX2__)
#define AE_SPLIT 1
AE_INLINE vi multiply_bytes(vu w, vu x) { return (vi)_mm256_maddubs_epi16((__m256i)w, (__m256i)x); }
AE_INLINE vi multiply_pairs(vu w, vu x) { return (vi)_mm256_madd_epi16((__m256i)w, (__m256i)x); }
AE_INLINE vi add_16(vi a, vi b) { return (vi)_mm256_add_epi16((__m256i)a, (__m256i)b); }

#else
#define AE_SPLIT 0
AE_INLINE vi codes_step(vi sum, vu w, vu x)
{
    AE_UNROLL
    for (int b = 0; b < 32; b += 8) sum += (vi)((w >> b) & 255) * ((vi)(x << (24 - b)) >> 24);
    return sum;
}
AE_INLINE vi pairs_step(vi sum, vu w, vu x)
{
    return sum + ((vi)(w << 16) >> 16) * ((vi)(x << 16) >> 16) + ((vi)w >> 16) * ((vi)x >> 16);
}
#endif

/* One step of both vectors of a panel. Where products come apart from sums, both products first: two adds between two
 * multiplies leave more of the multipliers' ports free (2 % on Zen 3). `codes16`: 16-bit integers rather than bytes. */
AE_INLINE void add_step(const int codes16, vi *sum0, vi *sum1, vu w0, vu w1, vu x)
{
#if AE_SPLIT
    vi p0 = codes16 ? multiply_pairs(w0, x) : multiply_bytes(w0, x);
    vi p1 = codes16 ? multiply_pairs(w1, x) : multiply_bytes(w1, x);
    AE_PIN(p0);
    AE_PIN(p1);
    *sum0 = codes16 ? *sum0 + p0 : add_16(*sum0, p0);
    *sum1 = codes16 ? *sum1 + p1 : add_16(*sum1, p1);
#else
    *sum0 = codes16 ? pairs_step(*sum0, w0, x) : codes_step(*sum0, w0, x);
    *sum1 = codes16 ? pairs_step(*sum1, w1, x) : codes_step(*sum1, w1, x);
#endif
    AE_PIN(*sum0);
    AE_PIN(*sum1);
}

/* Outputs of a panel, and bytes of one unit of it. */
#define AE_PANEL (2 * AE_VL)
#define AE_UNIT_BYTES(bits) (((bits) == 4 ? 4 : 8) * AE_STEPS * AE_VL)

AE_INLINE int is_wide(const ae_segment *s) { return s->bits == 8; }
AE_INLINE int64_t code_units(int64_t in_features) { return (in_features + AE_UNIT - 1) / AE_UNIT; }
AE_INLINE int64_t code_groups(int64_t in_features, int64_t group)
{
    return (code_units(in_features) * AE_UNIT + group - 1) / group;
}

/* Whether an output's sum is one integer. */
AE_INLINE int is_whole(const ae_segment *s, int64_t in_features)
{
    return is_wide(s) && in_features <= AE_WHOLE_INPUTS && code_groups(in_features, s->group) == 1;
}

/* The greatest int16 code with which it fits 32 bits. */
AE_INLINE int32_t whole_most(int64_t in_features)
{
    const int64_t most = INT32_MAX / (AE_OFFSET * AE_UNIT * code_units(in_features));
    return most < AE_MOST_WIDE ? (int32_t)most : AE_MOST_WIDE;
}

/* Where the code of output `o` of a panel and input `k` of a row stands, in bytes from the panel's first. */
AE_INLINE int64_t code_at(int64_t bits, int64_t o, int64_t k)
{
    const int64_t step = k % AE_UNIT / 4, vector = bits == 4 ? step : 2 * step + o / AE_VL;
    return k / AE_UNIT * AE_UNIT_BYTES(bits) + (vector * AE_VL + o % AE_VL) * 4 + k % 4;
}

/* fp16 -> fp32, exact; finite values only. */
AE_INLINE vf vf_load_f16(const uint16_t *p)
{
#if AE_VL == 16 && defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)p));
#elif AE_VL == 8 && defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const void *)p));
#else
    const vu h = __builtin_convertvector(*(const vh_mem *)p, vu);
    const vf magnitude = (vf)((h & 0x7fff) << 13) * 0x1p112f; /* the exponents' biases differ by 112 */
    return (vf)((vu)magnitude | (h & 0x8000) << 16);
#endif
}

AE_INLINE float f16_to_f32(uint16_t h)
{
    const uint32_t bits = (uint32_t)(h & 0x7fff) << 13;
    float f;
    memcpy(&f, &bits, 4);
    return h & 0x8000 ? -(f * 0x1p112f) : f * 0x1p112f;
}

AE_INLINE float scale_at(const void *scale, int64_t i, int64_t dtype)
{
    return dtype == AE_F32 ? ((const float *)scale)[i] : f16_to_f32(((const uint16_t *)scale)[i]);
}

#endif
