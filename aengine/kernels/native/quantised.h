/* Integer weights in panels, activations in units of 32, and the integer product of the two.
 *
 * A unit of activations is 32 of a row, rounded to int8 with one scale: all of it is one cache line. A panel of codes
 * holds, per unit, 8 steps of 4 inputs; a step is one or two vectors, a vector is VL outputs x 4 inputs as bytes.
 * Codes of 4 bits: low nibbles belong to the first VL outputs of the panel, high nibbles to the other VL. Codes of 8 bits
 * are stored with 128 added, and 128 times the sum of the activations is taken off the result; two layouts:
 *   AE_SPLIT  (AVX2, AVX-512 without VNNI) the machine multiplies bytes into 16-bit sums, which a whole unit of nibbles
 *             cannot overflow (8 steps x 2 x 15 x 127 = 30,480): a byte is two nibbles, 16 h + l, summed apart. A panel
 *             is VL outputs, and looks to the inner loop like one of 2 VL 4-bit outputs.
 *   otherwise (VNNI, plain C) bytes are multiplied into 32-bit sums. A panel is 2 VL outputs, two vectors a step.
 */
#ifndef AE_QUANTISED_H
#define AE_QUANTISED_H

#include "api.h"
#include "simd.h"

enum { AE_UNIT = 32, AE_STEPS = 8, AE_OFFSET = 128 };

/* [0]: of all 32 inputs; [1], [2]: of the first and the last 16. */
typedef struct {
    int8_t code[AE_UNIT];
    float scale;
    float sums[3];      /* scale * sum of codes */
    int32_t offsets[3]; /* -AE_OFFSET * sum of codes */
    int32_t unused;
} ae_x_unit;

#if defined(__AVX2__) && AE_VL == 8 || defined(__AVX512BW__)
#define AE_FAST_STEP 1
#define AE_UNROLL_STEPS AE_UNROLL
#else /* a step is some 20 instructions: one copy of it will do */
#define AE_FAST_STEP 0
#define AE_UNROLL_STEPS
#endif

/* Keeps a sum in its register and its additions in order: compilers like to turn 8 steps into a tree and spill it. */
#if defined(__x86_64__) && AE_FAST_STEP
#define AE_PIN(v) __asm__ volatile("" : "+v"(v))
#else
#define AE_PIN(v) (void)0
#endif

#if AE_VL == 16 && defined(__AVX512VNNI__)
#define AE_SPLIT 0
AE_INLINE vi codes_step(vi sum, vu w, vu x) { return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x); }
AE_INLINE vi codes_total(vi sum) { return sum; }

#elif AE_VL == 16 && defined(__AVX512BW__)
#define AE_SPLIT 1
AE_INLINE vi codes_step(vi sum, vu w, vu x)
{
    return (vi)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)w, (__m512i)x));
}
AE_INLINE vi codes_times(vi sum, int16_t n) { return (vi)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(n)); }
AE_INLINE vi codes_total(vi sum) { return codes_times(sum, 1); }

#elif AE_VL == 8 && defined(__AVX2__)
#define AE_SPLIT 1
AE_INLINE vi codes_step(vi sum, vu w, vu x)
{
    return (vi)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)w, (__m256i)x));
}
AE_INLINE vi codes_times(vi sum, int16_t n) { return (vi)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(n)); }
AE_INLINE vi codes_total(vi sum) { return codes_times(sum, 1); }

#else
#define AE_SPLIT 0
AE_INLINE vi codes_step(vi sum, vu w, vu x)
{
    AE_UNROLL
    for (int b = 0; b < 32; b += 8) sum += (vi)((w >> b) & 255) * ((vi)(x << (24 - b)) >> 24);
    return sum;
}
AE_INLINE vi codes_total(vi sum) { return sum; }
#endif

#define AE_PANEL4 (2 * AE_VL)
#define AE_PANEL8 (AE_SPLIT ? AE_VL : 2 * AE_VL)

/* Bytes of one unit of a panel: 8 steps of one vector of nibble pairs, or (8 bits, not split) of two vectors. */
#define AE_UNIT_BYTES(bits) ((bits) == 4 || AE_SPLIT ? AE_STEPS * 4 * AE_VL : 2 * AE_STEPS * 4 * AE_VL)

AE_INLINE int64_t code_panel(int64_t bits) { return bits == 4 ? AE_PANEL4 : AE_PANEL8; }
AE_INLINE int64_t code_units(int64_t in_features) { return (in_features + AE_UNIT - 1) / AE_UNIT; }
AE_INLINE int64_t code_groups(int64_t in_features, int64_t group)
{
    return (code_units(in_features) * AE_UNIT + group - 1) / group;
}

/* Where the code of output `o` of a panel and input `k` of a row stands, in bytes from the panel's first. */
AE_INLINE int64_t code_at(int64_t bits, int64_t o, int64_t k)
{
    const int64_t step = k % AE_UNIT / 4, two = bits == 8 && !AE_SPLIT;
    const int64_t vector = two ? 2 * step + o / AE_VL : step;
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
