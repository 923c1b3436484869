/* Paged attention: queries of ragged rows over their pages, decode and prefill alike.
 *
 * One order for every query, fixed by its position alone:
 *   - keys in blocks of 32 positions, aligned to absolute positions; per block one online-softmax step;
 *   - blocks in spans of 256 positions, also aligned; each span starts from nothing, and spans are merged in order.
 * So a query gets the same bits in a decode step, in any prefill chunk, after a cache hit, and however its pages are
 * permuted. Spans are also what lets several threads work on one query: with few queries each (tile, span) is a task of
 * its own and the merge comes last; with many, one thread walks all spans of a tile and merges as it goes.
 *
 * A tile is up to 48 query rows (tokens x query heads of one key-value head). Per block its keys are transposed to
 * [head_dim][32] fp32 and its values copied to [32][head_dim] fp32, once for all rows; scores and outputs are then the
 * same tile products as in gemm.c. Keys outside a row's range get probability exactly 0, and stepping over exact zeros
 * changes no bit, so ranges may differ between the rows of a tile. (It may turn -0 into +0; the last step makes all
 * zeros +0.)
 */
#include "attention.h"

#include <math.h>
#include <stdatomic.h>

/* Rows of scores of one block, for positions block .. block + 32; out of range: probability 0. Returns via state. */
static void softmax_step(const attn_job *job, attn_state *st, float *s, int64_t begin, int64_t end)
{
    const vf floor = vf_set1(-INFINITY), scale = vf_set1((float)job->args->scale);
    const float cap = (float)job->args->softcap;
    vf v[AE_BLOCK / AE_VL], top = floor;
    AE_UNROLL
    for (int k = 0; k < AE_BLOCK / AE_VL; k++) {
        v[k] = vf_load(s + k * AE_VL) * scale;
        if (cap > 0.0f) { /* cap tanh(x / cap), tanh u = 1 - 2 / (1 + e^2u) */
            const vf e = vf_exp(v[k] * vf_set1(2.0f / cap));
            v[k] = vf_set1(cap) - vf_set1(2.0f * cap) / (e + vf_set1(1.0f));
        }
        if (begin > 0 || end < AE_BLOCK) {
            const vi at = lane_index(k * AE_VL);
            v[k] = vf_select((vi)(at >= (int32_t)begin) & (vi)(at < (int32_t)end), v[k], floor);
        }
        top = vf_max(v[k], top);
    }
    const float before = st->max, now = fmaxf(before, vf_hmax(top));
    vf sum = vf_set1(0.0f);
    AE_UNROLL
    for (int k = 0; k < AE_BLOCK / AE_VL; k++) {
        const vf p = vf_exp(v[k] - vf_set1(now));
        sum += p;
        vf_store(s + k * AE_VL, p);
    }
    if (now != before) { /* else the factor is e^0 = 1, exactly */
        const vf factor = vf_exp(vf_set1(before - now));
        for (int64_t d = 0; d < job->dim; d += AE_VL) vf_store(st->acc + d, vf_load(st->acc + d) * factor);
        sum = vf_fma(vf_load(st->sum), factor, sum);
    } else {
        sum = vf_load(st->sum) + sum;
    }
    st->max = now;
    vf_store(st->sum, sum);
}

static void scores_of_block(const attn_scratch *w, const float *q, int64_t rows, int64_t head_dim, int64_t dim)
{
    for (int64_t c = 0; c < AE_BLOCK; c += AE_NR)
        for (int64_t r = 0; r < rows; r += AE_MR) {
            const float *x = q + r * dim;
            float *s = w->scores + r * AE_BLOCK + c;
            switch (ae_min(AE_MR, rows - r)) {
#define SCORE_CASE(MR) \
    case MR: tile_c(MR, AE_W_F32, x, dim, w->keys + c, AE_BLOCK, head_dim, s, AE_BLOCK, 0, 0, 0); break;
                AE_EACH_MR(SCORE_CASE)
            }
        }
}

/* acc += P V over positions first .. last - 1 of the block, from staged values. */
static void staged_values(const attn_scratch *w, float *acc, int64_t rows, int64_t dim, int64_t first, int64_t last)
{
    for (int64_t c = 0; c < dim; c += AE_NR)
        for (int64_t r = 0; r < rows; r += AE_MR) {
            const float *p = w->scores + r * AE_BLOCK + first, *v = w->values + first * dim + c;
            float *to = acc + r * dim + c;
            switch (ae_min(AE_MR, rows - r)) {
#define VALUE_CASE(MR) \
    case MR: tile_c(MR, AE_W_F32, p, AE_BLOCK, v, dim, last - first, to, dim, 1, 0, 0); break;
                AE_EACH_MR(VALUE_CASE)
            }
        }
}

/* The same for at most MR rows (decode), straight from the pages, cut where a page ends. */
AE_INLINE void paged_values(const int kind, const attn_job *job, const attn_tile *t, const float *scores, int64_t head,
                            int64_t block, int64_t first, int64_t last, float *acc, int64_t rows)
{
    const ae_attention_args *a = job->args;
    for (int64_t p = first; p < last;) {
        const int64_t n = ae_min(last, (p / a->page_tokens + 1) * a->page_tokens) - p;
        const char *v = page_row(a, 1, t->row, head, p);
        const char *next = p + AE_BLOCK < t->end ? page_row(a, 1, t->row, head, p + AE_BLOCK) : v;
        const int64_t ahead = (next - v) / (kind == AE_W_F32 ? 4 : 2);
        for (int64_t c = 0; c < job->dim; c += AE_NR) {
            const void *from = v + c * (kind == AE_W_F32 ? 4 : 2);
            switch (rows) {
#define PAGED_CASE(MR)                                                                                                  \
    case MR:                                                                                                            \
        tile_c(MR, kind, scores + p - block, AE_BLOCK, from, a->v_token_stride, n, acc + c, job->dim, 1, 1, ahead);     \
        break;
                AE_EACH_MR(PAGED_CASE)
            }
        }
        p += n;
    }
}

/* One block for all rows of one head of a tile. */
static void attend_block(const attn_job *job, const attn_tile *t, const attn_scratch *w, int64_t head, int64_t block,
                         const float *q, float *max, float *sum, float *acc)
{
    const int64_t group = job->group, rows = t->tokens * group, dim = job->dim;
    const int64_t first = ae_max(block, t->begin), last = ae_min(block + AE_BLOCK, t->end);
    const int in_place = rows <= AE_MR && job->args->head_dim == dim;
    stage_block(job, w, t, head, block, in_place);
    scores_of_block(w, q, rows, job->args->head_dim, dim);
    for (int64_t i = 0; i < rows; i++) {
        const int64_t position = t->position + i / group;
        const int64_t begin = ae_max(0, key_begin(job->args, position) - block);
        const int64_t end = ae_min(AE_BLOCK, position + 1 - block);
        float *s = w->scores + i * AE_BLOCK;
        if (begin >= end) {
            memset(s, 0, AE_BLOCK * sizeof *s);
            continue;
        }
        attn_state st = {max[i], sum + i * AE_VL, acc + i * dim};
        softmax_step(job, &st, s, begin, end);
        max[i] = st.max;
    }
    if (!in_place)
        staged_values(w, acc, rows, dim, first - block, last - block);
    else if (job->args->kv_dtype == AE_BF16)
        paged_values(AE_W_BF16, job, t, w->scores, head, block, first, last, acc, rows);
    else
        paged_values(AE_W_F32, job, t, w->scores, head, block, first, last, acc, rows);
}

/* One span of a tile from nothing into `part` (rows of all its heads). */
static void attend_span(const attn_job *job, const attn_tile *t, const attn_scratch *w, int64_t span, attn_part part)
{
    const int64_t rows = t->tokens * job->group, dim = job->dim, total = rows * t->heads;
    const int64_t begin = ae_max(t->begin, span * AE_SPAN) / AE_BLOCK * AE_BLOCK;
    const int64_t end = ae_min(t->end, (span + 1) * AE_SPAN);
    for (int64_t i = 0; i < total; i++) part.max[i] = -INFINITY;
    memset(part.sum, 0, (size_t)(total * AE_VL) * sizeof *part.sum);
    memset(part.acc, 0, (size_t)(total * dim) * sizeof *part.acc);
    for (int64_t block = begin; block < end; block += AE_BLOCK)
        for (int64_t h = 0; h < t->heads; h++) {
            const int64_t at = h * rows;
            attend_block(job, t, w, t->head + h, block, w->q + at * dim, part.max + at, part.sum + at * AE_VL,
                         part.acc + at * dim);
        }
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

static void write_outputs(const attn_job *job, const attn_tile *t, attn_part total)
{
    const ae_attention_args *a = job->args;
    const int64_t group = job->group, rows = t->tokens * group, d = a->head_dim;
    for (int64_t i = 0; i < rows * t->heads; i++) {
        const int64_t head = (t->head + i / rows) * group + i % group, token = t->token + i % rows / group;
        const int64_t out = (token * a->heads + head) * d;
        const vf inv = vf_set1(output_factor(a, head, total.max[i], vf_sum(vf_load(total.sum + i * AE_VL))));
        for (int64_t j = 0; j < d; j += AE_VL) {
            const vf v = vf_load(total.acc + i * job->dim + j) * inv + vf_set1(0.0f);
            const int n = (int)ae_min(AE_VL, d - j);
            if (n == AE_VL)
                a->dtype == AE_BF16 ? vf_put(a->out, out + j, v, 1) : vf_put(a->out, out + j, v, 0);
            else
                vf_put_part(a->out, out + j, n, v, a->dtype == AE_BF16);
        }
    }
}

static void whole_tile(const attn_job *job, const attn_tile *t, const attn_scratch *w)
{
    const int64_t rows = t->tokens * job->group * t->heads;
    const int64_t first = t->begin / AE_SPAN, last = (t->end - 1) / AE_SPAN;
    load_queries(job, t, w->q);
    attend_span(job, t, w, first, w->total);
    for (int64_t span = first + 1; span <= last; span++) {
        attend_span(job, t, w, span, w->part);
        merge_span(w->total, w->part, rows, job->dim);
    }
    write_outputs(job, t, w->total);
}

/* Tasks are claimed one by one: tiles differ in cost. Which thread runs one changes no bit. */
static void tiles_task(void *arg, int part, int parts)
{
    (void)parts;
    attn_job *job = arg;
    const attn_scratch w = scratch_of(job, job->scratch[part]);
    for (int64_t i; (i = atomic_fetch_add(&job->next, 1)) < job->tiles;) whole_tile(job, &job->tile[i], &w);
}

static void spans_task(void *arg, int part, int parts)
{
    (void)parts;
    attn_job *job = arg;
    const attn_scratch w = scratch_of(job, job->scratch[part]);
    for (int64_t i; (i = atomic_fetch_add(&job->next, 1)) < job->tiles * job->spans;) {
        const attn_tile *t = &job->tile[i / job->spans];
        const int64_t span = i % job->spans;
        if (span < t->begin / AE_SPAN || span > (t->end - 1) / AE_SPAN) continue;
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
            merge_span(total, partial_of(job, i * job->spans + span), t->tokens * job->group * t->heads, job->dim);
        write_outputs(job, t, total);
    }
}

int AE_FN(attention)(ae_context *ctx, const ae_attention_args *a)
{
    const int64_t tokens = a->row_offsets[a->rows];
    if (tokens == 0) return AE_OK;
    attn_job job = {.args = a, .group = a->heads / a->kv_heads, .dim = ae_round_up(a->head_dim, AE_NR)};
    const int threads = ae_pool_threads(ctx->pool);
    if (plan_tiles(ctx, &job, threads)) return AE_NO_MEMORY;
    ae_pool_run(ctx->pool, write_kv, &job, (int)ae_min(tokens, ae_parts(ctx, tokens * a->kv_heads * a->head_dim, 8192)));
    const int64_t keys = job.keys; /* query rows x keys: the work */
    const int parts = ae_parts(ctx, keys * job.group, 1024);
    if (job.spans > 1 && parts > 1) {
        ae_pool_run(ctx->pool, spans_task, &job, (int)ae_min(parts, job.tiles * job.spans));
        ae_pool_run(ctx->pool, merge_task, &job, (int)ae_min(parts, job.tiles));
    } else {
        ae_pool_run(ctx->pool, tiles_task, &job, (int)ae_min(parts, job.tiles));
    }
    return AE_OK;
}
