/* y = x weight^T + bias with integer weights: activations rounded to int8, one scale per row and 32 inputs, or to int16,
 * one per row; exact integer products.
 *
 * y[r, o] = factor of r * sum over units of scale_w * (scale_x * dot) + minimum_w * (scale_x * sum of x codes), units
 * rising, two fused multiply-adds each (a group of 16 inputs: per half unit; of all inputs: once), begun with the same sum
 * of the row's second codes. A lane is an output and owns this chain, so that no bit depends on how many rows stand beside
 * it or who computes it.
 *
 * Few rows: one tile to three pass over the packed codes as they stream in, and take them apart themselves. Many: a run
 * of units of a panel is taken apart into a scratch that stays in the first-level cache while the tiles of a block of rows
 * read it, then the next run. As in gemm.c, threads split the panels when there are few rows and the rows when there are
 * many.
 */
#include "activations.h"
#include "internal.h"
#include "quantised_tiles.h"
#include "store.h"

/* Activations of one block, bytes: half of a 512 KiB second-level cache. */
#define AE_BLOCK_BYTES (256 * 1024)
/* What a tile reads of a run of units, bytes: most of a 32 KiB first-level cache. */
#define AE_RUN_BYTES (24 * 1024)
/* Rows per thread from which splitting rows beats splitting panels. */
#define AE_ROWS_PER_THREAD 96

/* ---- activations ---- */

/* A row of activations, in units: those of int8, the wide ones, the int16 codes of these; only what some segment reads.
 * Second codes, which are few, have a place of their own. */
typedef struct {
    int64_t units, wide, stride; /* units of a kind, where the wide begin, the next row */
    int has_narrow, has_wide;
    int wide_units; /* whether anybody asks for single units of the wide */
    int32_t most;   /* the greatest int16 code */
} x_layout;

static x_layout x_layout_of(const ae_quantised *w, int64_t in_features)
{
    x_layout at = {.units = code_units(in_features), .most = AE_MOST_WIDE};
    for (int64_t i = 0; i < w->count; i++) {
        *(is_wide(&w->segments[i]) ? &at.has_wide : &at.has_narrow) = 1;
        if (is_whole(&w->segments[i], in_features))
            at.most = whole_most(in_features);
        else if (is_wide(&w->segments[i]))
            at.wide_units = 1;
    }
    at.wide = at.has_narrow ? at.units : 0;
    /* An odd number of lines: the rows of a tile do not fall into the same sets of the cache. */
    at.stride = (at.wide + (at.has_wide ? 2 * at.units : 0)) | 1;
    return at;
}

typedef struct {
    const ae_linear_args *args;
    ae_x_unit *x;
    float *factor[2];         /* by row, of its int8 units and of its wide ones */
    int32_t *totals;          /* by row, the sum of its int16 codes */
    ae_x_unit *second;        /* second codes, [row][units] */
    int64_t *counts;          /* by row, how many there are */
    float *own;               /* by thread, what rounding a row needs */
    const ae_x_unit **listed; /* all there are, places rising, and of a place rows rising */
    int64_t *ends;            /* where those of a place end in that list, of every place that has any */
    int64_t places;
    x_layout at;
} quantise_job;

static int64_t own_floats(const quantise_job *job) { return 2 * ae_round_up(job->at.units, AE_VL); }

static float round_wide(const quantise_job *job, const char *from, ae_x_unit *to, int32_t *total)
{
    const int64_t n = job->args->in_features, units = job->at.units;
    const int32_t most = job->at.most;
    if (job->args->x_dtype == AE_BF16)
        return job->at.wide_units ? quantise_wide(from, 1, n, most, 1, to, units, total)
                                  : quantise_wide(from, 1, n, most, 0, to, units, total);
    return job->at.wide_units ? quantise_wide(from, 0, n, most, 1, to, units, total)
                              : quantise_wide(from, 0, n, most, 0, to, units, total);
}

static void quantise_part(void *arg, int part, int parts)
{
    const quantise_job *job = arg;
    const ae_linear_args *a = job->args;
    float *own = job->own + ae_pool_thread() * own_floats(job);
    for (int64_t r = a->rows * part / parts; r < a->rows * (part + 1) / parts; r++) {
        const char *from = (const char *)a->x + r * a->x_stride * ae_dtype_bytes(a->x_dtype);
        ae_x_unit *to = job->x + r * job->at.stride;
        const int64_t n = a->in_features, bf16 = a->x_dtype == AE_BF16;
        const int64_t units = job->at.units;
        ae_x_unit *second = job->second + r * units;
        if (job->at.has_narrow)
            job->factor[0][r] = bf16 ? quantise_narrow(from, 1, n, r, own, to, second, job->counts + r)
                                     : quantise_narrow(from, 0, n, r, own, to, second, job->counts + r);
        if (!job->at.has_wide) continue;
        to += job->at.wide;
        job->factor[1][r] = round_wide(job, from, to, job->totals + r);
    }
}

/* Rows that are far from the rest are so at the same few places, whose weights then serve all of them at once. */
static void list_seconds(quantise_job *job)
{
    const int64_t rows = job->args->rows, units = job->at.units;
    int64_t *at = job->ends, total = 0;
    memset(at, 0, (size_t)units * sizeof *at);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < job->counts[r]; i++) at[job->second[r * units + i].offsets[0]]++;
    for (int64_t u = 0; u < units; u++) total += at[u], at[u] = total - at[u];
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < job->counts[r]; i++) {
            const ae_x_unit *second = &job->second[r * units + i];
            job->listed[at[second->offsets[0]]++] = second;
        }
    for (int64_t u = 0, end = 0; u < units; u++)
        if (at[u] > end) end = job->ends[job->places++] = at[u];
}

/* Rounds all rows of x, in memory of the pool's. */
static int quantise(ae_context *ctx, const ae_linear_args *a, quantise_job *job)
{
    job->args = a;
    job->at = x_layout_of(a->weight, a->in_features);
    const int64_t lines = a->rows * job->at.stride, second = job->at.has_narrow ? a->rows * job->at.units : 0;
    const size_t bytes = (size_t)(lines + second) * sizeof *job->x + (size_t)second * sizeof *job->listed +
                         (size_t)(a->rows + job->at.units) * sizeof *job->ends +
                         (size_t)a->rows * (2 * sizeof *job->factor[0] + sizeof *job->totals) +
                         (size_t)(ae_pool_threads(ctx->pool) * own_floats(job)) * sizeof *job->own;
    job->x = ae_pool_scratch(ctx->pool, AE_SHARED_A, bytes);
    if (!job->x) return AE_NO_MEMORY;
    job->second = job->x + lines;
    job->listed = (const ae_x_unit **)(job->second + second);
    job->ends = (int64_t *)(job->listed + second);
    job->counts = job->ends + job->at.units;
    job->factor[0] = (float *)(job->counts + a->rows);
    job->factor[1] = job->factor[0] + a->rows;
    job->totals = (int32_t *)(job->factor[1] + a->rows);
    job->own = (float *)(job->totals + a->rows);
    /* 8 K activations are about 4 us. */
    ae_pool_run(ctx->pool, quantise_part, job, ae_row_parts(ctx, a->rows, a->in_features, 8192));
    job->places = 0;
    if (job->at.has_narrow) list_seconds(job);
    return AE_OK;
}

/* ---- the product ---- */

/* Scratch of a thread: a run's codes, scale and minimum taken apart, the sums of a block of rows. */
typedef struct {
    size_t codes, scale, total;
} scratch_layout;

typedef struct {
    const ae_linear_args *args;
    quantise_job x;
    int64_t units, block_rows;
    int64_t run[AE_FORMS]; /* units that are taken apart at once */
    int row_parts;
    scratch_layout at;
    char *scratch[AE_MAX_THREADS]; /* by thread: parts are more, and what one leaves in the cache serves the next */
} code_job;

/* What the panels of a segment have in common, for a block of rows. A division is as long as a unit's product. */
typedef struct {
    const ae_segment *of;
    int64_t out;                 /* the first of its outputs */
    int64_t groups, group_units; /* groups of an output; units that share one */
    int form, wide, apart, sums;
} code_segment;

static code_segment segment_of(const code_job *job, const ae_segment *s, int64_t out, int64_t rows)
{
    const int wide = is_wide(s), apart = rows > AE_FEW;
    return (code_segment){
        .of = s,
        .out = out,
        .groups = code_groups(job->args->in_features, s->group),
        .group_units = ae_max(1, s->group / AE_UNIT),
        .form = wide           ? (apart ? AE_APART16 : AE_WIDE8)
                : s->bits == 5 ? AE_BYTES5
                : apart        ? AE_BYTES4
                               : AE_PACKED4,
        .wide = wide,
        .apart = apart,
        .sums = is_whole(s, job->args->in_features) ? AE_OF_ROWS : s->group == 16 ? AE_OF_HALVES : AE_OF_UNITS,
    };
}

static int64_t run_units(int64_t units, int64_t bytes)
{
    return ae_ceil_div(units, ae_ceil_div(units, ae_max(1, AE_RUN_BYTES / bytes)));
}

/* Units of a run of `form` (AE_BYTES4 or AE_APART16) that a tile finds in the first-level cache: runs of equal length. */
static int64_t units_of_run(int64_t units, int form)
{
    const int64_t scales = 4 * AE_PANEL * 2, x = AE_QR * (int64_t)sizeof(ae_x_unit) * (AE_IS16(form) ? 2 : 1);
    return run_units(units, form_bytes(form) + scales + x);
}

static scratch_layout scratch_of(const code_job *job, int64_t rows)
{
    const int64_t longest = ae_max(job->run[AE_BYTES4], job->run[AE_APART16]);
    const size_t codes = (size_t)(longest * form_bytes(AE_APART16)), scale = (size_t)(2 * longest * AE_PANEL * 4);
    return (scratch_layout){codes, scale, codes + 2 * scale + (size_t)(rows * AE_PANEL * 4)};
}

/* Units [first, first + units) of a panel, as packed. */
static code_run run_at(const code_job *job, const code_segment *c, int64_t panel, int64_t first, int64_t units)
{
    const ae_segment *s = c->of;
    const int64_t whole = first ? first / c->group_units : 0;
    const int64_t group = s->group < AE_UNIT ? first * (AE_UNIT / s->group) : whole;
    const int64_t scales = (panel * c->groups + group) * AE_PANEL * ae_dtype_bytes(s->scale_dtype);
    return (code_run){
        .codes = (const uint8_t *)s->codes + (panel * job->units + first) * AE_UNIT_BYTES(s->bits),
        .scale = (const char *)s->scale + scales,
        .minimum = s->minimum ? (const char *)s->minimum + scales : NULL,
        .units = units,
        .group_units = c->group_units,
        .left = c->group_units - (first - whole * c->group_units),
        .codes16 = job->units,
        .f16 = s->scale_dtype == AE_F16,
        .first = first == 0 && c->wide,
        .last = first + units == job->units,
        .streams = 1,
    };
}

static const char *widen_scale(const char *from, int64_t count, char *to)
{
    for (int64_t i = 0; i < count; i += AE_VL) vf_store((float *)to + i, vf_load_f16((const uint16_t *)from + i));
    return to;
}

/* The same run, its codes taken apart and its scale as fp32, in scratch where they are not so already. */
static code_run taken_apart(const code_job *job, const code_run *b, const ae_segment *s, char *scratch)
{
    const scratch_layout at = job->at;
    const int64_t groups = s->group < AE_UNIT ? b->units * (AE_UNIT / s->group)
                           : b->group_units == 1 ? b->units
                                              : 1 + ae_max(0, ae_ceil_div(b->units - b->left, b->group_units));
    const int64_t scale_bytes = groups * AE_PANEL * ae_dtype_bytes(s->scale_dtype);
    code_run out = *b;
    vu_mem *to = (vu_mem *)scratch;
    fetch(b->scale + scale_bytes, 0, scale_bytes); /* of the next run */
    if (b->minimum) fetch(b->minimum + scale_bytes, 0, scale_bytes);
    out.streams = 0;
    if (s->bits != 5) out.codes = (const uint8_t *)scratch;
    if (s->bits == 4)
        for (int64_t i = 0; i < b->units * AE_STEPS; i++, to += 2) {
            vu w0, w1;
            load_codes(b->codes, AE_PACKED4, (int)i, 0, &w0, &w1);
            to[0] = w0;
            to[1] = w1;
        }
    if (s->bits == 8)
        for (int64_t i = 0; i < b->units * AE_STEPS; i++, to += 4) {
            const vu v0 = ((const vu_mem *)b->codes)[2 * i], v1 = ((const vu_mem *)b->codes)[2 * i + 1];
            to[0] = signed_codes(alternate(v0, 0));
            to[1] = signed_codes(alternate(v1, 0));
            to[2] = signed_codes(alternate(v0, 1));
            to[3] = signed_codes(alternate(v1, 1));
        }
    if (b->f16) {
        out.scale = widen_scale(b->scale, groups * AE_PANEL, scratch + at.codes);
        if (b->minimum) out.minimum = widen_scale(b->minimum, groups * AE_PANEL, scratch + at.codes + at.scale);
        out.f16 = 0;
    }
    return out;
}

/* Row r's sums times factor[r], in outputs that are whole vectors. */
AE_INLINE void store_whole(const ae_linear_args *a, int64_t row, int64_t rows, int64_t out, const int bf16,
                           const int bias, const float *factor, const float *c)
{
    vf b[2] = {vf_set1(0.0f), vf_set1(0.0f)};
    for (int k = 0; k < 2 && bias; k++) b[k] = vf_load(a->bias + out + k * AE_VL);
    char *to = (char *)a->y + output_at(a, row, out);
    for (int64_t i = 0; i < rows; i++, to += a->y_stride * (bf16 ? 2 : 4), c += AE_PANEL) {
        const vf f = vf_set1(factor[i]);
        for (int k = 0; k < 2; k++) {
            const vf v = vf_load(c + k * AE_VL) * f;
            vf_put(to, k * AE_VL, bias ? v + b[k] : v, bf16);
        }
    }
}

/* The outputs of one panel from c [rows][AE_PANEL]. */
static void store_rows(const ae_linear_args *a, int64_t row, int64_t rows, int64_t out, int64_t width, const float *factor,
                       float *c)
{
    const int bf16 = a->y_dtype == AE_BF16, bias = a->bias != NULL;
    if (width < AE_PANEL)
        for (int64_t i = 0; i < rows; i++) {
            float *sums = c + i * AE_PANEL;
            for (int k = 0; k < 2; k++) vf_store(sums + k * AE_VL, vf_load(sums + k * AE_VL) * vf_set1(factor[i]));
            store_row(a, row + i, out, width, sums);
        }
    else if (bf16)
        bias ? store_whole(a, row, rows, out, 1, 1, factor, c) : store_whole(a, row, rows, out, 1, 0, factor, c);
    else
        bias ? store_whole(a, row, rows, out, 0, 1, factor, c) : store_whole(a, row, rows, out, 0, 0, factor, c);
}

/* The first of list [from, to), whose rows rise, that is not of a row before `row`. */
static int64_t first_of_row(const ae_x_unit *const *list, int64_t from, int64_t to, int64_t row)
{
    while (from < to) {
        const int64_t middle = (from + to) / 2;
        if (list[middle]->offsets[1] < row)
            from = middle + 1;
        else
            to = middle;
    }
    return from;
}

/* c [rows][AE_PANEL] = the product of second codes of the rows [row, row + rows) with the panel that begins at b. */
static void seconds_of(const code_job *job, const ae_segment *s, const code_run *b, int64_t row, int64_t rows, float *c)
{
    const ae_x_unit *const *list = job->x.listed;
    const int whole = rows == job->args->rows;
    memset(c, 0, (size_t)(rows * AE_PANEL) * sizeof *c);
    for (int64_t i = 0, next = 0, from, to; i < job->x.places; i++) {
        from = next;
        to = next = job->x.ends[i];
        if (!whole) {
            from = first_of_row(list, from, to, row);
            to = first_of_row(list, from, to, row + rows);
        }
        for (int size = 0; from < to; from += second_tiles[size].units) {
            while (second_tiles[size].units > to - from) size++;
            second_tiles[size].tile[s->bits == 5][s->group == 16](b, list + from, row, c);
        }
    }
}

/* One panel by the rows [row, row + rows). */
static void panel_rows(const code_job *job, const code_segment *of, int64_t panel, int64_t row, int64_t rows,
                       char *scratch)
{
    const ae_linear_args *a = job->args;
    const ae_segment *s = of->of;
    const int64_t width = ae_min(AE_PANEL, s->out_features - panel * AE_PANEL), out = of->out + panel * AE_PANEL;
    const int64_t longest = of->apart ? job->run[of->form] : job->units;
    const int64_t tiles = ae_ceil_div(rows, AE_QR);
    float *sums = (float *)(scratch + job->at.codes + 2 * job->at.scale);
    for (int64_t u = 0; u < job->units; u += longest) {
        const int64_t units = ae_min(longest, job->units - u), bytes = units * AE_UNIT_BYTES(s->bits);
        const int64_t ahead = of->apart ? ae_ceil_div(bytes, rows) : 0; /* of the next run's codes, for each row */
        const code_run packed = run_at(job, of, panel, u, units);
        code_run b = of->apart ? taken_apart(job, &packed, s, scratch) : packed;
        const uint8_t *next = packed.codes + bytes;
        if (u == 0 && !of->wide) seconds_of(job, s, &packed, row, rows, sums);
        for (int64_t done = 0, tile = 0, mr; done < rows; done += mr, tile++) {
            mr = rows / tiles + (tile < rows % tiles); /* equal ones: 4 and 4, not 6 and 2 */
            for (int64_t i = 0; u == 0 && i < mr; i++)
                __builtin_prefetch((char *)a->y + output_at(a, row + done + i, out), 1, 2);
            fetch(next, ahead * done, ahead * (done + mr));
            const ae_x_unit *x = job->x.x + (row + done) * job->x.at.stride + (of->wide ? job->x.at.wide : 0) + u;
            float *c = sums + done * AE_PANEL;
            b.totals = job->x.totals + row + done;
            code_tiles[of->form][mr][of->sums](&b, x, job->x.at.stride, c);
            b.streams = 0;
            if (b.last) store_rows(a, row + done, mr, out, width, job->x.factor[of->wide] + row + done, c);
        }
    }
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
        const code_segment of = segment_of(job, s, out, rows);
        for (int64_t p = p0; p < p1; p++) panel_rows(job, &of, p, row, rows, scratch);
        before += panels * weight;
        out += s->out_features;
    }
}

static void code_part(void *arg, int part, int parts)
{
    const code_job *job = arg;
    const int64_t tiles = ae_ceil_div(job->args->rows, AE_QR);
    const int col_parts = parts / job->row_parts, rp = part % job->row_parts, cp = part / job->row_parts;
    const int64_t r0 = tiles * rp / job->row_parts * AE_QR;
    const int64_t r1 = ae_min(job->args->rows, tiles * (rp + 1) / job->row_parts * AE_QR);
    for (int64_t row = r0; row < r1; row += job->block_rows)
        panels_rows(job, cp, col_parts, row, ae_min(job->block_rows, r1 - row), job->scratch[ae_pool_thread()]);
}

int AE_FN(linear_quantised)(ae_context *ctx, const ae_linear_args *a)
{
    if (a->rows == 0) return AE_OK;
    code_job job = {.args = a};
    if (quantise(ctx, a, &job.x) != AE_OK) return AE_NO_MEMORY;
    const int64_t units = job.units = job.x.at.units, row_bytes = job.x.at.stride * (int64_t)sizeof(ae_x_unit);
    job.block_rows = ae_max(AE_QR, AE_BLOCK_BYTES / row_bytes / AE_QR * AE_QR);
    job.block_rows = ae_min(job.block_rows, ae_round_up(a->rows, AE_QR));
    for (int form = 0; form < AE_FORMS; form++) job.run[form] = units_of_run(units, form);
    job.at = scratch_of(&job, job.block_rows);
    /* 64 K weights are about 2 us of reading: less is not worth waking another thread for. 1 M products are about 8 us. */
    const int64_t work = a->rows * a->out_features * a->in_features;
    const int threads = ae_parts(ctx, work, 65536);
    job.row_parts = (int)ae_max(1, ae_min(threads, a->rows / AE_ROWS_PER_THREAD));
    const int parts = ae_fine_parts(threads, work, 1 << 20) / job.row_parts * job.row_parts;
    for (int i = 0; i < ae_pool_threads(ctx->pool); i++) {
        job.scratch[i] = ae_pool_scratch(ctx->pool, i, job.at.total);
        if (!job.scratch[i]) return AE_NO_MEMORY;
    }
    ae_pool_run(ctx->pool, code_part, &job, parts);
    return AE_OK;
}
