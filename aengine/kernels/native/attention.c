/* Paged attention: queries of ragged rows over their pages, decode and prefill alike.
 *
 * One order for every query, fixed by its position alone: keys in spans of 256 positions, aligned to absolute positions.
 * A span starts from nothing: scores of its keys (one chain over head_dim each), their maximum, probabilities with one
 * lane-wise sum, then weighted values (one chain over positions). Spans are merged in order. So a query gets the same
 * bits in a decode step, in any prefill chunk, after a cache hit, beside rows that share its pages, and however its pages
 * are permuted. Spans are also what lets several threads work on one query: with few tiles each (tile, span) is a task
 * of its own and the merge comes last; with many, one thread walks all spans of a tile and merges as it goes.
 *
 * Cross-attention is the same over media items: every item begins a span of its own and is seen whole, and a row's spans
 * are merged in the order of its items.
 *
 * A tile is up to about 96 query rows: tokens x query heads of one key-value head, of one ragged row or of several that
 * name the same pages. A span of a tile falls into pieces of pages that its rows share (one, mostly); each is staged once
 * for all rows it serves, keys as [head_dim][BLOCK] fp32, values as panels of [SPAN][NR] fp32, for the tile products of
 * tile.h. Where rows are few, keys and values are used where they lie. Keys outside a row's range get probability exactly 0, and
 * stepping over exact zeros changes no bit, so ranges may differ between the rows of a tile. (It may turn -0 into +0; the
 * last step makes all zeros +0.)
 */
#include "attention.h"

#include <math.h>
#include <stdatomic.h>

#include "attention_pages.h"
#include "attention_plan.h"
#include "attention_products.h"

/* ---- one span ---- */

/* Query rows of a piece: where they begin among the rows of a head, and how many. */
static int64_t piece_rows(const attn_job *job, const attn_tile *t, attn_piece piece, int64_t *first)
{
    const attn_segment *s = job->segment + t->segment;
    *first = s[piece.first].at;
    return (piece.last == t->segments ? t->queries : s[piece.last].at) - *first;
}

/* Scores (or probabilities) of a piece's columns times the scale of each key (or value). */
static void apply_scales(const attn_job *job, const attn_tile *t, const attn_scratch *w, attn_piece piece, int values,
                         int64_t column)
{
    int64_t first;
    const int64_t rows = piece_rows(job, t, piece, &first), count = piece.end - piece.begin;
    for (int64_t h = 0; h < t->heads; h++) {
        find_scales(job->args, values, job->segment + t->segment + piece.first, t->head + h, piece, w->scales);
        for (int64_t i = 0; i < rows; i++) {
            float *s = w->scores + (h * t->queries + first + i) * AE_SCORES + column;
            for (int64_t k = 0; k < count; k += AE_VL) vf_store(s + k, vf_load(s + k) * vf_load(w->scales + k));
        }
    }
}

static void piece_scores(const attn_job *job, const attn_tile *t, const attn_scratch *w, attn_piece piece, int64_t column)
{
    const ae_attention_args *a = job->args;
    int64_t first;
    const int64_t rows = piece_rows(job, t, piece, &first), count = piece.end - piece.begin;
    for (int64_t i = 0; i < count; i += AE_BLOCK) {
        const char *const *at = w->k_rows + i;
        attn_ahead ahead = ahead_of(at + AE_BLOCK, t->heads * a->head_dim * kv_bytes(a));
        for (int64_t h = 0; h < t->heads; h++) {
            const int64_t shift = h * a->k_kv_stride * kv_bytes(a), row = h * t->queries + first;
            key_scores(job, w, row, rows, at, shift, ae_min(AE_BLOCK, count - i),
                       w->scores + row * AE_SCORES + column + i, &ahead);
        }
    }
    if (a->kv_dtype == AE_I8) apply_scales(job, t, w, piece, 0, column);
}

static void piece_values(const attn_job *job, const attn_tile *t, const attn_scratch *w, attn_piece piece, int64_t column,
                         float *acc)
{
    const ae_attention_args *a = job->args;
    int64_t first;
    const int64_t rows = piece_rows(job, t, piece, &first), count = piece.end - piece.begin;
    const int in_place = rows <= AE_IN_PLACE && a->head_dim == job->dim;
    const int64_t step = in_place ? AE_BLOCK : AE_SPAN;
    if (a->kv_dtype == AE_I8) apply_scales(job, t, w, piece, 1, column);
    for (int64_t i = 0; i < count; i += step) {
        const char *const *at = w->v_rows + i;
        attn_ahead ahead = ahead_of(at + AE_BLOCK, t->heads * a->head_dim * kv_bytes(a));
        for (int64_t h = 0; h < t->heads; h++) {
            const int64_t shift = h * a->v_kv_stride * kv_bytes(a), row = h * t->queries + first;
            const int64_t n = ae_min(step, count - i);
            const float *p = w->scores + row * AE_SCORES + column + i;
            if (in_place) {
                in_place_product(job, p, at, shift, rows, n, acc + row * job->dim, &ahead);
                continue;
            }
            switch (a->kv_dtype) {
            case AE_F32: stage_values(w->values, at, shift, n, a->head_dim, AE_F32); break;
            case AE_BF16: stage_values(w->values, at, shift, n, a->head_dim, AE_BF16); break;
            default: stage_values(w->values, at, shift, n, a->head_dim, AE_I8);
            }
            staged_product(job, p, w->values, rows, n, acc + row * job->dim);
        }
    }
}

/* Scores of columns first .. last - 1 (whole blocks) -> probabilities, 0 outside begin .. end - 1. */
static void softmax_row(const attn_job *job, float *s, int64_t first, int64_t last, int64_t begin, int64_t end, float *max,
                        float *sum)
{
    const float cap = (float)job->args->softcap;
    if (begin >= end) {
        memset(s + first, 0, (size_t)(last - first) * sizeof *s);
        return;
    }
    const int64_t low = begin / AE_VL * AE_VL, high = ae_round_up(end, AE_VL), block = low / AE_BLOCK * AE_BLOCK;
    memset(s + first, 0, (size_t)(low - first) * sizeof *s);
    memset(s + high, 0, (size_t)(last - high) * sizeof *s);
    if (cap > 0.0f) /* cap tanh(x / cap), tanh u = 1 - 2 / (1 + e^2u) */
        for (int64_t k = low; k < high; k += AE_VL) {
            const vf e = vf_exp(vf_load(s + k) * vf_set1(2.0f / cap));
            vf_store(s + k, vf_set1(cap) - vf_set1(2.0f * cap) / (e + vf_set1(1.0f)));
        }
    for (int64_t k = low; k < begin; k++) s[k] = -INFINITY;
    for (int64_t k = end; k < high; k++) s[k] = -INFINITY;
    vf top[4], total[4]; /* a vector's place in its block says which one it joins */
    AE_UNROLL
    for (int i = 0; i < 4; i++) top[i] = vf_set1(-INFINITY), total[i] = vf_set1(0.0f);
    for (int64_t k = block; k < high; k += AE_BLOCK)
        AE_UNROLL
        for (int i = 0; i < 4; i++)
            if (k + i * AE_VL >= low && k + i * AE_VL < high) top[i] = vf_max(vf_load(s + k + i * AE_VL), top[i]);
    *max = vf_hmax(vf_max(vf_max(top[0], top[1]), vf_max(top[2], top[3])));
    const vf most = vf_set1(*max);
    for (int64_t k = block; k < high; k += AE_BLOCK)
        AE_UNROLL
        for (int i = 0; i < 4; i++)
            if (k + i * AE_VL >= low && k + i * AE_VL < high) {
                const vf p = vf_exp(vf_load(s + k + i * AE_VL) - most);
                total[i] += p;
                vf_store(s + k + i * AE_VL, p);
            }
    vf_store(sum, (total[0] + total[1]) + (total[2] + total[3]));
}

static void softmax_span(const attn_job *job, const attn_tile *t, const attn_scratch *w, attn_keys keys, attn_part part)
{
    const int64_t zero = keys.begin / AE_SPAN * AE_SPAN;
    const int64_t first = (keys.begin - zero) / AE_BLOCK * AE_BLOCK, last = ae_round_up(keys.end - zero, AE_BLOCK);
    const int causal = !job->args->row_items;
    int64_t row = 0;
    for (int64_t h = 0; h < t->heads; h++)
        for (int64_t i = 0; i < t->segments; i++) {
            const attn_segment *s = &job->segment[t->segment + i];
            for (int64_t p = s->position; p < s->position + s->tokens; p++) {
                const int64_t begin = ae_max(0, key_begin(job->args, p) - zero);
                const int64_t end = (causal ? ae_min(keys.end, p + 1) : keys.end) - zero;
                for (int64_t g = 0; g < job->group; g++, row++)
                    softmax_row(job, w->scores + row * AE_SCORES, first, last, begin, end, part.max + row,
                                part.sum + row * AE_VL);
            }
        }
}

/* One span of a tile from nothing into `part` (rows of all its heads). */
static void attend_span(const attn_job *job, const attn_tile *t, attn_scratch *w, int64_t span, attn_part part)
{
    const int64_t rows = t->queries * t->heads, zero = span * AE_SPAN;
    const attn_segment *s = job->segment + t->segment;
    for (int64_t i = 0; i < rows; i++) part.max[i] = -INFINITY;
    memset(part.sum, 0, (size_t)(rows * AE_VL) * sizeof *part.sum);
    memset(part.acc, 0, (size_t)(rows * job->dim) * sizeof *part.acc);
    find_pieces(job, t, span, w);
    for (int64_t i = 0; i < w->pieces; i++) {
        find_rows(job->args, w, s + w->piece[i].first, t->head, w->piece[i]);
        piece_scores(job, t, w, w->piece[i], w->piece[i].begin - zero);
    }
    softmax_span(job, t, w, span_keys(job, t, span), part);
    for (int64_t i = 0; i < w->pieces; i++) {
        if (w->pieces > 1) find_rows(job->args, w, s + w->piece[i].first, t->head, w->piece[i]);
        piece_values(job, t, w, w->piece[i], w->piece[i].begin - zero, part.acc);
    }
}

static int is_empty(const attn_job *job, const attn_tile *t, int64_t span)
{
    const attn_keys keys = span_keys(job, t, span);
    return keys.begin >= keys.end;
}

/* total <- total merged with the next span. A side that saw no key of a row leaves the other as it is. */
static void merge_span(attn_part total, attn_part next, int64_t rows, int64_t dim)
{
    for (int64_t i = 0; i < rows; i++) {
        if (next.max[i] == -INFINITY) continue;
        float *sum = total.sum + i * AE_VL, *acc = total.acc + i * dim;
        const float *sum2 = next.sum + i * AE_VL, *acc2 = next.acc + i * dim;
        if (total.max[i] == -INFINITY) {
            memcpy(sum, sum2, AE_VL * sizeof *sum);
            memcpy(acc, acc2, (size_t)dim * sizeof *acc);
            total.max[i] = next.max[i];
            continue;
        }
        const float m = fmaxf(total.max[i], next.max[i]);
        const vf f1 = vf_exp(vf_set1(total.max[i] - m)), f2 = vf_exp(vf_set1(next.max[i] - m));
        total.max[i] = m;
        vf_store(sum, vf_fma(vf_load(sum2), f2, vf_load(sum) * f1));
        for (int64_t d = 0; d < dim; d += AE_VL)
            vf_store(acc + d, vf_fma(vf_load(acc2 + d), f2, vf_load(acc + d) * f1));
    }
}

/* ---- whole tiles ---- */

/* What the weighted values of a row are multiplied by: 1 / sum. A sink joins the sum here, after all keys. */
static float output_factor(const ae_attention_args *a, int64_t head, float max, float sum)
{
    if (!a->sinks) return 1.0f / sum;
    const float top = fmaxf(max, a->sinks[head]);
    float keys[AE_VL], sink[AE_VL];
    vf_store(keys, vf_exp(vf_set1(max - top)));
    vf_store(sink, vf_exp(vf_set1(a->sinks[head] - top)));
    return keys[0] / (sum * keys[0] + sink[0]);
}

static void write_output(const attn_job *job, int64_t token, int64_t head, attn_part total, int64_t row)
{
    const ae_attention_args *a = job->args;
    const int64_t d = a->head_dim, out = (token * a->heads + head) * d;
    const vf factor = vf_set1(output_factor(a, head, total.max[row], vf_sum(vf_load(total.sum + row * AE_VL))));
    for (int64_t j = 0; j < d; j += AE_VL) {
        const vf v = vf_load(total.acc + row * job->dim + j) * factor + vf_set1(0.0f);
        const int n = (int)ae_min(AE_VL, d - j);
        if (n == AE_VL)
            a->dtype == AE_BF16 ? vf_put(a->out, out + j, v, 1) : vf_put(a->out, out + j, v, 0);
        else
            vf_put_part(a->out, out + j, n, v, a->dtype == AE_BF16);
    }
}

static void write_outputs(const attn_job *job, const attn_tile *t, attn_part total)
{
    int64_t row = 0;
    for (int64_t h = t->head; h < t->head + t->heads; h++)
        for (int64_t i = 0; i < t->segments; i++) {
            const attn_segment *s = &job->segment[t->segment + i];
            for (int64_t token = s->token; token < s->token + s->tokens; token++)
                for (int64_t g = 0; g < job->group; g++) write_output(job, token, h * job->group + g, total, row++);
        }
}

static void whole_tile(const attn_job *job, const attn_tile *t, attn_scratch *w)
{
    const int64_t first = t->begin / AE_SPAN, last = (t->end - 1) / AE_SPAN;
    load_queries(job, t, w->q);
    attend_span(job, t, w, first, w->total);
    for (int64_t span = first + 1; span <= last; span++) {
        if (is_empty(job, t, span)) continue;
        attend_span(job, t, w, span, w->part);
        merge_span(w->total, w->part, t->queries * t->heads, job->dim);
    }
    write_outputs(job, t, w->total);
}

/* Tasks are claimed one by one, each before the last is done, so that its keys can be asked for: tiles differ in cost.
 * Which thread runs one changes no bit. */
static void tiles_task(void *arg, int part, int parts)
{
    (void)parts;
    attn_job *job = arg;
    int64_t bytes;
    attn_scratch w = scratch_at(job, job->scratch[part], &bytes);
    int64_t i = atomic_fetch_add(&job->next, 1);
    while (i < job->tiles) {
        const int64_t next = atomic_fetch_add(&job->next, 1);
        w.next = next < job->tiles ? &job->tile[next] : NULL;
        if (w.next) w.next_table = job->segment[w.next->segment].table;
        whole_tile(job, &job->tile[i], &w);
        i = next;
    }
}

static void spans_task(void *arg, int part, int parts)
{
    (void)parts;
    attn_job *job = arg;
    int64_t bytes;
    attn_scratch w = scratch_at(job, job->scratch[part], &bytes);
    for (int64_t i; (i = atomic_fetch_add(&job->next, 1)) < job->tiles * job->spans;) {
        const attn_tile *t = &job->tile[i / job->spans];
        const int64_t span = i % job->spans;
        if (is_empty(job, t, span)) continue;
        load_queries(job, t, w.q);
        attend_span(job, t, &w, span, partial_of(job, i));
    }
}

static void merge_task(void *arg, int part, int parts)
{
    const attn_job *job = arg;
    for (int64_t i = job->tiles * part / parts; i < job->tiles * (part + 1) / parts; i++) {
        const attn_tile *t = &job->tile[i];
        const int64_t first = t->begin / AE_SPAN, last = (t->end - 1) / AE_SPAN;
        const attn_part total = partial_of(job, i * job->spans + first);
        for (int64_t span = first + 1; span <= last; span++)
            if (!is_empty(job, t, span)) merge_span(total, partial_of(job, i * job->spans + span), t->queries * t->heads, job->dim);
        write_outputs(job, t, total);
    }
}

int AE_FN(attention)(ae_context *ctx, const ae_attention_args *a)
{
    const int64_t tokens = a->row_offsets[a->rows];
    if (tokens == 0) return AE_OK;
    if (a->row_items && a->table_stride * a->page_tokens % AE_SPAN) return AE_BAD_CALL;
    attn_job job = {.args = a, .group = a->heads / a->kv_heads, .dim = ae_round_up(a->head_dim, AE_BLOCK)};
    if (plan_job(ctx, &job, ae_pool_threads(ctx->pool))) return AE_NO_MEMORY;
    if (!a->row_items) ae_pool_run(ctx->pool, write_kv, &job, ae_row_parts(ctx, tokens, a->kv_heads * a->head_dim, 4096));
    /* 256 keys of a head are about 5 us: 9 heads are worth a second thread from 57 positions on. */
    const int parts = ae_parts(ctx, job.keys * job.group, 256);
    if (job.spans > 1 && parts > 1) {
        ae_pool_run(ctx->pool, spans_task, &job, (int)ae_min(parts, job.tiles * job.spans));
        ae_pool_run(ctx->pool, merge_task, &job, (int)ae_min(parts, job.tiles));
    } else {
        ae_pool_run(ctx->pool, tiles_task, &job, (int)ae_min(parts, job.tiles));
    }
    return AE_OK;
}
