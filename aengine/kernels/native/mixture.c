/* Mixtures of experts: choosing, one pass of the expert's linears over the rows that chose it, the weighted sum.
 *
 * Experts come in order of their number, so a row sums its own in that order; whatever else an expert's rows are,
 * ae_linear gives each the bits it would have alone. Of equal scores the lower expert is chosen.
 */
#include "elementwise.h"
#include "internal.h"

#include <math.h>

typedef struct {
    const ae_mixture_args *a;
    int64_t expert, count; /* rows in a->members; their place among the chosen is found again, top_k is small */
} mix_job;

static float score_of(const ae_mixture_args *a, int64_t i)
{
    return a->dtype == AE_BF16 ? bf16_to_f32(((const uint16_t *)a->scores)[i]) : ((const float *)a->scores)[i];
}

static float exp_of(float x)
{
    float t[AE_VL];
    vf_store(t, vf_exp(vf_set1(x)));
    return t[0];
}

/* The top_k experts of a row, best first, and their weights. A score that is NaN is never better. */
static void choose_row(const ae_mixture_args *a, int64_t row)
{
    int32_t *chosen = a->chosen + row * a->top_k;
    float *weight = a->weights + row * a->top_k;
    int64_t held = 0;
    for (int64_t e = 0; e < a->experts; e++) {
        const float s = score_of(a, row * a->experts + e);
        int64_t at = held < a->top_k ? held : a->top_k;
        while (at > 0 && s > weight[at - 1]) at--;
        if (at == a->top_k) continue;
        if (held < a->top_k) held++;
        for (int64_t i = held - 1; i > at; i--) weight[i] = weight[i - 1], chosen[i] = chosen[i - 1];
        weight[at] = s;
        chosen[at] = (int32_t)e;
    }
    float sum = 0.0f;
    const float top = weight[0];
    for (int64_t i = 0; i < a->top_k; i++) {
        weight[i] = a->scoring == 0 ? exp_of(weight[i] - top) : 1.0f / (1.0f + exp_of(-weight[i]));
        sum += weight[i];
    }
    for (int64_t i = 0; i < a->top_k && a->scoring == 0; i++) weight[i] /= sum;
}

static void choose_part(void *arg, int part, int parts)
{
    const ae_mixture_args *a = ((const mix_job *)arg)->a;
    for (int64_t r = a->rows * part / parts; r < a->rows * (part + 1) / parts; r++) {
        choose_row(a, r);
        memset(a->total + r * a->dim, 0, (size_t)a->dim * 4);
    }
}

static float weight_of(const mix_job *job, int64_t row)
{
    const ae_mixture_args *a = job->a;
    for (int64_t i = 0; i < a->top_k; i++)
        if (a->chosen[row * a->top_k + i] == job->expert) return a->weights[row * a->top_k + i];
    return 0.0f;
}

static void gather_part(void *arg, int part, int parts)
{
    const mix_job *job = arg;
    const ae_mixture_args *a = job->a;
    const int bf16 = a->dtype == AE_BF16;
    for (int64_t i = job->count * part / parts; i < job->count * (part + 1) / parts; i++) {
        const int64_t from = a->members[i] * a->dim, to = i * a->dim;
        const vf weight = vf_set1(a->weigh == 0 ? weight_of(job, a->members[i]) : 1.0f);
        for (int64_t d = 0; d < a->dim; d += AE_VL)
            put_vec(a->gathered, to + d, a->dim - d, get_vec(a->x, from + d, a->dim - d, bf16) * weight, bf16);
    }
}

static void activate_part(void *arg, int part, int parts)
{
    const mix_job *job = arg;
    const ae_mixture_args *a = job->a;
    const int bf16 = a->dtype == AE_BF16;
    const vf limit = vf_set1((float)a->limit), alpha = vf_set1((float)a->alpha), one = vf_set1(1.0f);
    for (int64_t i = job->count * part / parts; i < job->count * (part + 1) / parts; i++)
        for (int64_t f = 0; f < a->ffn; f += AE_VL) {
            const int64_t n = a->ffn - f;
            vf g = get_vec(a->wide, 2 * i * a->ffn + f, n, bf16), u = get_vec(a->wide, (2 * i + 1) * a->ffn + f, n, bf16);
            if (a->activation == 0) {
                put_vec(a->active, i * a->ffn + f, n, gate(g, 0) * u, bf16);
            } else { /* the second operand of vf_min and vf_max is what NaN becomes: keep it NaN */
                g = vf_min(limit, g);
                u = vf_max(-limit, vf_min(limit, u));
                put_vec(a->active, i * a->ffn + f, n, (u + one) * (g / (one + vf_exp(-(g * alpha)))), bf16);
            }
        }
}

static void sum_part(void *arg, int part, int parts)
{
    const mix_job *job = arg;
    const ae_mixture_args *a = job->a;
    const int bf16 = a->dtype == AE_BF16;
    for (int64_t i = job->count * part / parts; i < job->count * (part + 1) / parts; i++) {
        const int64_t row = a->members[i];
        const vf weight = vf_set1(a->weigh == 1 ? weight_of(job, row) : 1.0f);
        for (int64_t d = 0; d < a->dim; d += AE_VL) {
            const int64_t n = a->dim - d, to = row * a->dim + d;
            const vf part_sum = get_vec(a->results, i * a->dim + d, n, bf16) * weight;
            put_vec(a->total, to, n, get_vec(a->total, to, n, 0) + part_sum, 0);
        }
    }
}

static void finish_part(void *arg, int part, int parts)
{
    const ae_mixture_args *a = ((const mix_job *)arg)->a;
    const int64_t n = a->rows * a->dim, i1 = n * (part + 1) / parts;
    for (int64_t i = n * part / parts; i < i1; i += AE_VL)
        put_vec(a->out, i, i1 - i, get_vec(a->total, i, i1 - i, 0), a->dtype == AE_BF16);
}

static int64_t find_members(const mix_job *job)
{
    const ae_mixture_args *a = job->a;
    int64_t count = 0;
    for (int64_t r = 0; r < a->rows; r++)
        for (int64_t i = 0; i < a->top_k; i++)
            if (a->chosen[r * a->top_k + i] == job->expert) a->members[count++] = (int32_t)r;
    return count;
}

static int project(ae_context *ctx, const ae_linear_args *template, const void *x, void *y, int64_t rows)
{
    ae_linear_args args = *template;
    args.x = x;
    args.y = y;
    args.rows = rows;
    return ctx->kernels->linear(ctx, &args);
}

static void run(ae_context *ctx, ae_task task, mix_job *job, int64_t rows, int64_t elements)
{
    ae_pool_run(ctx->pool, task, job, (int)ae_min(ae_parts(ctx, rows * elements, 16384), ae_max(rows, 1)));
}

int AE_FN(mixture)(ae_context *ctx, const ae_mixture_args *a)
{
    mix_job job = {.a = a};
    run(ctx, choose_part, &job, a->rows, a->dim + a->experts);
    for (job.expert = 0; job.expert < a->experts; job.expert++) {
        if (!(job.count = find_members(&job))) continue;
        run(ctx, gather_part, &job, job.count, a->dim);
        int status = project(ctx, &a->gate_up[job.expert], a->gathered, a->wide, job.count);
        if (status) return status;
        run(ctx, activate_part, &job, job.count, a->ffn);
        status = project(ctx, &a->down[job.expert], a->active, a->results, job.count);
        if (status) return status;
        run(ctx, sum_part, &job, job.count, a->dim);
    }
    run(ctx, finish_part, &job, a->rows, a->dim);
    return AE_OK;
}
