/* Statistics of rows of logits: the best token and log sum exp. A row is read by one thread, in a fixed order. */
#include "internal.h"
#include "simd.h"

#include <math.h>

/* First index of the greatest value; NaN never wins unless it stands first. */
static int32_t argmax_row(const float *x, int64_t n, float *best)
{
    vf top = vf_set1(-INFINITY);
    int64_t i = 0;
    for (; i + AE_VL <= n; i += AE_VL) top = vf_max(vf_load(x + i), top);
    float m = vf_hmax(top);
    for (; i < n; i++) m = x[i] > m ? x[i] : m;
    *best = m;
    for (i = 0; i < n; i++)
        if (x[i] == m) return (int32_t)i;
    return 0;
}

/* Four vectors of partial sums; exponentials of values relative to the greatest. */
static float log_sum_exp_row(const float *x, int64_t n, float best)
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
    return best + logf(vf_sum((s[0] + s[1]) + (s[2] + s[3])));
}

static void stats_part(void *arg, int part, int parts)
{
    const ae_row_stats_args *a = arg;
    for (int64_t r = a->rows * part / parts; r < a->rows * (part + 1) / parts; r++) {
        const float *x = a->logits + r * a->stride;
        float best;
        const int32_t index = argmax_row(x, a->vocab, &best);
        if (a->best) a->best[r] = index;
        if (a->log_sum_exp) a->log_sum_exp[r] = log_sum_exp_row(x, a->vocab, best);
    }
}

int AE_FN(row_stats)(ae_context *ctx, const ae_row_stats_args *a)
{
    ae_pool_run(ctx->pool, stats_part, (void *)a, (int)ae_min(ae_parts(ctx, a->rows * a->vocab, 16384), a->rows));
    return AE_OK;
}
