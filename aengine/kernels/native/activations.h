/* Activations as 8-bit integers: units of 32 of a row with one scale each. */
#ifndef AE_ACTIVATIONS_H
#define AE_ACTIVATIONS_H

#include "quantised.h"

enum { AE_UNIT_VECTORS = AE_UNIT / AE_VL };

AE_INLINE vi vi_max(vi a, vi b)
{
#if AE_VL == 8 && defined(__AVX2__)
    return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
#elif AE_VL == 16 && defined(__AVX512F__)
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
    const vi more = a > b;
    return (a & more) | (b & ~more);
#endif
}

AE_INLINE int32_t vi_hmax(vi v)
{
#if AE_VL == 8 && defined(__AVX2__)
    __m128i t = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    t = _mm_max_epi32(t, _mm_shuffle_epi32(t, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(t, _mm_shuffle_epi32(t, 0xb1)));
#elif AE_VL == 16 && defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    int32_t t[AE_VL];
    memcpy(t, &v, sizeof t);
    for (int i = 1; i < AE_VL; i++) t[0] = t[i] > t[0] ? t[i] : t[0];
    return t[0];
#endif
}

/* 32 integers within -127 .. 127 as bytes, and the sums of the first and the last 16. */
AE_INLINE void narrow_unit(const vi *q, int8_t *code, int32_t *sums)
{
#if AE_VL == 8 && defined(__AVX2__)
    /* Packing works within halves of a register: four-byte pieces come out as 0 4 1 5 2 6 3 7. */
    const __m256i low = _mm256_packs_epi32((__m256i)q[0], (__m256i)q[1]);
    const __m256i high = _mm256_packs_epi32((__m256i)q[2], (__m256i)q[3]);
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high),
                                                      _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((void *)code, bytes);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
    const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    const __m256i eights = _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 0x4e));
    const __m256i all = _mm256_add_epi32(eights, _mm256_shuffle_epi32(eights, 0xb1));
    sums[0] = _mm256_extract_epi32(all, 0);
    sums[1] = _mm256_extract_epi32(all, 4);
#else
    sums[0] = sums[1] = 0;
    for (int i = 0; i < AE_UNIT_VECTORS; i++) {
        int32_t t[AE_VL];
        memcpy(t, &q[i], sizeof t);
        for (int j = 0; j < AE_VL; j++) {
            code[i * AE_VL + j] = (int8_t)t[j];
            sums[2 * i / AE_UNIT_VECTORS] += t[j];
        }
    }
#endif
}

/* Codes and scale of 32 values. Magnitudes compare as integers: infinity and NaN come out on top, and make the scale NaN,
 * so that every output of the row is marked. Adding 1.5 * 2^23 rounds to the nearest even integer. */
AE_INLINE void quantise_unit(const vf *v, ae_x_unit *to)
{
    vi magnitude = (vi)v[0] & 0x7fffffff;
    for (int i = 1; i < AE_UNIT_VECTORS; i++) magnitude = vi_max(magnitude, (vi)v[i] & 0x7fffffff);
    const int32_t bits = vi_hmax(magnitude);
    float top;
    memcpy(&top, &bits, 4);
    const int finite = top < __builtin_inff(), fits = finite && top >= 0x1p-120f;
    const vf inverse = vf_set1(fits ? 127.0f / top : 0.0f), magic = vf_set1(12582912.0f);
    const float scale = fits ? top / 127.0f : finite ? 0.0f : __builtin_nanf("");
    vi q[AE_UNIT_VECTORS];
    for (int i = 0; i < AE_UNIT_VECTORS; i++) q[i] = (vi)(v[i] * inverse + magic) - (vi)magic;
    for (int i = 0; i < AE_UNIT_VECTORS && !finite; i++) q[i] = (vi)vf_set1(0.0f);
    int32_t sums[2];
    narrow_unit(q, to->code, sums);
    to->scale = scale;
    const int32_t all[3] = {sums[0] + sums[1], sums[0], sums[1]};
    for (int i = 0; i < 3; i++) {
        to->sums[i] = scale * (float)all[i];
        to->offsets[i] = -AE_OFFSET * all[i];
    }
    to->unused = 0;
}

AE_INLINE void quantise_row(const void *x, const int bf16, int64_t n, ae_x_unit *to)
{
    for (int64_t k = 0; k < n; k += AE_UNIT, to++) {
        vf v[AE_UNIT_VECTORS];
        for (int i = 0; i < AE_UNIT_VECTORS; i++) {
            const int64_t at = k + i * AE_VL, left = n - at;
            v[i] = left >= AE_VL ? vf_get(x, at, bf16) : vf_get_part(x, at, left > 0 ? (int)left : 0, bf16);
        }
        quantise_unit(v, to);
    }
}

#endif
