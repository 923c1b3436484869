/* Vectors of VL fp32 lanes, written once for all instruction sets.
 *
 * GCC/Clang vector types do the arithmetic; intrinsics stand only where the compiler needs help. Contraction is off
 * (-ffp-contract=off): a product and a sum are fused exactly where vf_fma says so, hence every copy of a kernel rounds
 * alike whatever the optimiser does with it. VL is 16 (AVX-512), 8 (AVX2), 4 (portable).
 */
#ifndef AE_SIMD_H
#define AE_SIMD_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef AE_VL
#if defined(__AVX512F__)
#define AE_VL 16
#elif defined(__AVX2__)
#define AE_VL 8
#else
#define AE_VL 4
#endif
#endif

#define AE_INLINE static inline __attribute__((always_inline))
#define AE_CAT2(a, b) a##_##b
#define AE_CAT(a, b) AE_CAT2(a, b)
#define AE_FN(name) AE_CAT(name, AE_ISA)

#if defined(AE_UNROLL) /* emulated.h */
#elif defined(__clang__)
#define AE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define AE_UNROLL _Pragma("GCC unroll 32")
#endif

typedef float vf __attribute__((vector_size(4 * AE_VL)));
typedef int32_t vi __attribute__((vector_size(4 * AE_VL)));
typedef uint32_t vu __attribute__((vector_size(4 * AE_VL)));
typedef uint16_t vh __attribute__((vector_size(2 * AE_VL)));
typedef float vf_mem __attribute__((vector_size(4 * AE_VL), aligned(4), may_alias));
typedef uint32_t vu_mem __attribute__((vector_size(4 * AE_VL), aligned(4), may_alias));
typedef uint16_t vh_mem __attribute__((vector_size(2 * AE_VL), aligned(2), may_alias));

AE_INLINE vf vf_load(const float *p) { return *(const vf_mem *)p; }
AE_INLINE void vf_store(float *p, vf v) { *(vf_mem *)p = v; }

AE_INLINE vf vf_set1(float x)
{
#if AE_VL == 16
    return (vf){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#elif AE_VL == 8
    return (vf){x, x, x, x, x, x, x, x};
#else
    return (vf){x, x, x, x};
#endif
}

/* a * b + c: one rounding where the machine has it (always the same choice within one build of one set). */
AE_INLINE vf vf_fma(vf a, vf b, vf c)
{
#if AE_VL == 16 && defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif AE_VL == 8 && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif AE_VL == 4 && defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

AE_INLINE vf vf_select(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }

AE_INLINE int any_lane(vi mask)
{
#if AE_VL == 8 && defined(__AVX2__)
    return _mm256_movemask_epi8((__m256i)mask);
#else
    int32_t t[AE_VL], any = 0;
    memcpy(t, &mask, sizeof t);
    for (int i = 0; i < AE_VL; i++) any |= t[i];
    return any;
#endif
}

/* The second operand where either is NaN. */
AE_INLINE vf vf_max(vf a, vf b)
{
#if AE_VL == 8 && defined(__AVX__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif AE_VL == 16 && defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return vf_select((vi)(a > b), a, b);
#endif
}

AE_INLINE vf vf_min(vf a, vf b)
{
#if AE_VL == 8 && defined(__AVX__)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#elif AE_VL == 16 && defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return vf_select((vi)(a < b), a, b);
#endif
}

/* Lane i with lane i + VL/2, then halves again: one fixed tree. */
AE_INLINE float vf_sum(vf v)
{
#if AE_VL == 8 && defined(__AVX2__)
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    float t[AE_VL];
    vf_store(t, v);
    for (int half = AE_VL / 2; half; half /= 2)
        for (int i = 0; i < half; i++) t[i] += t[i + half];
    return t[0];
#endif
}

AE_INLINE float vf_hmax(vf v)
{
#if AE_VL == 8 && defined(__AVX2__)
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
    float t[AE_VL];
    vf_store(t, v);
    for (int half = AE_VL / 2; half; half /= 2)
        for (int i = 0; i < half; i++) t[i] = t[i] > t[i + half] ? t[i] : t[i + half];
    return t[0];
#endif
}

AE_INLINE float bf16_to_f32(uint16_t h)
{
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

/* Round to nearest even; NaN stays NaN. */
AE_INLINE uint16_t f32_to_bf16(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

AE_INLINE vf vf_load_bf16(const uint16_t *p)
{
#if AE_VL == 8 && defined(__AVX2__)
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    return (vf)(__builtin_convertvector(*(const vh_mem *)p, vu) << 16);
#endif
}

AE_INLINE void vf_store_bf16(uint16_t *p, vf v)
{
    vu u = (vu)v;
    vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    vu quiet = (u >> 16) | 0x40;
    vu nan = (vu)((u & 0x7fffffffu) > 0x7f800000u);
    *(vh_mem *)p = __builtin_convertvector((quiet & nan) | (rounded & ~nan), vh);
}

/* Loads and stores of either element type; `bf16` is a constant at every call. */
AE_INLINE vf vf_get(const void *p, int64_t i, int bf16)
{
    return bf16 ? vf_load_bf16((const uint16_t *)p + i) : vf_load((const float *)p + i);
}

AE_INLINE void vf_put(void *p, int64_t i, vf v, int bf16)
{
    if (bf16)
        vf_store_bf16((uint16_t *)p + i, v);
    else
        vf_store((float *)p + i, v);
}

/* The last n < VL elements of a row, padded with zeros. */
AE_INLINE vf vf_get_part(const void *p, int64_t i, int n, int bf16)
{
    float t[AE_VL] = {0};
    for (int j = 0; j < n; j++) t[j] = bf16 ? bf16_to_f32(((const uint16_t *)p)[i + j]) : ((const float *)p)[i + j];
    return vf_load(t);
}

AE_INLINE void vf_put_part(void *p, int64_t i, int n, vf v, int bf16)
{
    float t[AE_VL];
    vf_store(t, v);
    for (int j = 0; j < n; j++) {
        if (bf16)
            ((uint16_t *)p)[i + j] = f32_to_bf16(t[j]);
        else
            ((float *)p)[i + j] = t[j];
    }
}

/* e^x, relative error under 1.2e-7 on [-87.33, 88.37]; 0 below, e^88.37 above, exactly 1 at 0, NaN stays NaN.
 *
 * x = n ln 2 + r with |r| <= ln(2) / 2; ln 2 in two parts, so that n ln 2 is exact enough; e^r - 1 - r by a polynomial
 * r^2 (c0 + .. + c4 r^4) fitted with relative error 3.1e-9; 2^n by adding n to the exponent. Adding 1.5 * 2^23 rounds
 * to an integer, which then stands in the low mantissa bits. */
AE_INLINE vf vf_exp(vf x)
{
    const vf magic = vf_set1(12582912.0f);
    const vf top = vf_min(vf_set1(88.37f), x);
    const vf t = vf_fma(top, vf_set1(1.44269504f), magic);
    const vf n = t - magic;
    vf r = vf_fma(n, vf_set1(-0.693145752f), top);
    r = vf_fma(n, vf_set1(-1.42860677e-6f), r);
    vf p = vf_set1(0.0013814539415761828f);
    p = vf_fma(p, r, vf_set1(0.00836874544620514f));
    p = vf_fma(p, r, vf_set1(0.04166838899254799f));
    p = vf_fma(p, r, vf_set1(0.1666652113199234f));
    p = vf_fma(p, r, vf_set1(0.4999999403953552f));
    p = vf_fma(p * r, r, r) + 1.0f;
    vf e = (vf)((vi)p + ((vi)t << 23));
    return vf_select((vi)(x < vf_set1(-87.33f)), vf_set1(0.0f), e);
}

#endif
