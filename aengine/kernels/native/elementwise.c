/* Row-wise and element-wise operations: norms, gated activations, sums, rotary embedding.
 *
 * fp32 arithmetic, one rounding to the element type at each store. An element's place in its row decides whether it is
 * computed in a full vector or in the padded last one; both do the same operations, and rows are never cut between
 * threads. Threads are woken only for work of some 10 us.
 */
#include "elementwise.h"
#include "internal.h"

#include <math.h>

/* Elements one thread handles in some 3 to 5 us. */
#define AE_GRAIN 8192

/* x + residual is stored first and read back, so that the norm sees what the next layer will see. */
AE_INLINE void norm_row(const ae_rms_norm_args *a, int64_t row, const int bf16, const int w_bf16)
{
    const int64_t dim = a->dim, out = row * dim;
    int64_t from = row / a->inner * a->stride0 + row % a->inner * a->stride1;
    const void *x = a->x;
    if (a->residual) {
        for (int64_t i = 0; i < dim; i += AE_VL)
            put_vec(a->sum, out + i, dim - i,
                    get_vec(x, from + i, dim - i, bf16) + get_vec(a->residual, out + i, dim - i, bf16), bf16);
        x = a->sum;
        from = out;
    }
    vf s0 = vf_set1(0.0f), s1 = s0; /* vectors 0, 2, 4 .. and 1, 3, 5 .. */
    int64_t i = 0;
    for (; i + 2 * AE_VL <= dim; i += 2 * AE_VL) {
        vf v0 = vf_get(x, from + i, bf16), v1 = vf_get(x, from + i + AE_VL, bf16);
        s0 = vf_fma(v0, v0, s0);
        s1 = vf_fma(v1, v1, s1);
    }
    for (; i < dim; i += AE_VL) {
        vf v = get_vec(x, from + i, dim - i, bf16);
        s0 = vf_fma(v, v, s0);
    }
    const vf inv = vf_set1(1.0f / sqrtf(vf_sum(s0 + s1) / (float)dim + (float)a->eps));
    for (i = 0; i < dim; i += AE_VL) {
        vf v = get_vec(x, from + i, dim - i, bf16) * inv;
        put_vec(a->out, out + i, dim - i, v * get_vec(a->weight, i, dim - i, w_bf16), bf16);
    }
}

static void norm_part(void *arg, int part, int parts)
{
    const ae_rms_norm_args *a = arg;
    const int w_bf16 = a->weight_dtype == AE_BF16;
    for (int64_t r = a->rows * part / parts; r < a->rows * (part + 1) / parts; r++) {
        if (a->dtype == AE_F32 && !w_bf16)
            norm_row(a, r, 0, 0);
        else if (a->dtype == AE_F32)
            norm_row(a, r, 0, 1);
        else if (!w_bf16)
            norm_row(a, r, 1, 0);
        else
            norm_row(a, r, 1, 1);
    }
}

int AE_FN(rms_norm)(ae_context *ctx, const ae_rms_norm_args *a)
{
    ae_pool_run(ctx->pool, norm_part, (void *)a, ae_row_parts(ctx, a->rows, a->dim, AE_GRAIN));
    return AE_OK;
}

AE_INLINE void add_range(const ae_add_args *a, int64_t i0, int64_t i1, const int bf16)
{
    for (int64_t i = i0; i < i1; i += AE_VL) {
        vf x = get_vec(a->x, i, i1 - i, bf16);
        vf y = a->y ? x + get_vec(a->y, i, i1 - i, bf16) : x * vf_set1((float)a->factor);
        put_vec(a->out, i, i1 - i, y, bf16);
    }
}

static void add_part(void *arg, int part, int parts)
{
    const ae_add_args *a = arg;
    const int64_t i0 = a->count * part / parts, i1 = a->count * (part + 1) / parts;
    if (a->dtype == AE_BF16)
        add_range(a, i0, i1, 1);
    else
        add_range(a, i0, i1, 0);
}

int AE_FN(add)(ae_context *ctx, const ae_add_args *a)
{
    ae_pool_run(ctx->pool, add_part, (void *)a, ae_row_parts(ctx, a->count, 1, AE_GRAIN));
    return AE_OK;
}

AE_INLINE void glu_row(const ae_glu_args *a, int64_t row, const int bf16, const int act)
{
    const int64_t f = a->features, from = row * a->stride, out = row * f;
    for (int64_t i = 0; i < f; i += AE_VL) {
        vf g = get_vec(a->gate_up, from + i, f - i, bf16), u = get_vec(a->gate_up, from + f + i, f - i, bf16);
        put_vec(a->out, out + i, f - i, gate(g, act) * u, bf16);
    }
}

static void glu_part(void *arg, int part, int parts)
{
    const ae_glu_args *a = arg;
    for (int64_t r = a->rows * part / parts; r < a->rows * (part + 1) / parts; r++) {
        if (a->dtype == AE_F32)
            a->act ? glu_row(a, r, 0, 1) : glu_row(a, r, 0, 0);
        else
            a->act ? glu_row(a, r, 1, 1) : glu_row(a, r, 1, 0);
    }
}

int AE_FN(glu)(ae_context *ctx, const ae_glu_args *a)
{
    ae_pool_run(ctx->pool, glu_part, (void *)a, ae_row_parts(ctx, a->rows, a->features, AE_GRAIN / 2));
    return AE_OK;
}

AE_INLINE void rope_head(const ae_rope_args *a, int64_t from, int64_t out, int64_t position, const int bf16)
{
    const int64_t h = a->half;
    const float *cos = a->cos + position * h, *sin = a->sin + position * h;
    for (int64_t i = 0; i < h; i += AE_VL) {
        vf x = get_vec(a->x, from + i, h - i, bf16), y = get_vec(a->x, from + h + i, h - i, bf16);
        vf c = get_vec(cos, i, h - i, 0), s = get_vec(sin, i, h - i, 0);
        put_vec(a->out, out + i, h - i, x * c - y * s, bf16);
        put_vec(a->out, out + h + i, h - i, y * c + x * s, bf16);
    }
    const int64_t size = ae_dtype_bytes(a->dtype);
    memcpy((char *)a->out + (out + 2 * h) * size, (const char *)a->x + (from + 2 * h) * size,
           (size_t)((a->head_dim - 2 * h) * size));
}

static void rope_part(void *arg, int part, int parts)
{
    const ae_rope_args *a = arg;
    for (int64_t r = a->rows * part / parts; r < a->rows * (part + 1) / parts; r++)
        for (int64_t h = 0; h < a->heads; h++) {
            const int64_t from = r * a->stride_row + h * a->stride_head, out = (r * a->heads + h) * a->head_dim;
            if (a->dtype == AE_BF16)
                rope_head(a, from, out, a->positions[r], 1);
            else
                rope_head(a, from, out, a->positions[r], 0);
        }
}

int AE_FN(rope)(ae_context *ctx, const ae_rope_args *a)
{
    ae_pool_run(ctx->pool, rope_part, (void *)a, ae_row_parts(ctx, a->rows, a->heads * a->head_dim, AE_GRAIN));
    return AE_OK;
}

AE_INLINE void mul_row(const ae_mul_args *a, int64_t row, const int bf16)
{
    const int64_t n = a->dim, x = row * a->x_stride, y = row * a->y_stride, out = row * n;
    for (int64_t i = 0; i < n; i += AE_VL)
        put_vec(a->out, out + i, n - i, get_vec(a->x, x + i, n - i, bf16) * get_vec(a->y, y + i, n - i, bf16), bf16);
}

static void mul_part(void *arg, int part, int parts)
{
    const ae_mul_args *a = arg;
    for (int64_t r = a->rows * part / parts; r < a->rows * (part + 1) / parts; r++)
        a->dtype == AE_BF16 ? mul_row(a, r, 1) : mul_row(a, r, 0);
}

int AE_FN(mul)(ae_context *ctx, const ae_mul_args *a)
{
    ae_pool_run(ctx->pool, mul_part, (void *)a, ae_row_parts(ctx, a->rows, a->dim, AE_GRAIN));
    return AE_OK;
}

AE_INLINE void scale_row(const ae_scale_positions_args *a, int64_t row, const int bf16)
{
    const int64_t n = a->head_dim;
    const vf factor = vf_set1(a->factors[a->positions[row]]);
    for (int64_t h = 0; h < a->heads; h++) {
        const int64_t from = row * a->stride_row + h * a->stride_head, out = (row * a->heads + h) * n;
        for (int64_t i = 0; i < n; i += AE_VL)
            put_vec(a->out, out + i, n - i, get_vec(a->x, from + i, n - i, bf16) * factor, bf16);
    }
}

static void scale_part(void *arg, int part, int parts)
{
    const ae_scale_positions_args *a = arg;
    for (int64_t r = a->rows * part / parts; r < a->rows * (part + 1) / parts; r++)
        a->dtype == AE_BF16 ? scale_row(a, r, 1) : scale_row(a, r, 0);
}

int AE_FN(scale_positions)(ae_context *ctx, const ae_scale_positions_args *a)
{
    ae_pool_run(ctx->pool, scale_part, (void *)a, ae_row_parts(ctx, a->rows, a->heads * a->head_dim, AE_GRAIN));
    return AE_OK;
}
