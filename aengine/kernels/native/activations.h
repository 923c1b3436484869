/* Activations as integers of 8 or 16 bits: units of 32 of a row with one scale each. */
#ifndef AE_ACTIVATIONS_H
#define AE_ACTIVATIONS_H

#include "internal.h"
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

/* Lane i: the greatest lane of v[i]. */
AE_INLINE vi vi_hmaxes(const vi *v)
{
    vi most;
#if AE_VL == 8 && defined(__AVX2__)
    __m256i fours[2];
    for (int i = 0; i < 2; i++) {
        const __m256i *w = (const __m256i *)v + 4 * i;
        const __m256i a = _mm256_max_epi32(_mm256_unpacklo_epi32(w[0], w[1]), _mm256_unpackhi_epi32(w[0], w[1]));
        const __m256i b = _mm256_max_epi32(_mm256_unpacklo_epi32(w[2], w[3]), _mm256_unpackhi_epi32(w[2], w[3]));
        fours[i] = _mm256_max_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    }
    most = (vi)_mm256_max_epi32(_mm256_permute2x128_si256(fours[0], fours[1], 0x20),
                                _mm256_permute2x128_si256(fours[0], fours[1], 0x31));
#else
    for (int i = 0; i < AE_VL; i++) most[i] = vi_hmax(v[i]);
#endif
    return most;
}

/* A unit of 32 integers that fit 8 bits, or 16 if `codes16` (inputs 0 and 2 of each four, then 1 and 3 of each), and
 * their scale, as `pair` too. The lanes of the result add up to their sum; `to` NULL: nothing else is wanted but codes16. */
AE_INLINE vi narrow_unit(const vi *q, float scale, uint32_t pair, ae_x_unit *to, int16_t *codes16)
{
#if AE_VL == 8 && defined(__AVX2__)
    /* Packing works within halves of a register: the pieces of four inputs come out as 0 4 1 5 2 6 3 7. */
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7), ones = _mm256_set1_epi16(1);
    __m256i low = _mm256_packs_epi32((__m256i)q[0], (__m256i)q[1]);
    __m256i high = _mm256_packs_epi32((__m256i)q[2], (__m256i)q[3]);
    __m256i fours;
    if (codes16) {
        const __m256i split = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, /* both halves */
                                               0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
        low = _mm256_shuffle_epi8(low, split);
        high = _mm256_shuffle_epi8(high, split);
        const __m256i even = _mm256_permutevar8x32_epi32(_mm256_unpacklo_epi64(low, high), order);
        const __m256i odd = _mm256_permutevar8x32_epi32(_mm256_unpackhi_epi64(low, high), order);
        _mm256_storeu_si256((void *)codes16, even);
        _mm256_storeu_si256((void *)(codes16 + AE_UNIT / 2), odd);
        fours = _mm256_add_epi32(_mm256_madd_epi16(even, ones), _mm256_madd_epi16(odd, ones));
    } else {
        const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
        _mm256_storeu_si256((void *)to->code, bytes);
        fours = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), ones);
    }
    if (!to) return (vi)fours;
    const __m256i eights = _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 0x4e));
    /* Each half of `own` the sum of its 16 inputs, of `other` that of the others; then what follows the scale. */
    const __m256i own = _mm256_add_epi32(eights, _mm256_shuffle_epi32(eights, 0xb1));
    const __m256i other = _mm256_permute2x128_si256(own, own, 1), all = _mm256_add_epi32(own, other);
    const __m256i sums = _mm256_blend_epi32(_mm256_blend_epi32(all, own, 0x44), other, 0x28);
    const __m256 scales = _mm256_set1_ps(scale), scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(sums), scales);
    const __m256i offsets = codes16 ? _mm256_mullo_epi32(sums, _mm256_set1_epi32(-AE_OFFSET)) : sums;
    const __m256i tail = _mm256_blend_epi32(_mm256_castps_si256(_mm256_blend_ps(scaled, scales, 1)), offsets, 0x70);
    _mm256_storeu_si256((void *)&to->scale, _mm256_blend_epi32(tail, _mm256_set1_epi32((int)pair), 0x80));
    return (vi)fours;
#else
    int32_t sums[3] = {0};
    for (int i = 0; i < AE_UNIT_VECTORS; i++) {
        int32_t t[AE_VL];
        memcpy(t, &q[i], sizeof t);
        for (int j = 0; j < AE_VL; j++) {
            const int k = i * AE_VL + j;
            if (codes16)
                codes16[AE_UNIT / 2 * (k & 1) + k / 2] = (int16_t)t[j];
            else
                to->code[k] = (int8_t)t[j];
            sums[1 + 2 * i / AE_UNIT_VECTORS] += t[j];
        }
    }
    sums[0] = sums[1] + sums[2];
    for (int i = 0; i < 3 && to; i++) {
        to->sums[i] = scale * (float)sums[i];
        to->offsets[i] = -AE_OFFSET * sums[i];
    }
    if (to) to->scale = scale, to->pair = pair;
    vi all = {0};
    all[0] = sums[0];
    return all;
#endif
}

AE_INLINE void load_unit(const void *x, const int bf16, int64_t n, int64_t k, vf *v)
{
    for (int i = 0; i < AE_UNIT_VECTORS; i++) {
        const int64_t at = k + i * AE_VL, left = n - at;
        v[i] = left >= AE_VL ? vf_get(x, at, bf16) : vf_get_part(x, at, left > 0 ? (int)left : 0, bf16);
    }
}

/* The greater magnitudes, as integers: infinity and NaN come out on top. */
AE_INLINE vi greater(vi magnitude, const vf *v)
{
    for (int i = 0; i < AE_UNIT_VECTORS; i++) magnitude = vi_max(magnitude, (vi)v[i] & 0x7fffffff);
    return magnitude;
}

AE_INLINE float greatest(vi magnitude)
{
    const int32_t bits = vi_hmax(magnitude);
    float top;
    memcpy(&top, &bits, 4);
    return top;
}

/* The nearest integers, even ones in the middle, by adding 1.5 * 2^23. */
AE_INLINE vf nearest(vf v) { return (v + vf_set1(12582912.0f)) - vf_set1(12582912.0f); }

AE_INLINE vi as_integers(vf v)
{
#if AE_VL == 8 && defined(__AVX2__)
    return (vi)_mm256_cvtps_epi32((__m256)v);
#elif AE_VL == 16 && defined(__AVX512F__)
    return (vi)_mm512_cvtps_epi32((__m512)v);
#else
    return (vi)(v + vf_set1(12582912.0f)) - (vi)vf_set1(12582912.0f);
#endif
}

/* Codes of 32 values: they times `inverse`; 0 unless `finite`. */
AE_INLINE void round_unit(const vf *v, float inverse, int finite, vi *q)
{
    for (int i = 0; i < AE_UNIT_VECTORS; i++) q[i] = as_integers(v[i] * vf_set1(inverse));
    for (int i = 0; i < AE_UNIT_VECTORS && !finite; i++) q[i] = (vi)vf_set1(0.0f);
}

/* A row of int16 codes of magnitude `most` at most, `codes16` units after what else there is of each unit, if `units`;
 * *total: their sum. Returns the row's factor, NaN where a value is not finite, so that every output of the row is marked. */
AE_INLINE float quantise_wide(const void *x, const int bf16, int64_t n, int32_t most, const int units, ae_x_unit *to,
                              int64_t codes16, int32_t *total)
{
    vf v[AE_UNIT_VECTORS];
    vi q[AE_UNIT_VECTORS], magnitude = (vi)vf_set1(0.0f), sums = magnitude;
    for (int64_t k = 0; k < n; k += AE_UNIT) {
        load_unit(x, bf16, n, k, v);
        magnitude = greater(magnitude, v);
    }
    const float top = greatest(magnitude);
    const int finite = top < __builtin_inff(), fits = finite && top >= 0x1p-100f; /* most / top, top / most: normal */
    const float inverse = fits ? (float)most / top : 0.0f;
    for (int64_t k = 0; k < n; k += AE_UNIT, to++) {
        load_unit(x, bf16, n, k, v);
        round_unit(v, inverse, finite, q);
        sums += narrow_unit(q, 1.0f, 0, units ? to : NULL, (int16_t *)(to + codes16));
    }
    *total = 0;
    for (int i = 0; i < AE_VL; i++) *total += sums[i];
    return fits ? top / (float)most : finite ? 0.0f : __builtin_nanf("");
}

/* Of a unit, what rounding 32 values times `inverse` to integers left over, in 256ths; its sums count that in. */
AE_INLINE void second_codes(const vf *v, float inverse, ae_x_unit *to, int64_t unit, int64_t row,
                            ae_x_unit *second)
{
    const vf most = vf_set1(AE_MOST);
    vi q[AE_UNIT_VECTORS];
    for (int i = 0; i < AE_UNIT_VECTORS; i++) {
        const vf exact = v[i] * vf_set1(inverse);
        q[i] = as_integers(vf_max(vf_min((exact - nearest(exact)) * vf_set1(256.0f), most), -most));
    }
    narrow_unit(q, to->scale, to->pair, second, NULL);
    for (int i = 0; i < 3; i++) to->sums[i] += second->sums[i] * 0x1p-8f;
    second->offsets[0] = (int32_t)unit;
    second->offsets[1] = (int32_t)row;
}

/* The greatest magnitude of each unit to `tops`, AE_VL at a time; returns that of all. */
AE_INLINE float unit_tops(const void *x, const int bf16, int64_t n, float *tops)
{
    const vi none = (vi)vf_set1(0.0f);
    vi all = none;
    for (int64_t k = 0; k < n; k += AE_VL * AE_UNIT, tops += AE_VL) {
        vi own[AE_VL];
        for (int i = 0; i < AE_VL; i++) {
            vf v[AE_UNIT_VECTORS];
            own[i] = none;
            if (k + i * AE_UNIT >= n) continue;
            load_unit(x, bf16, n, k + i * AE_UNIT, v);
            own[i] = greater(none, v);
        }
        const vi most = vi_hmaxes(own);
        vf_store(tops, (vf)most);
        all = vi_max(all, most);
    }
    return greatest(all);
}

/* Row `row`, of int8 codes; its factor, NaN where a value is not finite. A unit's scale is the least multiple of the factor
 * by which its greatest magnitude comes out as AE_MOST at most. Those whose scale stands out get second codes, which
 * stand one after another; *seconds: how many. `own`: room for two numbers a unit, whole vectors of both. */
AE_INLINE float quantise_narrow(const void *x, const int bf16, int64_t n, int64_t row, float *own, ae_x_unit *to,
                                ae_x_unit *second, int64_t *seconds)
{
    const float most = AE_MOST * AE_MOST_SCALE;
    const int64_t units = code_units(n), room = ae_round_up(units, AE_VL);
    float *by = own, *scales = own + room; /* by what values are multiplied; scales as integers */
    const float top = unit_tops(x, bf16, n, own);
    const int finite = top < __builtin_inff(), fits = finite && top >= 0x1p-100f; /* most / top, top / most: normal */
    const vf inverse = vf_set1(fits ? most / top : 0.0f), factors = vf_set1(fits ? AE_MOST_SCALE / top : 0.0f);
    vi totals = (vi){0};
    for (int64_t u = 0; u < room; u += AE_VL) {
        const vf exact = finite ? vf_load(own + u) * factors : vf_set1(0.0f);
        const vi below = __builtin_convertvector(exact, vi);
        const vi above = below - (vi)(__builtin_convertvector(below, vf) < exact);
        const vf scale = vf_min(__builtin_convertvector(above, vf), vf_set1(AE_MOST_SCALE));
        const vi whole = __builtin_convertvector(scale, vi);
        totals += whole;
        vf_store(by + u, vf_select(whole > 0, inverse / scale, vf_set1(0.0f)));
        vf_store(scales + u, (vf)whole);
    }
    int64_t total = 0, out = 0;
    for (int i = 0; i < AE_VL; i++) total += totals[i];
    for (int64_t u = 0; u < units; u++, to++) {
        vf v[AE_UNIT_VECTORS];
        vi q[AE_UNIT_VECTORS];
        int32_t scale;
        memcpy(&scale, scales + u, sizeof scale);
        load_unit(x, bf16, n, u * AE_UNIT, v);
        round_unit(v, by[u], finite, q);
        narrow_unit(q, (float)scale, (uint32_t)scale * 0x10001u, to, NULL);
        if (scale * units > AE_OUT * total) second_codes(v, by[u], to, u, row, second + out++);
    }
    *seconds = out;
    return fits ? top / most : finite ? 0.0f : __builtin_nanf("");
}

#endif
