/* AVX-512, VNNI and AVX-VNNI for machines without them: each intrinsic that the kernels use, as its manual describes it.
 *
 * For tests only. Included before everything else by the sets named emulated_*, this header announces the instruction
 * sets to the sources, so that they compile what the set of that name compiles; a vector of 16 lanes is then two of
 * AVX2. What AVX2 has too, lane by lane the same, is taken from there for each half; the rest is plain C.
 * tests/kernels/native/test_emulated.py holds them to the manual's words.
 */
#ifndef AE_EMULATED_H
#define AE_EMULATED_H

#include <immintrin.h> /* as this machine has it: what is announced below must not be seen there */
#include <stdint.h>
#include <string.h>

#define AE_EMULATED static inline __attribute__((always_inline))
#define AE_PIN(v) (void)0 /* no register holds a vector of 64 bytes */
#define AE_UNROLL         /* every step is many instructions: one copy of each will do */

/* To each 32-bit sum, wrapping: vpdpbusd four products of an unsigned byte of a and a signed byte of b, vpdpwssd two of
 * signed 16-bit integers. Called, not inlined: a tile has hundreds. */
static __attribute__((noinline, unused)) void ae_dpbusd(__m256i *sum, const __m256i *a, const __m256i *b, int halves)
{
    for (int i = 0; i < halves; i++) {
        const __m256i even_a = _mm256_and_si256(a[i], _mm256_set1_epi16(255)), odd_a = _mm256_srli_epi16(a[i], 8);
        const __m256i even_b = _mm256_srai_epi16(_mm256_slli_epi16(b[i], 8), 8), odd_b = _mm256_srai_epi16(b[i], 8);
        sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(even_a, even_b));
        sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(odd_a, odd_b));
    }
}

static __attribute__((noinline, unused)) void ae_dpwssd(__m256i *sum, const __m256i *a, const __m256i *b, int halves)
{
    for (int i = 0; i < halves; i++) sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(a[i], b[i]));
}

#define AE_EMULATED_DOT(NAME, VECTOR, DOT)                                                                            \
    AE_EMULATED VECTOR NAME(VECTOR sum, VECTOR a, VECTOR b)                                                           \
    {                                                                                                                 \
        __m256i to[sizeof(VECTOR) / 32], x[sizeof(VECTOR) / 32], y[sizeof(VECTOR) / 32];                              \
        memcpy(to, &sum, sizeof to);                                                                                  \
        memcpy(x, &a, sizeof x);                                                                                      \
        memcpy(y, &b, sizeof y);                                                                                      \
        DOT(to, x, y, sizeof(VECTOR) / 32);                                                                           \
        memcpy(&sum, to, sizeof sum);                                                                                 \
        return sum;                                                                                                   \
    }

#if defined(AE_EMULATE_AVX2VNNI)
#define __AVXVNNI__ 1
AE_EMULATED_DOT(ae_dpbusd_avx, __m256i, ae_dpbusd)
AE_EMULATED_DOT(ae_dpwssd_avx, __m256i, ae_dpwssd)
#define _mm256_dpbusd_avx_epi32 ae_dpbusd_avx
#define _mm256_dpwssd_avx_epi32 ae_dpwssd_avx
#endif

#if defined(AE_EMULATE_AVX512) || defined(AE_EMULATE_AVX512VNNI)
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512VL__ 1
#define __AVX512DQ__ 1

/* One instruction of AVX2 for each half. */
#define AE_HALVES1(NAME, TO, TO_HALF, FROM, FROM_HALF, HALF)                                                          \
    AE_EMULATED TO NAME(FROM a)                                                                                       \
    {                                                                                                                 \
        FROM_HALF x[2];                                                                                               \
        memcpy(x, &a, sizeof x);                                                                                      \
        const TO_HALF halves[2] = {HALF(x[0]), HALF(x[1])};                                                           \
        TO r;                                                                                                         \
        memcpy(&r, halves, sizeof r);                                                                                 \
        return r;                                                                                                     \
    }
#define AE_HALVES2(NAME, V, V_HALF, HALF)                                                                             \
    AE_EMULATED V NAME(V a, V b)                                                                                      \
    {                                                                                                                 \
        V_HALF x[2], y[2];                                                                                            \
        memcpy(x, &a, sizeof x);                                                                                      \
        memcpy(y, &b, sizeof y);                                                                                      \
        x[0] = HALF(x[0], y[0]);                                                                                      \
        x[1] = HALF(x[1], y[1]);                                                                                      \
        memcpy(&a, x, sizeof a);                                                                                      \
        return a;                                                                                                     \
    }

AE_HALVES1(ae_cvtepi32_ps, __m512, __m256, __m512i, __m256i, _mm256_cvtepi32_ps)
AE_HALVES1(ae_cvtps_epi32, __m512i, __m256i, __m512, __m256, _mm256_cvtps_epi32)
AE_HALVES1(ae_cvtph_ps, __m512, __m256, __m256i, __m128i, _mm256_cvtph_ps)
AE_HALVES2(ae_max_ps, __m512, __m256, _mm256_max_ps)
AE_HALVES2(ae_min_ps, __m512, __m256, _mm256_min_ps)
AE_HALVES2(ae_max_epi32, __m512i, __m256i, _mm256_max_epi32)
AE_HALVES2(ae_add_epi16, __m512i, __m256i, _mm256_add_epi16)
AE_HALVES2(ae_madd_epi16, __m512i, __m256i, _mm256_madd_epi16)
AE_HALVES2(ae_maddubs_epi16, __m512i, __m256i, _mm256_maddubs_epi16)

AE_EMULATED __m512 ae_fmadd_ps(__m512 a, __m512 b, __m512 c)
{
    __m256 x[2], y[2], z[2];
    memcpy(x, &a, sizeof x);
    memcpy(y, &b, sizeof y);
    memcpy(z, &c, sizeof z);
    for (int i = 0; i < 2; i++) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
    memcpy(&c, z, sizeof c);
    return c;
}

AE_EMULATED __m512i ae_cvtepi8_epi32(__m128i a)
{
    int8_t x[16];
    int32_t y[16];
    memcpy(x, &a, sizeof x);
    for (int i = 0; i < 16; i++) y[i] = x[i];
    __m512i r;
    memcpy(&r, y, sizeof r);
    return r;
}

AE_EMULATED int32_t ae_reduce_max_epi32(__m512i a)
{
    int32_t x[16];
    memcpy(x, &a, sizeof x);
    for (int i = 1; i < 16; i++) x[0] = x[i] > x[0] ? x[i] : x[0];
    return x[0];
}

#define _mm512_add_epi16 ae_add_epi16
#define _mm512_cvtepi32_ps ae_cvtepi32_ps
#define _mm512_cvtepi8_epi32 ae_cvtepi8_epi32
#define _mm512_cvtph_ps ae_cvtph_ps
#define _mm512_cvtps_epi32 ae_cvtps_epi32
#define _mm512_fmadd_ps ae_fmadd_ps
#define _mm512_madd_epi16 ae_madd_epi16
#define _mm512_maddubs_epi16 ae_maddubs_epi16
#define _mm512_max_epi32 ae_max_epi32
#define _mm512_max_ps ae_max_ps
#define _mm512_min_ps ae_min_ps
#define _mm512_reduce_max_epi32 ae_reduce_max_epi32
#endif

#if defined(AE_EMULATE_AVX512VNNI)
#define __AVX512VNNI__ 1
AE_EMULATED_DOT(ae_dpbusd_epi32, __m512i, ae_dpbusd)
AE_EMULATED_DOT(ae_dpwssd_epi32, __m512i, ae_dpwssd)
#define _mm512_dpbusd_epi32 ae_dpbusd_epi32
#define _mm512_dpwssd_epi32 ae_dpwssd_epi32
#endif

#endif
