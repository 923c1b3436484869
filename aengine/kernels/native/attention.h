/* Parts of attention.c that move data: ranges, tiles, staging of keys and values, the KV write. */
#ifndef AE_ATTENTION_H
#define AE_ATTENTION_H

#include <stdatomic.h>

#include "internal.h"
#include "tile.h"

#define AE_BLOCK 32      /* positions of one softmax step */
#define AE_SPAN 256      /* positions of one independent partial result */
#define AE_TILE_ROWS 48  /* query rows that share a staged block: staging is then about 5 % of the work */

/* Queries `token` .. of one ragged row, for key-value heads head .. head + heads - 1. */
typedef struct {
    int64_t row, token, tokens, position; /* position of the first */
    int64_t head, heads;
    int64_t begin, end; /* keys any of its queries sees */
} attn_tile;

typedef struct {
    float *max; /* [rows] */
    float *sum; /* [rows][VL], lane-wise partial sums */
    float *acc; /* [rows][dim] */
} attn_part;

typedef struct {
    float max;
    float *sum;
    float *acc;
} attn_state;

typedef struct {
    const ae_attention_args *args;
    int64_t group, dim; /* query heads per key-value head; head_dim padded to whole tiles */
    attn_tile *tile;
    int64_t tiles, tile_rows; /* most rows x heads of a tile */
    int64_t spans;            /* > 1: (tile, span) tasks with partial results in `partials` */
    int64_t keys;
    float *partials;
    void *scratch[AE_MAX_THREADS];
    _Atomic int64_t next;
} attn_job;

typedef struct {
    float *keys;   /* [dim][32] */
    float *values; /* [32][dim] */
    float *scores; /* [rows][32] */
    float *q;      /* [rows][dim] */
    attn_part part, total;
} attn_scratch;

AE_INLINE vi lane_index(int first)
{
#if AE_VL == 16
    return (vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + first;
#elif AE_VL == 8
    return (vi){0, 1, 2, 3, 4, 5, 6, 7} + first;
#else
    return (vi){0, 1, 2, 3} + first;
#endif
}

/* First key a query at `position` sees. */
static inline int64_t key_begin(const ae_attention_args *a, int64_t position)
{
    int64_t begin = 0;
    if (a->window > 0) begin = ae_max(begin, position - a->window + 1);
    if (a->chunk > 0) begin = ae_max(begin, position / a->chunk * a->chunk);
    return begin;
}

static inline int64_t part_floats(const attn_job *job, int64_t rows)
{
    return ae_round_up(rows, 16) + rows * AE_VL + rows * job->dim;
}

static inline attn_part part_at(float *at, int64_t rows)
{
    float *sum = at + ae_round_up(rows, 16);
    return (attn_part){at, sum, sum + rows * AE_VL};
}

static inline attn_part partial_of(const attn_job *job, int64_t index)
{
    return part_at(job->partials + index * part_floats(job, job->tile_rows), job->tile_rows);
}

static inline int64_t scratch_floats(const attn_job *job)
{
    return job->dim * AE_BLOCK * 2 + job->tile_rows * (AE_BLOCK + job->dim) + 2 * part_floats(job, job->tile_rows);
}

static inline attn_scratch scratch_of(const attn_job *job, void *memory)
{
    attn_scratch w;
    w.keys = memory;
    w.values = w.keys + job->dim * AE_BLOCK;
    w.scores = w.values + AE_BLOCK * job->dim;
    w.q = w.scores + job->tile_rows * AE_BLOCK;
    float *part = w.q + job->tile_rows * job->dim;
    w.part = part_at(part, job->tile_rows);
    w.total = part_at(part + part_floats(job, job->tile_rows), job->tile_rows);
    return w;
}

static inline const char *page_row(const ae_attention_args *a, int values, int64_t row, int64_t head, int64_t position)
{
    const int64_t page = a->tables[row * a->table_stride + position / a->page_tokens], slot = position % a->page_tokens;
    const int64_t offset = values ? page * a->v_page_stride + slot * a->v_token_stride + head * a->v_kv_stride
                                  : page * a->k_page_stride + slot * a->k_token_stride + head * a->k_kv_stride;
    return (const char *)(values ? a->v_pages : a->k_pages) + offset * ae_dtype_bytes(a->kv_dtype);
}

/* ---- staging ---- */

#if defined(__AVX2__)
/* Row i beside row i + 4: a 128-bit load and an inserting load, no shuffle. */
AE_INLINE __m256 load_pair(const char *low, const char *high, int64_t offset)
{
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps((const float *)(low + offset))),
                                _mm_loadu_ps((const float *)(high + offset)), 1);
}

/* Four words of each of eight rows -> four vectors of eight; 8 shuffles. */
AE_INLINE void transpose_words(const char *const *rows, int64_t offset, __m256 column[4])
{
    const __m256 a = load_pair(rows[0], rows[4], offset), b = load_pair(rows[1], rows[5], offset);
    const __m256 c = load_pair(rows[2], rows[6], offset), d = load_pair(rows[3], rows[7], offset);
    const __m256 ab_low = _mm256_unpacklo_ps(a, b), ab_high = _mm256_unpackhi_ps(a, b);
    const __m256 cd_low = _mm256_unpacklo_ps(c, d), cd_high = _mm256_unpackhi_ps(c, d);
    column[0] = _mm256_shuffle_ps(ab_low, cd_low, 0x44);
    column[1] = _mm256_shuffle_ps(ab_low, cd_low, 0xee);
    column[2] = _mm256_shuffle_ps(ab_high, cd_high, 0x44);
    column[3] = _mm256_shuffle_ps(ab_high, cd_high, 0xee);
}

/* Eight rows of eight elements -> eight columns of eight fp32. Two bf16 travel as one word and part at the end. */
AE_INLINE void transpose8(const char *const *rows, int64_t d, int bf16, float *to)
{
    __m256 column[4];
    if (bf16) {
        const __m256 high = _mm256_castsi256_ps(_mm256_set1_epi32((int)0xffff0000u));
        transpose_words(rows, 2 * d, column);
        AE_UNROLL
        for (int i = 0; i < 4; i++) {
            const __m256i even = _mm256_slli_epi32(_mm256_castps_si256(column[i]), 16);
            _mm256_storeu_ps(to + 2 * i * AE_BLOCK, _mm256_castsi256_ps(even));
            _mm256_storeu_ps(to + (2 * i + 1) * AE_BLOCK, _mm256_and_ps(column[i], high));
        }
        return;
    }
    AE_UNROLL
    for (int half = 0; half < 2; half++) {
        transpose_words(rows, 4 * d + 16 * half, column);
        AE_UNROLL
        for (int i = 0; i < 4; i++) _mm256_storeu_ps(to + (4 * half + i) * AE_BLOCK, column[i]);
    }
}
#else
AE_INLINE void transpose8(const char *const *rows, int64_t d, int bf16, float *to)
{
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++)
            to[j * AE_BLOCK + i] = bf16 ? bf16_to_f32(((const uint16_t *)rows[i])[d + j]) : ((const float *)rows[i])[d + j];
}
#endif

/* Row pointers of a block, and of the same head's next block. Pages lie anywhere, so the hardware does not foresee them;
 * asking for a row of the next block per row staged doubled the rate of decode from memory. */
typedef struct {
    const char *now[AE_BLOCK];
    const char *next[AE_BLOCK];
} block_rows;

AE_INLINE void prefetch_row(const char *row, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 3);
}

/* Keys of one block, [head_dim][32]. */
AE_INLINE void stage_keys(float *keys, const block_rows *rows, int64_t head_dim, const int bf16)
{
    for (int64_t i = 0; i < AE_BLOCK; i += 8) {
        int64_t d = 0, row = i;
        for (; d + 8 <= head_dim; d += 8) {
            transpose8(rows->now + i, d, bf16, keys + d * AE_BLOCK + i);
            if (row < i + 8) prefetch_row(rows->next[row++], head_dim * (bf16 ? 2 : 4));
        }
        for (; d < head_dim; d++)
            for (int64_t j = i; j < i + 8; j++)
                keys[d * AE_BLOCK + j] =
                    bf16 ? bf16_to_f32(((const uint16_t *)rows->now[j])[d]) : ((const float *)rows->now[j])[d];
    }
}

/* Values of positions first .. last - 1 of one block, [32][dim], padded with zeros. */
AE_INLINE void stage_values(float *values, const block_rows *rows, int64_t first, int64_t last, int64_t head_dim,
                            int64_t dim, const int bf16)
{
    for (int64_t i = first; i < last; i++) {
        const char *from = rows->now[i];
        float *to = values + i * dim;
        prefetch_row(rows->next[i], head_dim * (bf16 ? 2 : 4));
        int64_t d = 0;
        for (; d + AE_VL <= head_dim; d += AE_VL) vf_store(to + d, vf_get(from, d, bf16));
        for (; d < dim; d++)
            to[d] = d >= head_dim ? 0.0f : bf16 ? bf16_to_f32(((const uint16_t *)from)[d]) : ((const float *)from)[d];
    }
}

/* rows[p - block] for positions p of first .. last - 1; `other` where the block has none. */
static void find_rows(const ae_attention_args *a, int values, int64_t row, int64_t head, int64_t block, int64_t first,
                      int64_t last, const char *other, const char **rows)
{
    const int64_t step = (values ? a->v_token_stride : a->k_token_stride) * ae_dtype_bytes(a->kv_dtype);
    for (int64_t i = 0; i < first - block; i++) rows[i] = other;
    for (int64_t p = first; p < last;) {
        const char *at = page_row(a, values, row, head, p);
        const int64_t stop = ae_min(last, (p / a->page_tokens + 1) * a->page_tokens);
        for (; p < stop; p++, at += step) rows[p - block] = at;
    }
    for (int64_t i = ae_max(0, last - block); i < AE_BLOCK; i++) rows[i] = other;
}

/* Positions first .. last - 1 of the block are read; for the other columns of the key tile a valid row stands in (their
 * scores are masked), so that no stale or unmapped memory is touched. */
static void stage_block(const attn_job *job, const attn_scratch *w, const attn_tile *t, int64_t head, int64_t block,
                        int keys_only)
{
    const ae_attention_args *a = job->args;
    const int bf16 = a->kv_dtype == AE_BF16;
    const int64_t first = ae_max(block, t->begin), last = ae_min(block + AE_BLOCK, t->end), after = block + AE_BLOCK;
    block_rows rows;
    for (int values = 0; values < (keys_only ? 1 : 2); values++) {
        const char *valid = page_row(a, values, t->row, head, first);
        find_rows(a, values, t->row, head, block, first, last, valid, rows.now);
        find_rows(a, values, t->row, head, after, after, ae_min(after + AE_BLOCK, t->end), valid, rows.next);
        if (!values)
            bf16 ? stage_keys(w->keys, &rows, a->head_dim, 1) : stage_keys(w->keys, &rows, a->head_dim, 0);
        else if (bf16)
            stage_values(w->values, &rows, first - block, last - block, a->head_dim, job->dim, 1);
        else
            stage_values(w->values, &rows, first - block, last - block, a->head_dim, job->dim, 0);
    }
}

/* The tile's queries as fp32 [heads][tokens][group][dim]. */
static void load_queries(const attn_job *job, const attn_tile *t, float *q)
{
    const ae_attention_args *a = job->args;
    for (int64_t h = 0; h < t->heads; h++)
        for (int64_t i = 0; i < t->tokens; i++)
            for (int64_t g = 0; g < job->group; g++, q += job->dim) {
                const int64_t at = (t->token + i) * a->q_stride + ((t->head + h) * job->group + g) * a->q_head_stride;
                for (int64_t d = 0; d < a->head_dim; d++)
                    q[d] = a->dtype == AE_BF16 ? bf16_to_f32(((const uint16_t *)a->q)[at + d]) : ((const float *)a->q)[at + d];
            }
}

/* ---- the KV write ---- */

AE_INLINE void convert_row(char *to, int to_bf16, const void *from, int64_t at, int from_bf16, int64_t n)
{
    if (to_bf16 == from_bf16) {
        const int64_t size = to_bf16 ? 2 : 4;
        memcpy(to, (const char *)from + at * size, (size_t)(n * size));
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        const float x = from_bf16 ? bf16_to_f32(((const uint16_t *)from)[at + i]) : ((const float *)from)[at + i];
        if (to_bf16)
            ((uint16_t *)to)[i] = f32_to_bf16(x);
        else
            ((float *)to)[i] = x;
    }
}

static void write_token(const ae_attention_args *a, int64_t row, int64_t token, int64_t position)
{
    const int from = a->dtype == AE_BF16, to = a->kv_dtype == AE_BF16;
    for (int64_t h = 0; h < a->kv_heads; h++) {
        convert_row((char *)page_row(a, 0, row, h, position), to, a->k, token * a->k_stride + h * a->k_head_stride, from,
                    a->head_dim);
        convert_row((char *)page_row(a, 1, row, h, position), to, a->v, token * a->v_stride + h * a->v_head_stride, from,
                    a->head_dim);
    }
}

static void write_kv(void *arg, int part, int parts)
{
    const ae_attention_args *a = ((const attn_job *)arg)->args;
    const int64_t tokens = a->row_offsets[a->rows], t0 = tokens * part / parts, t1 = tokens * (part + 1) / parts;
    for (int64_t row = 0; row < a->rows; row++) {
        const int64_t begin = a->row_offsets[row], end = a->row_offsets[row + 1];
        const int64_t start = a->context[row] - (end - begin);
        for (int64_t t = ae_max(begin, t0); t < ae_min(end, t1); t++) write_token(a, row, t, start + t - begin);
    }
}

/* ---- tiles ---- */

static void add_tile(attn_job *job, int64_t row, int64_t token, int64_t tokens, int64_t position, int64_t head,
                     int64_t heads)
{
    job->tile[job->tiles++] = (attn_tile){.row = row,
                                          .token = token,
                                          .tokens = tokens,
                                          .position = position,
                                          .head = head,
                                          .heads = heads,
                                          .begin = key_begin(job->args, position),
                                          .end = position + tokens};
    job->tile_rows = ae_max(job->tile_rows, tokens * job->group * heads);
    job->keys += tokens * heads * (position + tokens - key_begin(job->args, position));
}

/* Prefill rows first, for they make the large tasks. With rows enough for every thread a decode row is one task with all
 * its heads: a block of its pages is then read as one contiguous piece. */
static int plan_tiles(ae_context *ctx, attn_job *job, int threads)
{
    const ae_attention_args *a = job->args;
    const int64_t tokens = a->row_offsets[a->rows], step = ae_max(1, AE_TILE_ROWS / job->group);
    job->tile = ae_pool_scratch(ctx->pool, AE_SHARED_A, (size_t)(tokens * a->kv_heads) * sizeof(attn_tile));
    if (!job->tile) return 1;
    for (int decode = 0; decode < 2; decode++)
        for (int64_t row = 0; row < a->rows; row++) {
            const int64_t begin = a->row_offsets[row], count = a->row_offsets[row + 1] - begin;
            const int64_t start = a->context[row] - count, heads = decode && a->rows >= 2 * threads ? a->kv_heads : 1;
            if ((count == 1) != decode) continue;
            for (int64_t t = 0; t < count; t += step)
                for (int64_t h = 0; h < a->kv_heads; h += heads)
                    add_tile(job, row, begin + t, ae_min(step, count - t), start + t, h, heads);
        }
    int64_t last = 0;
    for (int64_t i = 0; i < job->tiles; i++) last = ae_max(last, (job->tile[i].end - 1) / AE_SPAN);
    job->spans = job->tiles < 4 * threads && threads > 1 ? last + 1 : 1;
    if (job->spans > 1) {
        const int64_t floats = job->tiles * job->spans * part_floats(job, job->tile_rows);
        job->partials = ae_pool_scratch(ctx->pool, AE_SHARED_B, (size_t)floats * 4);
        if (!job->partials) return 1;
    }
    for (int i = 0; i < threads; i++)
        if (!(job->scratch[i] = ae_pool_scratch(ctx->pool, i, (size_t)scratch_floats(job) * 4))) return 1;
    return 0;
}

#endif
