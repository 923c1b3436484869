/* Statistics of a row of logits: the best token, the sum of exponentials. Read by one thread, in a fixed order. */
#ifndef AE_ROWSTATS_H
#define AE_ROWSTATS_H

#include "simd.h"

#include <math.h>

/* First index of the greatest value, which goes to `best`; a row that holds NaN has the best value NaN. */
static int32_t best_of(const float *x, int64_t n, float *best)
{
    vf top[4];
    vi odd = (vi)vf_set1(0.0f);
    for (int k = 0; k < 4; k++) top[k] = vf_set1(-INFINITY);
    int64_t i = 0;
    for (; i + 4 * AE_VL <= n; i += 4 * AE_VL)
        for (int k = 0; k < 4; k++) {
            const vf v = vf_load(x + i + k * AE_VL);
            top[k] = vf_max(v, top[k]);
            odd |= (vi)(v != v);
        }
    float m = vf_hmax(vf_max(vf_max(top[0], top[1]), vf_max(top[2], top[3])));
    int nan = any_lane(odd) != 0;
    for (; i < n; i++) {
        m = x[i] > m ? x[i] : m;
        nan |= x[i] != x[i];
    }
    *best = nan ? NAN : m;
    for (i = 0; i + AE_VL <= n && !any_lane((vi)(vf_load(x + i) == vf_set1(m))); i += AE_VL) {}
    for (; i < n; i++)
        if (x[i] == m) return (int32_t)i;
    return 0;
}

/* Sum of e^(x - best), in four vectors of partial sums. */
static float exp_sum_of(const float *x, int64_t n, float best)
{
    const vf m = vf_set1(best);
    vf s[4];
    for (int k = 0; k < 4; k++) s[k] = vf_set1(0.0f);
    int64_t i = 0;
    for (; i + 4 * AE_VL <= n; i += 4 * AE_VL)
        for (int k = 0; k < 4; k++) s[k] += vf_exp(vf_load(x + i + k * AE_VL) - m);
    for (; i + AE_VL <= n; i += AE_VL) s[0] += vf_exp(vf_load(x + i) - m);
    float tail[AE_VL];
    for (int k = 0; k < AE_VL; k++) tail[k] = i + k < n ? x[i + k] : -INFINITY;
    s[1] += vf_exp(vf_load(tail) - m);
    return vf_sum((s[0] + s[1]) + (s[2] + s[3]));
}

/* The same of z <= 0 with every term added in fp64, for cuts that compare sums of few terms with the whole. */
static double exact_exp_sum_of(const float *z, int64_t n)
{
    double sum = 0.0;
    for (int64_t i = 0; i < n; i += AE_VL) {
        float t[AE_VL];
        vf_store(t, vf_exp(n - i >= AE_VL ? vf_load(z + i) : vf_get_part(z, i, (int)(n - i), 0)));
        for (int64_t k = 0; k < AE_VL && i + k < n; k++) sum += (double)t[k];
    }
    return sum;
}

#endif
