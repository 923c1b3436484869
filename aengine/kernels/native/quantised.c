/* y = x weight^T + bias with integer weights: activations rounded to int8 per row and 32 inputs, exact integer products.
 *
 * y[r, o] = sum over units of scale_x * (scale_w * dot) + minimum_w * (scale_x * sum of x codes), units rising, two fused
 * multiply-adds each (a group of 16 inputs: per half unit). A lane is an output and owns this chain, so that no bit
 * depends on how many rows stand beside it or who computes it.
 *
 * Few rows: one tile passes over the packed codes as they stream in, and takes nibbles apart itself. Many: a panel is
 * taken apart once into a scratch of some KiB, and the tiles of a block of rows read that. As in gemm.c, threads split
 * the panels when there are few rows and the rows when there are many.
 */
#include "activations.h"
#include "internal.h"
#include "quantised.h"
#include "store.h"

/* Rows of tiles, rising. Where products come out of the instruction set, AVX2's 16 registers hold 6 rows x 2 integer sums,
 * two vectors of codes, one of x and one product. */
#if AE_VL == 16 && AE_FAST_STEP
#define AE_QR 8
#define AE_EACH_QR(CASE) CASE(1) CASE(2) CASE(4) CASE(8)
#elif AE_FAST_STEP
#define AE_QR 6
#define AE_EACH_QR(CASE) CASE(1) CASE(2) CASE(4) CASE(6)
#else
#define AE_QR 2
#define AE_EACH_QR(CASE) CASE(1) CASE(2)
#endif
#define QR_ENTRY(MR) MR,
static const int tile_rows[] = {AE_EACH_QR(QR_ENTRY)};

/* Activations of one block, bytes: half of a 512 KiB second-level cache. */
#define AE_BLOCK_BYTES (256 * 1024)
/* Rows per thread from which splitting rows beats splitting panels. */
#define AE_ROWS_PER_THREAD 96
/* Bytes of codes ahead of the one in use that a single tile asks for. */
#define AE_AHEAD 2048

/* ---- activations ---- */

typedef struct {
    const ae_linear_args *args;
    ae_x_unit *x; /* [rows][units] */
    int64_t units;
} quantise_job;

static void quantise_part(void *arg, int part, int parts)
{
    const quantise_job *job = arg;
    const ae_linear_args *a = job->args;
    for (int64_t r = a->rows * part / parts; r < a->rows * (part + 1) / parts; r++) {
        const char *from = (const char *)a->x + r * a->x_stride * ae_dtype_bytes(a->x_dtype);
        if (a->x_dtype == AE_BF16)
            quantise_row(from, 1, a->in_features, job->x + r * job->units);
        else
            quantise_row(from, 0, a->in_features, job->x + r * job->units);
    }
}

/* ---- tiles ---- */

typedef struct {
    const uint8_t *codes;
    const char *scale; /* [group][outputs], fp32 or fp16 */
    const char *minimum;
    int64_t units;
    int64_t group_units; /* units that share a scale */
    int f16;
    int streams; /* the codes come from memory: ask for them ahead */
} code_block;

/* How the two code vectors of a step are stored: as nibbles of one, or one after the other. */
enum { AE_NIBBLES, AE_BYTES };

AE_INLINE void load_codes(const uint8_t *p, const int kind, vu *w0, vu *w1)
{
    const vu v = *(const vu_mem *)p;
    if (kind == AE_NIBBLES) {
        *w0 = v & 0x0f0f0f0f;
        *w1 = (v >> 4) & 0x0f0f0f0f;
    } else {
        *w0 = v;
        *w1 = *(const vu_mem *)(p + 4 * AE_VL);
    }
}

AE_INLINE vu four_codes(const int8_t *p)
{
    uint32_t x;
    memcpy(&x, p, 4);
    return (vu){0} + x;
}

AE_INLINE vf load_scale(const char *p, int column, int f16)
{
    return f16 ? vf_load_f16((const uint16_t *)p + column * AE_VL) : vf_load((const float *)p + column * AE_VL);
}

AE_INLINE void fetch(const void *p, int64_t from, int64_t to)
{
    for (int64_t i = from; i < to; i += 64) __builtin_prefetch((const char *)p + i, 0, 2);
}

/* The integer of output vector `column` of a row. `which` of a unit's offsets. */
AE_INLINE vi code_dot(const int wide8, const vi *sums, int column, const ae_x_unit *x, int which)
{
#if AE_SPLIT
    const vi dot = wide8 ? codes_total(sums[0]) + codes_times(sums[1], 16) : codes_total(sums[column]);
#else
    const vi dot = codes_total(sums[column]);
#endif
    return wide8 ? dot + x->offsets[which] : dot;
}

/* Integer sums of mr rows into their fp32 sums: those of `acc` when `keep`, of c otherwise. */
AE_INLINE void add_group(const int mr, const int wide8, const int keep, const int which, vi sums[][2], const ae_x_unit *x,
                         int64_t ldx, const char *scale, const char *minimum, int f16, vf acc[][2], float *c)
{
    const int columns = wide8 && AE_SPLIT ? 1 : 2;
    vf s[2], m[2];
    for (int k = 0; k < columns; k++) {
        s[k] = load_scale(scale, k, f16);
        m[k] = minimum ? load_scale(minimum, k, f16) : vf_set1(0.0f);
    }
    AE_UNROLL
    for (int i = 0; i < mr; i++) {
        const ae_x_unit *xi = x + i * ldx;
        const vf sx = vf_set1(xi->scale), sum_x = vf_set1(xi->sums[which]);
        AE_UNROLL
        for (int k = 0; k < columns; k++) {
            float *at = c + (i * columns + k) * AE_VL;
            const vf part = s[k] * __builtin_convertvector(code_dot(wide8, sums[i], k, xi, which), vf);
            vf sum = vf_fma(sx, part, keep ? acc[i][k] : vf_load(at));
            if (minimum) sum = vf_fma(m[k], sum_x, sum);
            if (keep)
                acc[i][k] = sum;
            else
                vf_store(at, sum);
        }
    }
}

/* c [mr][outputs of the panel] = the product of mr rows of units with a panel. All but the last three are constants. Of
 * many rows the fp32 sums live in c, so that the integer sums have the registers. */
AE_INLINE void code_tile(const int mr, const int kind, const int wide8, const int halves, const code_block *b,
                         const ae_x_unit *x, int64_t ldx, float *c)
{
    const int columns = wide8 && AE_SPLIT ? 1 : 2, keep = mr <= AE_QR / 2;
    const int64_t step_bytes = kind == AE_NIBBLES ? 4 * AE_VL : 8 * AE_VL;
    const int64_t scale_bytes = columns * AE_VL * (b->f16 ? 2 : 4);
    const int f16 = b->f16, streams = b->streams;
    const uint8_t *codes = b->codes;
    const char *scale = b->scale, *minimum = b->minimum;
    int64_t left = b->group_units;
    vf acc[AE_QR][2];
    AE_UNROLL
    for (int i = 0; i < mr; i++)
        for (int k = 0; k < columns; k++) {
            acc[i][k] = vf_set1(0.0f);
            if (!keep) vf_store(c + (i * columns + k) * AE_VL, acc[i][k]);
        }
    for (int64_t u = 0; u < b->units; u++, x++, codes += AE_STEPS * step_bytes) {
        vi sums[AE_QR][2];
        if (streams) fetch(codes + AE_AHEAD, 0, AE_STEPS * step_bytes);
        AE_UNROLL
        for (int h = 0; h < 2; h++) {
            AE_UNROLL
            for (int i = 0; i < mr; i++)
                if (h == 0 || halves) sums[i][0] = sums[i][1] = (vi)vf_set1(0.0f);
            AE_UNROLL_STEPS
            for (int j = 4 * h; j < 4 * h + 4; j++) {
                vu w0, w1;
                load_codes(codes + j * step_bytes, kind, &w0, &w1);
                AE_UNROLL
                for (int i = 0; i < mr; i++) {
                    const vu xj = four_codes(x[i * ldx].code + 4 * j);
                    sums[i][0] = codes_step(sums[i][0], w0, xj);
                    AE_PIN(sums[i][0]);
                    sums[i][1] = codes_step(sums[i][1], w1, xj);
                    AE_PIN(sums[i][1]);
                }
            }
            if (h == 0 && !halves) continue;
            if (minimum)
                add_group(mr, wide8, keep, halves ? 1 + h : 0, sums, x, ldx, scale, minimum, f16, acc, c);
            else
                add_group(mr, wide8, keep, halves ? 1 + h : 0, sums, x, ldx, scale, NULL, f16, acc, c);
            if (halves || --left == 0) {
                scale += scale_bytes;
                if (minimum) minimum += scale_bytes;
                left = b->group_units;
            }
        }
    }
    AE_UNROLL
    for (int i = 0; i < mr && keep; i++)
        for (int k = 0; k < columns; k++) vf_store(c + (i * columns + k) * AE_VL, acc[i][k]);
}

typedef void (*code_tile_fn)(const code_block *, const ae_x_unit *x, int64_t ldx, float *c);
#define CODE_TILE(KIND, WIDE8, HALVES, MR)                                                                            \
    static __attribute__((noinline)) void tile_##KIND##_##WIDE8##_##HALVES##_##MR(                                    \
        const code_block *b, const ae_x_unit *x, int64_t ldx, float *c)                                               \
    {                                                                                                                 \
        code_tile(MR, KIND, WIDE8, HALVES, b, x, ldx, c);                                                             \
    }
#define CODE_TILES(MR)                                                                                                \
    CODE_TILE(AE_NIBBLES, 0, 0, MR) CODE_TILE(AE_NIBBLES, 0, 1, MR)                                                   \
    CODE_TILE(AE_BYTES, 0, 0, MR) CODE_TILE(AE_BYTES, 0, 1, MR)                                                       \
    CODE_TILE(AE_BYTES, 1, 0, MR) CODE_TILE(AE_BYTES, 1, 1, MR)
AE_EACH_QR(CODE_TILES)
#if AE_SPLIT
#define SPLIT_TILES(MR) CODE_TILE(AE_NIBBLES, 1, 0, MR) CODE_TILE(AE_NIBBLES, 1, 1, MR)
AE_EACH_QR(SPLIT_TILES)
#define SPLIT_ENTRY(HALVES, MR) tile_AE_NIBBLES_1_##HALVES##_##MR
#else
#define SPLIT_ENTRY(HALVES, MR) NULL
#endif
#define TILE_ENTRIES(MR)                                                                                              \
    {{{tile_AE_NIBBLES_0_0_##MR, tile_AE_NIBBLES_0_1_##MR}, {SPLIT_ENTRY(0, MR), SPLIT_ENTRY(1, MR)}},                \
     {{tile_AE_BYTES_0_0_##MR, tile_AE_BYTES_0_1_##MR}, {tile_AE_BYTES_1_0_##MR, tile_AE_BYTES_1_1_##MR}}},
/* [as in tile_rows][kind][8 bits][groups of 16] */
static const code_tile_fn code_tiles[][2][2][2] = {AE_EACH_QR(TILE_ENTRIES)};

/* ---- the product ---- */

typedef struct {
    const ae_linear_args *args;
    const ae_x_unit *x;
    int64_t units, block_rows;
    int row_parts;
    char *scratch[AE_MAX_THREADS];
} code_job;

/* Scratch of a part: a panel's codes as bytes, its scale and minimum as fp32, the sums of a tile. */
typedef struct {
    size_t codes, scale, sums, total;
} scratch_layout;

static scratch_layout scratch_of(int64_t units)
{
    const size_t codes = (size_t)(units * 8 * AE_STEPS * AE_VL), scale = (size_t)(units * 2 * AE_PANEL4 * 4);
    return (scratch_layout){codes, scale, AE_QR * AE_PANEL4 * 4, codes + 2 * scale + AE_QR * AE_PANEL4 * 4};
}

static code_block block_at(const ae_segment *s, int64_t panel, int64_t in_features)
{
    const int64_t units = code_units(in_features), wide = code_panel(s->bits);
    const int64_t scales = code_groups(in_features, s->group) * wide * ae_dtype_bytes(s->scale_dtype);
    return (code_block){
        .codes = (const uint8_t *)s->codes + panel * units * AE_UNIT_BYTES(s->bits),
        .scale = (const char *)s->scale + panel * scales,
        .minimum = s->minimum ? (const char *)s->minimum + panel * scales : NULL,
        .units = units,
        .group_units = ae_max(1, s->group / AE_UNIT),
        .f16 = s->scale_dtype == AE_F16,
        .streams = 1,
    };
}

static const char *widen_scale(const char *from, int64_t count, char *to)
{
    for (int64_t i = 0; i < count; i += AE_VL) vf_store((float *)to + i, vf_load_f16((const uint16_t *)from + i));
    return to;
}

/* The same panel, its codes as bytes and its scale as fp32 in scratch where they are not so already. */
static code_block taken_apart(const code_block *b, const ae_segment *s, int64_t in_features, char *scratch)
{
    const scratch_layout at = scratch_of(b->units);
    const int64_t count = code_groups(in_features, s->group) * code_panel(s->bits);
    code_block out = *b;
    out.streams = 0;
    if (s->bits == 4 || AE_SPLIT) {
        vu_mem *to = (vu_mem *)scratch;
        for (int64_t i = 0; i < b->units * AE_STEPS; i++) {
            vu w0, w1;
            load_codes(b->codes + i * 4 * AE_VL, AE_NIBBLES, &w0, &w1);
            to[2 * i] = w0;
            to[2 * i + 1] = w1;
        }
        out.codes = (const uint8_t *)scratch;
    }
    if (b->f16) {
        out.scale = widen_scale(b->scale, count, scratch + at.codes);
        if (b->minimum) out.minimum = widen_scale(b->minimum, count, scratch + at.codes + at.scale);
        out.f16 = 0;
    }
    return out;
}

/* One panel by the rows [row, row + rows). */
static void panel_rows(const code_job *job, const ae_segment *s, int64_t panel, int64_t first_out, int64_t row,
                       int64_t rows, char *scratch)
{
    const ae_linear_args *a = job->args;
    const int64_t wide = code_panel(s->bits), width = ae_min(wide, s->out_features - panel * wide);
    const int64_t out = first_out + panel * wide;
    const int64_t bytes = job->units * AE_UNIT_BYTES(s->bits);
    const int apart = rows > AE_QR;
    const scratch_layout at = scratch_of(job->units);
    float *sums = (float *)(scratch + at.codes + 2 * at.scale);
    code_block b = block_at(s, panel, a->in_features);
    const uint8_t *next = b.codes + bytes;
    int kind = s->bits == 4 || AE_SPLIT ? AE_NIBBLES : AE_BYTES;
    if (apart) {
        b = taken_apart(&b, s, a->in_features, scratch);
        kind = AE_BYTES;
    }
    int size = (int)(sizeof tile_rows / sizeof *tile_rows) - 1;
    for (int64_t done = 0, mr; done < rows; done += mr) {
        while (tile_rows[size] > rows - done) size--;
        mr = tile_rows[size];
        for (int64_t i = 0; i < mr; i++) __builtin_prefetch((char *)a->y + output_at(a, row + done + i, out), 1, 3);
        if (apart) fetch(next, bytes * done / rows, bytes * (done + mr) / rows);
        code_tiles[size][kind][s->bits == 8][s->group == 16](&b, job->x + (row + done) * job->units, job->units, sums);
        for (int64_t i = 0; i < mr; i++) store_row(a, row + done + i, out, width, sums + i * wide);
    }
}

/* The panels of all segments, as if one list, weighed by their bits: part `part` of `parts`. */
static void panels_rows(const code_job *job, int part, int parts, int64_t row, int64_t rows, char *scratch)
{
    const ae_quantised *w = job->args->weight;
    int64_t total = 0, before = 0, out = 0;
    for (int64_t i = 0; i < w->count; i++)
        total += ae_ceil_div(w->segments[i].out_features, code_panel(w->segments[i].bits)) * AE_UNIT_BYTES(w->segments[i].bits);
    const int64_t low = total * part / parts, high = total * (part + 1) / parts;
    for (int64_t i = 0; i < w->count; i++) {
        const ae_segment *s = &w->segments[i];
        const int64_t panels = ae_ceil_div(s->out_features, code_panel(s->bits)), weight = AE_UNIT_BYTES(s->bits);
        const int64_t p0 = ae_min(panels, ae_max(0, ae_ceil_div(low - before, weight)));
        const int64_t p1 = ae_min(panels, ae_max(0, ae_ceil_div(high - before, weight)));
        for (int64_t p = p0; p < p1; p++) panel_rows(job, s, p, out, row, rows, scratch);
        before += panels * weight;
        out += s->out_features;
    }
}

static void code_part(void *arg, int part, int parts)
{
    const code_job *job = arg;
    const int64_t tiles = ae_ceil_div(job->args->rows, AE_QR);
    const int col_parts = parts / job->row_parts, rp = part / col_parts;
    const int64_t r0 = tiles * rp / job->row_parts * AE_QR;
    const int64_t r1 = ae_min(job->args->rows, tiles * (rp + 1) / job->row_parts * AE_QR);
    for (int64_t row = r0; row < r1; row += job->block_rows)
        panels_rows(job, part % col_parts, col_parts, row, ae_min(job->block_rows, r1 - row), job->scratch[part]);
}

int AE_FN(linear_quantised)(ae_context *ctx, const ae_linear_args *a)
{
    if (a->rows == 0) return AE_OK;
    const int64_t units = code_units(a->in_features), row_bytes = units * (int64_t)sizeof(ae_x_unit);
    quantise_job first = {a, ae_pool_scratch(ctx->pool, AE_SHARED_A, (size_t)(a->rows * row_bytes)), units};
    if (!first.x) return AE_NO_MEMORY;
    /* 32 K activations are about 5 us. */
    ae_pool_run(ctx->pool, quantise_part, &first, (int)ae_min(ae_parts(ctx, a->rows * a->in_features, 32768), a->rows));
    code_job job = {.args = a, .x = first.x, .units = units};
    job.block_rows = ae_max(AE_QR, AE_BLOCK_BYTES / row_bytes / AE_QR * AE_QR);
    /* 64 K weights are about 2 us of reading: less is not worth waking another thread for. */
    int parts = ae_parts(ctx, a->rows * a->out_features * a->in_features, 65536);
    job.row_parts = (int)ae_max(1, ae_min(parts, a->rows / AE_ROWS_PER_THREAD));
    parts = parts / job.row_parts * job.row_parts;
    for (int i = 0; i < parts; i++) {
        job.scratch[i] = ae_pool_scratch(ctx->pool, i, scratch_of(units).total);
        if (!job.scratch[i]) return AE_NO_MEMORY;
    }
    ae_pool_run(ctx->pool, code_part, &job, parts);
    return AE_OK;
}
