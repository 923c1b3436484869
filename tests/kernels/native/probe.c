/* The steps of the integer product and the emulated instructions, one function each, over memory. */
#include "activations.h"

#define EXPORT __attribute__((visibility("default")))

EXPORT int lanes(void) { return AE_VL; }

/* The sums of a unit of codes, those of bytes times `scale`: w [steps][2][lanes], x [steps], out [2][lanes]. */
EXPORT void unit_sums(const uint32_t *w, const uint32_t *x, int steps, int codes16, uint32_t scale,
                      int32_t *out)
{
    vi sum0 = {0}, sum1 = {0};
    for (int j = 0; j < steps; j++, w += 2 * AE_VL) {
        const vu w0 = *(const vu_mem *)w, w1 = *(const vu_mem *)(w + AE_VL), xj = (vu){0} + x[j];
        if (codes16)
            add_step(1, &sum0, &sum1, w0, w1, xj);
        else
            add_step(0, &sum0, &sum1, w0, w1, xj);
    }
#if AE_SPLIT
    if (!codes16) sum0 = multiply_pairs((vu)sum0, (vu){0} + scale * 0x10001u);
    if (!codes16) sum1 = multiply_pairs((vu)sum1, (vu){0} + scale * 0x10001u);
#else
    sum0 = codes16 ? sum0 : sum0 * (int32_t)scale;
    sum1 = codes16 ? sum1 : sum1 * (int32_t)scale;
#endif
    *(vu_mem *)out = (vu)sum0;
    *(vu_mem *)(out + AE_VL) = (vu)sum1;
}

/* Whether every comparison and choice of lanes agrees with its plain form; NaN, zeros of both signs among them. */
EXPORT void lane_choices(const float *a, const float *b, float *max, float *min, int32_t *largest)
{
    const vf x = vf_load(a), y = vf_load(b);
    vf_store(max, vf_max(x, y));
    vf_store(min, vf_min(x, y));
    *largest = vi_hmax(vi_max((vi)x, (vi)y));
}

#if defined(AE_EMULATED_H) && AE_VL == 16
#define UNARY(NAME, TO, FROM)                  \
    EXPORT void NAME(void *to, const void *from) \
    {                                          \
        FROM a;                                \
        memcpy(&a, from, sizeof a);            \
        const TO r = _mm512_##NAME(a);         \
        memcpy(to, &r, sizeof r);              \
    }
#define BINARY(NAME, V)                                      \
    EXPORT void NAME(void *to, const void *one, const void *two) \
    {                                                        \
        V a, b;                                              \
        memcpy(&a, one, sizeof a);                           \
        memcpy(&b, two, sizeof b);                           \
        const V r = _mm512_##NAME(a, b);                     \
        memcpy(to, &r, sizeof r);                            \
    }
#define TERNARY(NAME, V)                                                            \
    EXPORT void NAME(void *to, const void *one, const void *two, const void *three) \
    {                                                                               \
        V a, b, c;                                                                  \
        memcpy(&a, one, sizeof a);                                                  \
        memcpy(&b, two, sizeof b);                                                  \
        memcpy(&c, three, sizeof c);                                                \
        const V r = _mm512_##NAME(a, b, c);                                         \
        memcpy(to, &r, sizeof r);                                                   \
    }
UNARY(cvtepi32_ps, __m512, __m512i)
UNARY(cvtepi8_epi32, __m512i, __m128i)
UNARY(cvtph_ps, __m512, __m256i)
UNARY(cvtps_epi32, __m512i, __m512)
UNARY(reduce_max_epi32, int32_t, __m512i)
BINARY(max_ps, __m512)
BINARY(min_ps, __m512)
BINARY(max_epi32, __m512i)
BINARY(add_epi16, __m512i)
BINARY(madd_epi16, __m512i)
BINARY(maddubs_epi16, __m512i)
TERNARY(fmadd_ps, __m512)
#if defined(__AVX512VNNI__)
TERNARY(dpbusd_epi32, __m512i)
TERNARY(dpwssd_epi32, __m512i)
#endif
#endif
