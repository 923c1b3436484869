/* y = x weight^T + bias with integer weights: activations rounded to int8 per row and 32 inputs, exact integer products.
 *
 * y[r, o] = sum over units of scale_x * (scale_w * dot) + minimum_w * (scale_x * sum of x codes), units rising, two fused
 * multiply-adds each (a group of 16 inputs: per half unit). A lane is an output and owns this chain, so that no bit
 * depends on how many rows stand beside it or who computes it.
 *
 * Few rows: one tile passes over the packed codes as they stream in, and takes them apart itself. Many: a run of units of
 * a panel is taken apart into a scratch that stays in the first-level cache while the tiles of a block of rows read it,
 * then the next run. As in gemm.c, threads split the panels when there are few rows and the rows when there are many.
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
/* What a tile reads of a run of units, bytes: most of a 32 KiB first-level cache. */
#define AE_RUN_BYTES (24 * 1024)
/* Rows per thread from which splitting rows beats splitting panels. */
#define AE_ROWS_PER_THREAD 96
/* Bytes of codes ahead of the one in use that a single tile asks for. */
#define AE_AHEAD 2048

/* ---- activations ---- */

typedef struct {
    const ae_linear_args *args;
    ae_x_unit *x;   /* per row: units, and as many more that hold the same codes as 16-bit integers where those are used */
    int64_t units, stride;
    int codes16;
} quantise_job;

static void quantise_part(void *arg, int part, int parts)
{
    const quantise_job *job = arg;
    const ae_linear_args *a = job->args;
    for (int64_t r = a->rows * part / parts; r < a->rows * (part + 1) / parts; r++) {
        const char *from = (const char *)a->x + r * a->x_stride * ae_dtype_bytes(a->x_dtype);
        ae_x_unit *to = job->x + r * job->stride;
        if (a->x_dtype == AE_BF16)
            quantise_row(from, 1, a->in_features, to);
        else
            quantise_row(from, 0, a->in_features, to);
        for (int64_t u = 0; job->codes16 && u < job->units; u++) widen_codes(to[u].code, &to[job->units + u]);
    }
}

/* ---- tiles ---- */

/* A run of units of a panel. */
typedef struct {
    const uint8_t *codes;
    const char *scale; /* [group][outputs], fp32 or fp16 */
    const char *minimum;
    int64_t units;
    int64_t group_units; /* units that share a scale */
    int64_t left;        /* of them, those of the first group from the first unit on */
    int64_t codes16;     /* from a unit of activations to its codes as 16-bit integers, in units */
    int f16;
    int first;   /* sums begin here, rather than with what c holds */
    int streams; /* the codes come from memory: ask for them ahead */
} code_run;

/* How codes are stored: packed, or taken apart into what the products take: bytes, or (AE_SPLIT) signed 16-bit integers. */
enum { AE_PACKED4, AE_BYTES4, AE_PACKED8, AE_APART8, AE_FORMS };
#define AE_IS16(form) (AE_SPLIT && (form) >= AE_PACKED8)

AE_INLINE int64_t form_bytes(const int form) /* of a unit */
{
    return (form == AE_PACKED4 ? 1 : form == AE_APART8 && AE_SPLIT ? 4 : 2) * AE_STEPS * 4 * AE_VL;
}

AE_INLINE vu alternate(vu v, int odd) /* bytes 0 and 2 of each four as 16-bit integers, or 1 and 3 */
{
    typedef uint16_t v16 __attribute__((vector_size(4 * AE_VL)));
    return odd ? (vu)((v16)v >> 8) : v & 0x00ff00ff;
}

/* The two vectors of a step, `odd` of a step of 16-bit integers; p: the first code of the unit. */
AE_INLINE void load_codes(const uint8_t *p, const int form, int step, int odd, vu *w0, vu *w1)
{
    const vu_mem *v = (const vu_mem *)p;
    if (form == AE_PACKED4) {
        *w0 = v[step] & 0x0f0f0f0f;
        *w1 = (v[step] >> 4) & 0x0f0f0f0f;
        return;
    }
    const int at = form == AE_APART8 && AE_SPLIT ? 2 * step + odd : step;
    *w0 = v[2 * at];
    *w1 = v[2 * at + 1];
    if (form == AE_PACKED8 && AE_SPLIT) {
        *w0 = alternate(*w0, odd);
        *w1 = alternate(*w1, odd);
    }
}

AE_INLINE vu signed_codes(vu v) /* AE_OFFSET off each of the 16-bit integers */
{
    typedef uint16_t v16 __attribute__((vector_size(4 * AE_VL)));
    return (vu)((v16)v - AE_OFFSET);
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

/* Integer sums of mr rows into their fp32 sums: those of `acc` when `keep`, of c otherwise. */
AE_INLINE void add_group(const int mr, const int form, const int keep, const int which, vi sums[][2], const ae_x_unit *x,
                         int64_t ldx, const char *scale, const char *minimum, int f16, vf acc[][2], float *c)
{
    vf s[2], m[2];
    for (int k = 0; k < 2; k++) {
        s[k] = load_scale(scale, k, f16);
        m[k] = minimum ? load_scale(minimum, k, f16) : vf_set1(0.0f);
    }
    AE_UNROLL
    for (int i = 0; i < mr; i++) {
        const ae_x_unit *xi = x + i * ldx;
        const vf sx = vf_set1(xi->scale), sum_x = vf_set1(xi->sums[which]);
        AE_UNROLL
        for (int k = 0; k < 2; k++) {
            float *at = c + (i * 2 + k) * AE_VL;
            const vi dot = AE_IS16(form) ? sums[i][k] : codes_total(sums[i][k]);
            const vf part = s[k] * __builtin_convertvector(dot, vf);
            vf sum = vf_fma(sx, part, keep ? acc[i][k] : vf_load(at));
            if (minimum) sum = vf_fma(m[k], sum_x, sum);
            if (keep)
                acc[i][k] = sum;
            else
                vf_store(at, sum);
        }
    }
}

AE_INLINE void add_products(const int mr, const int form, int step, int odd, const uint8_t *codes, const ae_x_unit *x,
                            int64_t ldx, int64_t codes16, vi sums[][2])
{
    vu w0, w1;
    load_codes(codes, form, step, odd, &w0, &w1);
    AE_UNROLL
    for (int i = 0; i < mr; i++) {
        const vu xj = four_codes(AE_IS16(form) ? x[i * ldx + codes16].code + 32 * odd + 4 * step
                                               : x[i * ldx].code + 4 * step);
        add_step(AE_IS16(form), &sums[i][0], &sums[i][1], w0, w1, xj);
    }
}

/* c [mr][outputs of the panel] += the product of mr rows of units with a run. All but the last four are constants. Of
 * many rows the fp32 sums live in c, so that the integer sums have the registers. */
AE_INLINE void code_tile(const int mr, const int form, const int halves, const code_run *b, const ae_x_unit *x,
                         int64_t ldx, float *c)
{
    const int keep = mr <= AE_QR / 2, apart = form == AE_BYTES4 || (form == AE_APART8 && AE_SPLIT), offset = form == AE_PACKED8 || (form == AE_APART8 && !AE_SPLIT);
    const int f16 = !apart && b->f16, streams = !apart && b->streams;
    const int64_t scale_bytes = AE_PANEL * (f16 ? 2 : 4), codes16 = b->codes16;
    const uint8_t *codes = b->codes;
    const char *scale = b->scale, *minimum = b->minimum;
    int64_t left = b->left;
    vf acc[AE_QR][2];
    AE_UNROLL
    for (int i = 0; i < mr; i++)
        for (int k = 0; k < 2; k++) {
            float *at = c + (i * 2 + k) * AE_VL;
            if (keep)
                acc[i][k] = b->first ? vf_set1(0.0f) : vf_load(at);
            else if (b->first)
                vf_store(at, vf_set1(0.0f));
        }
    for (int64_t u = 0; u < b->units; u++, x++, codes += form_bytes(form)) {
        vi sums[AE_QR][2];
        if (streams) {
            fetch(codes + AE_AHEAD, 0, form_bytes(form));
            __builtin_prefetch(scale + AE_AHEAD / 8, 0, 2);
            if (minimum) __builtin_prefetch(minimum + AE_AHEAD / 8, 0, 2);
        }
        AE_UNROLL
        for (int h = 0; h < 2; h++) {
            const int which = halves ? 1 + h : 0;
            AE_UNROLL
            for (int i = 0; i < mr; i++)
                if (h == 0 || halves)
                    sums[i][0] = sums[i][1] = (vi){0} + (offset ? x[i * ldx].offsets[which] : 0);
            AE_UNROLL_STEPS
            for (int j = 4 * h; j < 4 * h + 4; j++) {
                add_products(mr, form, j, 0, codes, x, ldx, codes16, sums);
                if (AE_IS16(form)) add_products(mr, form, j, 1, codes, x, ldx, codes16, sums);
            }
            if (h == 0 && !halves) continue;
            if (minimum)
                add_group(mr, form, keep, which, sums, x, ldx, scale, minimum, f16, acc, c);
            else
                add_group(mr, form, keep, which, sums, x, ldx, scale, NULL, f16, acc, c);
            if (halves || --left == 0) {
                scale += scale_bytes;
                if (minimum) minimum += scale_bytes;
                left = b->group_units;
            }
        }
    }
    AE_UNROLL
    for (int i = 0; i < mr && keep; i++)
        for (int k = 0; k < 2; k++) vf_store(c + (i * 2 + k) * AE_VL, acc[i][k]);
}

typedef void (*code_tile_fn)(const code_run *, const ae_x_unit *x, int64_t ldx, float *c);
#define CODE_TILE(FORM, HALVES, MR)                                                                                   \
    static __attribute__((noinline)) void tile_##FORM##_##HALVES##_##MR(const code_run *b, const ae_x_unit *x,        \
                                                                        int64_t ldx, float *c)                        \
    {                                                                                                                 \
        code_tile(MR, FORM, HALVES, b, x, ldx, c);                                                                    \
    }
#define CODE_TILES(MR)                                                                                                \
    CODE_TILE(AE_PACKED4, 0, MR) CODE_TILE(AE_PACKED4, 1, MR) CODE_TILE(AE_BYTES4, 0, MR) CODE_TILE(AE_BYTES4, 1, MR) \
    CODE_TILE(AE_PACKED8, 0, MR) CODE_TILE(AE_PACKED8, 1, MR)
AE_EACH_QR(CODE_TILES)
#if AE_SPLIT
#define APART_TILES(MR) CODE_TILE(AE_APART8, 0, MR) CODE_TILE(AE_APART8, 1, MR)
AE_EACH_QR(APART_TILES)
#define APART_ENTRY(HALVES, MR) tile_AE_APART8_##HALVES##_##MR
#else
#define APART_ENTRY(HALVES, MR) tile_AE_PACKED8_##HALVES##_##MR
#endif
#define TILE_ENTRIES(MR)                                                                                              \
    {{tile_AE_PACKED4_0_##MR, tile_AE_PACKED4_1_##MR}, {tile_AE_BYTES4_0_##MR, tile_AE_BYTES4_1_##MR},                \
     {tile_AE_PACKED8_0_##MR, tile_AE_PACKED8_1_##MR}, {APART_ENTRY(0, MR), APART_ENTRY(1, MR)}},
/* [as in tile_rows][form][groups of 16] */
static const code_tile_fn code_tiles[][AE_FORMS][2] = {AE_EACH_QR(TILE_ENTRIES)};

/* ---- the product ---- */

typedef struct {
    const ae_linear_args *args;
    const ae_x_unit *x;
    int64_t units, stride, block_rows;
    int row_parts;
    char *scratch[AE_MAX_THREADS];
} code_job;

/* Scratch of a part: a run's codes, scale and minimum taken apart, the sums of a block of rows. */
typedef struct {
    size_t codes, scale, total;
} scratch_layout;

static int64_t run_units(int64_t units, int64_t bytes)
{
    return ae_ceil_div(units, ae_ceil_div(units, ae_max(1, AE_RUN_BYTES / bytes)));
}

/* Units of a run of `form` (AE_BYTES4 or AE_APART8) that a tile finds in the first-level cache: runs of equal length. */
static int64_t units_of_run(int64_t units, int form)
{
    const int64_t scales = 4 * AE_PANEL * 2, x = AE_QR * (int64_t)sizeof(ae_x_unit) * (AE_IS16(form) ? 2 : 1);
    return run_units(units, form_bytes(form) + scales + x);
}

static scratch_layout scratch_of(int64_t units, int64_t rows)
{
    const int64_t longest = ae_max(units_of_run(units, AE_BYTES4), units_of_run(units, AE_APART8));
    const size_t codes = (size_t)(longest * form_bytes(AE_APART8)), scale = (size_t)(2 * longest * AE_PANEL * 4);
    return (scratch_layout){codes, scale, codes + 2 * scale + (size_t)(rows * AE_PANEL * 4)};
}

/* Units [first, first + units) of a panel, as packed. */
static code_run run_at(const code_job *job, const ae_segment *s, int64_t panel, int64_t first, int64_t units)
{
    const int64_t group_units = ae_max(1, s->group / AE_UNIT), groups = code_groups(job->args->in_features, s->group);
    const int64_t group = s->group < AE_UNIT ? first * (AE_UNIT / s->group) : first / group_units;
    const int64_t scales = (panel * groups + group) * AE_PANEL * ae_dtype_bytes(s->scale_dtype);
    return (code_run){
        .codes = (const uint8_t *)s->codes + (panel * job->units + first) * AE_UNIT_BYTES(s->bits),
        .scale = (const char *)s->scale + scales,
        .minimum = s->minimum ? (const char *)s->minimum + scales : NULL,
        .units = units,
        .group_units = group_units,
        .left = group_units - first % group_units,
        .codes16 = job->units,
        .f16 = s->scale_dtype == AE_F16,
        .first = first == 0,
        .streams = 1,
    };
}

static const char *widen_scale(const char *from, int64_t count, char *to)
{
    for (int64_t i = 0; i < count; i += AE_VL) vf_store((float *)to + i, vf_load_f16((const uint16_t *)from + i));
    return to;
}

/* The same run, its codes in the form the products take and its scale as fp32, in scratch where they are not so already. */
static code_run taken_apart(const code_job *job, const code_run *b, const ae_segment *s, char *scratch)
{
    const scratch_layout at = scratch_of(job->units, job->block_rows);
    const int64_t groups = s->group < AE_UNIT ? b->units * (AE_UNIT / s->group)
                                              : 1 + ae_max(0, ae_ceil_div(b->units - b->left, b->group_units));
    code_run out = *b;
    vu_mem *to = (vu_mem *)scratch;
    out.streams = 0;
    if (s->bits == 4 || AE_SPLIT) out.codes = (const uint8_t *)scratch;
    for (int64_t u = 0; u < b->units && s->bits == 4; u++)
        for (int j = 0; j < AE_STEPS; j++, to += 2) {
            vu w0, w1;
            load_codes(b->codes + u * form_bytes(AE_PACKED4), AE_PACKED4, j, 0, &w0, &w1);
            to[0] = w0;
            to[1] = w1;
        }
    for (int64_t i = 0; i < b->units * AE_STEPS * 2 && s->bits == 8 && AE_SPLIT; i++) {
        const vu v = ((const vu_mem *)b->codes)[i];
        to[4 * (i / 2) + i % 2] = signed_codes(alternate(v, 0));
        to[4 * (i / 2) + i % 2 + 2] = signed_codes(alternate(v, 1));
    }
    if (b->f16) {
        out.scale = widen_scale(b->scale, groups * AE_PANEL, scratch + at.codes);
        if (b->minimum) out.minimum = widen_scale(b->minimum, groups * AE_PANEL, scratch + at.codes + at.scale);
        out.f16 = 0;
    }
    return out;
}

AE_INLINE void store_whole(const ae_linear_args *a, int64_t row, int64_t rows, int64_t out, const int bf16,
                           const int bias, const float *c)
{
    vf b[2] = {vf_set1(0.0f), vf_set1(0.0f)};
    for (int k = 0; k < 2 && bias; k++) b[k] = vf_load(a->bias + out + k * AE_VL);
    char *to = (char *)a->y + output_at(a, row, out);
    for (int64_t i = 0; i < rows; i++, to += a->y_stride * (bf16 ? 2 : 4), c += AE_PANEL)
        for (int k = 0; k < 2; k++) {
            const vf v = vf_load(c + k * AE_VL);
            vf_put(to, k * AE_VL, bias ? v + b[k] : v, bf16);
        }
}

/* The outputs of one panel from c [rows][AE_PANEL]. */
static void store_rows(const ae_linear_args *a, int64_t row, int64_t rows, int64_t out, int64_t width, const float *c)
{
    const int bf16 = a->y_dtype == AE_BF16, bias = a->bias != NULL;
    if (width < AE_PANEL)
        for (int64_t i = 0; i < rows; i++) store_row(a, row + i, out, width, c + i * AE_PANEL);
    else if (bf16)
        bias ? store_whole(a, row, rows, out, 1, 1, c) : store_whole(a, row, rows, out, 1, 0, c);
    else
        bias ? store_whole(a, row, rows, out, 0, 1, c) : store_whole(a, row, rows, out, 0, 0, c);
}

/* One panel by the rows [row, row + rows). */
static void panel_rows(const code_job *job, const ae_segment *s, int64_t panel, int64_t first_out, int64_t row,
                       int64_t rows, char *scratch)
{
    const ae_linear_args *a = job->args;
    const int64_t width = ae_min(AE_PANEL, s->out_features - panel * AE_PANEL), out = first_out + panel * AE_PANEL;
    const int apart = rows > AE_QR, form = (s->bits == 4 ? AE_PACKED4 : AE_PACKED8) + apart;
    const int64_t longest = apart ? units_of_run(job->units, form) : job->units;
    const scratch_layout at = scratch_of(job->units, job->block_rows);
    float *sums = (float *)(scratch + at.codes + 2 * at.scale);
    for (int64_t u = 0; u < job->units; u += longest) {
        const int64_t units = ae_min(longest, job->units - u), bytes = units * AE_UNIT_BYTES(s->bits);
        code_run b = run_at(job, s, panel, u, units);
        const uint8_t *next = b.codes + bytes;
        if (apart) b = taken_apart(job, &b, s, scratch);
        int size = (int)(sizeof tile_rows / sizeof *tile_rows) - 1;
        for (int64_t done = 0, mr; done < rows; done += mr) {
            while (tile_rows[size] > rows - done) size--;
            mr = tile_rows[size];
            for (int64_t i = 0; u == 0 && i < mr; i++)
                __builtin_prefetch((char *)a->y + output_at(a, row + done + i, out), 1, 2);
            if (apart) fetch(next, bytes * done / rows, bytes * (done + mr) / rows);
            const ae_x_unit *x = job->x + (row + done) * job->stride + u;
            code_tiles[size][form][s->group == 16](&b, x, job->stride, sums + done * AE_PANEL);
        }
    }
    store_rows(a, row, rows, out, width, sums);
}

/* The panels of all segments, as if one list, weighed by their bits: part `part` of `parts`. */
static void panels_rows(const code_job *job, int part, int parts, int64_t row, int64_t rows, char *scratch)
{
    const ae_quantised *w = job->args->weight;
    int64_t total = 0, before = 0, out = 0;
    for (int64_t i = 0; i < w->count; i++)
        total += ae_ceil_div(w->segments[i].out_features, AE_PANEL) * AE_UNIT_BYTES(w->segments[i].bits);
    const int64_t low = total * part / parts, high = total * (part + 1) / parts;
    for (int64_t i = 0; i < w->count; i++) {
        const ae_segment *s = &w->segments[i];
        const int64_t panels = ae_ceil_div(s->out_features, AE_PANEL), weight = AE_UNIT_BYTES(s->bits);
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
    int codes16 = 0;
    for (int64_t i = 0; i < ((const ae_quantised *)a->weight)->count; i++)
        codes16 |= AE_SPLIT && ((const ae_quantised *)a->weight)->segments[i].bits == 8;
    /* An odd number of lines: the rows of a tile do not fall into the same sets of the cache. */
    const int64_t units = code_units(a->in_features), stride = (units * (1 + codes16)) | 1;
    const int64_t row_bytes = stride * (int64_t)sizeof(ae_x_unit);
    quantise_job first = {.args = a, .units = units, .stride = stride, .codes16 = codes16};
    first.x = ae_pool_scratch(ctx->pool, AE_SHARED_A, (size_t)(a->rows * row_bytes));
    if (!first.x) return AE_NO_MEMORY;
    /* 32 K activations are about 5 us. */
    ae_pool_run(ctx->pool, quantise_part, &first, (int)ae_min(ae_parts(ctx, a->rows * a->in_features, 32768), a->rows));
    code_job job = {.args = a, .x = first.x, .units = units, .stride = stride};
    job.block_rows = ae_max(AE_QR, AE_BLOCK_BYTES / row_bytes / AE_QR * AE_QR);
    job.block_rows = ae_min(job.block_rows, ae_round_up(a->rows, AE_QR));
    /* 64 K weights are about 2 us of reading: less is not worth waking another thread for. */
    int parts = ae_parts(ctx, a->rows * a->out_features * a->in_features, 65536);
    job.row_parts = (int)ae_max(1, ae_min(parts, a->rows / AE_ROWS_PER_THREAD));
    parts = parts / job.row_parts * job.row_parts;
    for (int i = 0; i < parts; i++) {
        job.scratch[i] = ae_pool_scratch(ctx->pool, i, scratch_of(units, job.block_rows).total);
        if (!job.scratch[i]) return AE_NO_MEMORY;
    }
    ae_pool_run(ctx->pool, code_part, &job, parts);
    return AE_OK;
}
