/* y = x weight^T + bias with fp32 or bf16 weights in panels.
 *
 * A panel is NR = 2 VL outputs, [in][NR], so that one tile step reads 2 vectors in a row. Threads split the panels when
 * there are few rows (the weights are read once) and the rows when there are many (the activations are). Within a
 * thread, blocks of rows that fit in the second-level cache pass over all its panels; a panel (36 KiB at 576 inputs)
 * stays near while the tiles of the block use it.
 */
#include "internal.h"
#include "store.h"
#include "tile.h"

/* Activations of one block, bytes: half of a 512 KiB second-level cache. */
#define AE_BLOCK_BYTES (256 * 1024)
/* Rows per thread from which splitting rows beats splitting panels. */
#define AE_ROWS_PER_THREAD 96

static void pack_panel(const ae_pack_args *a, int64_t panel)
{
    const int64_t n = a->in_features, first = panel * AE_NR;
    for (int64_t c = 0; c < AE_NR; c++) {
        const int64_t row = first + c, inside = row < a->out_features;
        if (a->dtype == AE_BF16) {
            uint16_t *to = (uint16_t *)a->packed + panel * n * AE_NR + (c < AE_VL ? 2 * c : 2 * (c - AE_VL) + 1);
            const uint16_t *from = (const uint16_t *)a->weight + row * a->stride;
            for (int64_t j = 0; j < n; j++) to[j * AE_NR] = inside ? from[j] : 0;
        } else {
            float *to = (float *)a->packed + panel * n * AE_NR + c;
            const float *from = (const float *)a->weight + row * a->stride;
            for (int64_t j = 0; j < n; j++) to[j * AE_NR] = inside ? from[j] : 0.0f;
        }
    }
}

static void pack_part(void *arg, int part, int parts)
{
    const ae_pack_args *a = arg;
    const int64_t panels = ae_ceil_div(a->out_features, AE_NR);
    for (int64_t p = panels * part / parts; p < panels * (part + 1) / parts; p++) pack_panel(a, p);
}

int AE_FN(pack)(ae_context *ctx, const ae_pack_args *a)
{
    const int64_t panels = ae_ceil_div(a->out_features, AE_NR);
    ae_pool_run(ctx->pool, pack_part, (void *)a, ae_parts(ctx, panels, 4));
    return AE_OK;
}

static __attribute__((noinline)) void store_tile(const ae_linear_args *a, int64_t row, int64_t rows, int64_t out,
                                                 const float *c)
{
    const int64_t width = ae_min(AE_NR, a->out_features - out);
    for (int64_t i = 0; i < rows; i++) store_row(a, row + i, out, width, c + i * AE_NR);
}

typedef struct {
    const ae_linear_args *args;
    const float *x; /* first row of the block, fp32 */
    int64_t ldx;
    int64_t ahead; /* prefetch distance, elements of the weight */
} gemm_block;

AE_INLINE const void *panel_at(const ae_linear_args *a, int64_t panel, int bf16)
{
    const int64_t offset = panel * a->in_features * AE_NR;
    return bf16 ? (const void *)((const uint16_t *)a->weight + offset) : (const void *)((const float *)a->weight + offset);
}

AE_INLINE void gemm_tile(const int mr, const int w_bf16, const gemm_block *b, int64_t r, int64_t row, int64_t panel)
{
    const ae_linear_args *a = b->args;
    vf acc[AE_MR][2];
    AE_UNROLL
    for (int i = 0; i < mr; i++) acc[i][0] = acc[i][1] = vf_set1(0.0f);
    tile_chain(mr, w_bf16, b->x + r * b->ldx, b->ldx, panel_at(a, panel, w_bf16), AE_NR, a->in_features, 1,
               b->ahead, acc);
    float c[AE_MR * AE_NR];
    AE_UNROLL
    for (int i = 0; i < mr; i++) {
        vf_store(c + i * AE_NR, acc[i][0]);
        vf_store(c + i * AE_NR + AE_VL, acc[i][1]);
    }
    store_tile(a, row, mr, panel * AE_NR, c);
}

#define GEMM_TILES(MR)                                                                                                \
    static __attribute__((noinline)) void tile_f32_##MR(const gemm_block *b, int64_t r, int64_t row, int64_t panel)   \
    {                                                                                                                 \
        gemm_tile(MR, 0, b, r, row, panel);                                                                           \
    }                                                                                                                 \
    static __attribute__((noinline)) void tile_bf16_##MR(const gemm_block *b, int64_t r, int64_t row, int64_t panel)  \
    {                                                                                                                 \
        gemm_tile(MR, 1, b, r, row, panel);                                                                           \
    }
AE_EACH_MR(GEMM_TILES)

typedef void (*tile_fn)(const gemm_block *, int64_t r, int64_t row, int64_t panel);
#define F32_ENTRY(MR) tile_f32_##MR,
#define BF16_ENTRY(MR) tile_bf16_##MR,
static const tile_fn tiles_f32[] = {NULL, AE_EACH_MR(F32_ENTRY)};
static const tile_fn tiles_bf16[] = {NULL, AE_EACH_MR(BF16_ENTRY)};

/* One row: two panels side by side, twice the chains in flight of a single panel (the chain of a lane is the same). */
AE_INLINE void gemv_pair(const int w_bf16, const gemm_block *b, int64_t r, int64_t row, int64_t panel)
{
    const ae_linear_args *a = b->args;
    const float *x = b->x + r * b->ldx;
    const void *wa = panel_at(a, panel, w_bf16), *wb = panel_at(a, panel + 1, w_bf16);
    vf a0 = vf_set1(0.0f), a1 = a0, b0 = a0, b1 = a0;
    for (int64_t j = 0; j < a->in_features; j++) {
        const vf xj = vf_set1(x[j]);
        vf w0, w1;
        load_w(wa, j * AE_NR, w_bf16, &w0, &w1);
        a0 = vf_fma(xj, w0, a0);
        a1 = vf_fma(xj, w1, a1);
        load_w(wb, j * AE_NR, w_bf16, &w0, &w1);
        b0 = vf_fma(xj, w0, b0);
        b1 = vf_fma(xj, w1, b1);
    }
    const vf c[2][2] = {{a0, a1}, {b0, b1}};
    store_tile(a, row, 1, panel * AE_NR, (const float *)c[0]);
    store_tile(a, row, 1, (panel + 1) * AE_NR, (const float *)c[1]);
}

static void gemv(const gemm_block *b, int64_t row, int64_t p0, int64_t p1)
{
    const int bf16 = b->args->weight_dtype == AE_BF16;
    int64_t p = p0;
    for (; p + 2 <= p1; p += 2) {
        if (bf16)
            gemv_pair(1, b, 0, row, p);
        else
            gemv_pair(0, b, 0, row, p);
    }
    if (p < p1) (bf16 ? tiles_bf16 : tiles_f32)[1](b, 0, row, p);
}

static void gemm_rows(const gemm_block *b, int64_t row, int64_t rows, int64_t p0, int64_t p1)
{
    if (rows == 1) {
        gemv(b, row, p0, p1);
        return;
    }
    const tile_fn *tiles = b->args->weight_dtype == AE_BF16 ? tiles_bf16 : tiles_f32;
    for (int64_t p = p0; p < p1; p++)
        for (int64_t r = 0; r < rows; r += AE_MR) tiles[ae_min(AE_MR, rows - r)](b, r, row + r, p);
}

/* A single tile streams its panel: 64 steps (4 KiB of fp32) ahead. Several tiles pass over it: they fetch the next one. */
static int64_t prefetch_distance(const ae_linear_args *a, int64_t rows)
{
    return rows <= AE_MR ? 64 * AE_NR : a->in_features * AE_NR;
}

/* Rows [row, row + rows) of bf16 activations as fp32. */
static void widen_rows(const ae_linear_args *a, int64_t row, int64_t rows, float *to)
{
    const int64_t n = a->in_features;
    for (int64_t r = 0; r < rows; r++, to += n) {
        const uint16_t *from = (const uint16_t *)a->x + (row + r) * a->x_stride;
        int64_t j = 0;
        for (; j + AE_VL <= n; j += AE_VL) vf_store(to + j, vf_load_bf16(from + j));
        for (; j < n; j++) to[j] = bf16_to_f32(from[j]);
    }
}

typedef struct {
    const ae_linear_args *args;
    int64_t block_rows;
    int row_parts;
    float *widened[AE_MAX_THREADS]; /* per part, block_rows x in_features, for bf16 activations */
} gemm_job;

static void gemm_part(void *arg, int part, int parts)
{
    const gemm_job *job = arg;
    const ae_linear_args *a = job->args;
    const int col_parts = parts / job->row_parts, rp = part / col_parts, cp = part % col_parts;
    const int64_t panels = ae_ceil_div(a->out_features, AE_NR), row_tiles = ae_ceil_div(a->rows, AE_MR);
    const int64_t p0 = panels * cp / col_parts, p1 = panels * (cp + 1) / col_parts;
    const int64_t r0 = row_tiles * rp / job->row_parts * AE_MR;
    const int64_t r1 = ae_min(a->rows, row_tiles * (rp + 1) / job->row_parts * AE_MR);
    for (int64_t row = r0; row < r1; row += job->block_rows) {
        const int64_t rows = ae_min(job->block_rows, r1 - row);
        gemm_block b = {a, (const float *)a->x + row * a->x_stride, a->x_stride, prefetch_distance(a, rows)};
        if (a->x_dtype == AE_BF16) {
            widen_rows(a, row, rows, job->widened[part]);
            b.x = job->widened[part];
            b.ldx = a->in_features;
        }
        gemm_rows(&b, row, rows, p0, p1);
    }
}

int AE_FN(linear_quantised)(ae_context *, const ae_linear_args *);

int AE_FN(linear)(ae_context *ctx, const ae_linear_args *a)
{
    if (a->weight_dtype == AE_QUANTISED) return AE_FN(linear_quantised)(ctx, a);
    const int64_t row_bytes = 4 * a->in_features;
    const int64_t panels = ae_ceil_div(a->out_features, AE_NR);
    gemm_job job = {.args = a};
    job.block_rows = ae_min(ae_round_up(a->rows, AE_MR), ae_max(AE_MR, AE_BLOCK_BYTES / row_bytes / AE_MR * AE_MR));
    /* 16 K weights is about 2 us of reading: less is not worth waking another thread for. */
    int parts = ae_parts(ctx, a->rows * panels * a->in_features * AE_NR, 16384);
    job.row_parts = (int)ae_max(1, ae_min(parts, a->rows / AE_ROWS_PER_THREAD));
    const int col_parts = (int)ae_min(parts / job.row_parts, panels);
    parts = job.row_parts * col_parts;
    for (int i = 0; a->x_dtype == AE_BF16 && i < parts; i++) {
        job.widened[i] = ae_pool_scratch(ctx->pool, i, (size_t)(job.block_rows * row_bytes));
        if (!job.widened[i]) return AE_NO_MEMORY;
    }
    ae_pool_run(ctx->pool, gemm_part, &job, parts);
    return AE_OK;
}
