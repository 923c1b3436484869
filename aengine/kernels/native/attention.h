/* What the parts of paged attention share: tiles of queries, their scratch, where a position lies in the pages.
 *
 * attention_plan.h cuts a step into tiles and finds rows that share pages; attention_pages.h moves keys and values;
 * attention_products.h multiplies; attention.c orders all that into softmax, spans and threads.
 */
#ifndef AE_ATTENTION_H
#define AE_ATTENTION_H

#include <stdatomic.h>

#include "internal.h"
#include "tile.h"

#define AE_BLOCK (4 * AE_VL)           /* keys scored at once: four vectors of columns */
#define AE_SPAN 256                    /* positions of one softmax, and of one independent partial result */
#define AE_AHEAD (AE_BLOCK + 17)       /* rows of pages known beyond the end of a piece */
#define AE_SCORES (AE_SPAN + AE_BLOCK) /* a row of scores; the last block of a piece may stand over */
#define AE_TILE_FLOATS 36864           /* queries, outputs and scores of a tile: 144 KiB, beside staged values in L2 */
#define AE_IN_PLACE (2 * AE_MR)        /* up to so many query rows use values where they lie; more stage them as fp32 */
#define AE_SHARED_TOKENS 64            /* rows that share fewer positions are not worth one tile */

/* Tokens of one ragged row, with the keys any of them sees. `at`: query rows of the tile before this segment's.
 * `table`: the row's. In cross-attention it is that of the row's first item, and the next item's positions begin where
 * those that the table could name end: tables are dense, so they are one. */
typedef struct {
    int64_t table, token, tokens, position; /* position of the first */
    int64_t begin, end;
    int64_t at;
} attn_segment;

/* Queries of segments segment .. segment + segments - 1, for key-value heads head .. head + heads - 1. Several segments:
 * rows that share pages. `queries`: rows (token x query head) of one key-value head. */
typedef struct {
    int64_t segment, segments;
    int64_t head, heads;
    int64_t queries;
    int64_t begin, end; /* keys any query sees */
} attn_tile;

/* Positions begin .. end - 1 of one span, in the same pages for segments first .. last - 1 of a tile. */
typedef struct {
    int64_t first, last;
    int64_t begin, end;
} attn_piece;

typedef struct {
    float *max; /* [rows] */
    float *sum; /* [rows][VL], lane-wise partial sums */
    float *acc; /* [rows][dim] */
} attn_part;

typedef struct {
    const ae_attention_args *args;
    int64_t group, dim; /* query heads per key-value head; head_dim padded to whole blocks of four vectors */
    attn_segment *segment;
    attn_tile *tile;
    int64_t segments, tiles;
    int64_t tile_rows, tile_segments; /* most rows (queries x heads) and segments of a tile */
    int64_t spans;                    /* > 1: (tile, span) tasks with partial results in `partials` */
    int64_t keys;                     /* query rows x keys: the work */
    float *partials;
    void *scratch[AE_MAX_THREADS];
    _Atomic int64_t next;
} attn_job;

typedef struct {
    float *keys;   /* [dim][BLOCK] */
    float *values; /* [dim / NR][SPAN][NR] */
    float *scores; /* [rows][SCORES] */
    float *scales; /* [SCORES], of int8 pages */
    float *q;      /* [rows][dim] */
    attn_part part, total;
    const char **k_rows, **v_rows; /* [SPAN + AHEAD], for the tile's first head; see find_rows */
    attn_piece *piece;
    int64_t pieces;
    const attn_tile *next; /* what this thread does next, if known, and the table that names its first keys */
    int64_t next_table;
} attn_scratch;

/* First key a query at `position` sees. */
static inline int64_t key_begin(const ae_attention_args *a, int64_t position)
{
    int64_t begin = 0;
    if (a->window > 0) begin = ae_max(begin, position - a->window + 1);
    if (a->chunk > 0) begin = ae_max(begin, position / a->chunk * a->chunk);
    return begin;
}

static inline int64_t kv_bytes(const ae_attention_args *a)
{
    return a->kv_dtype == AE_I8 ? 1 : ae_dtype_bytes(a->kv_dtype);
}

/* Keys begin .. end - 1. */
typedef struct {
    int64_t begin, end;
} attn_keys;

/* Keys of a span that any query of a tile sees: none, where an item ended before. */
static inline attn_keys span_keys(const attn_job *job, const attn_tile *t, int64_t span)
{
    const ae_attention_args *a = job->args;
    attn_keys keys = {ae_max(t->begin, span * AE_SPAN), ae_min(t->end, (span + 1) * AE_SPAN)};
    if (a->row_items && keys.begin < keys.end) {
        const int64_t width = a->table_stride * a->page_tokens, item = keys.begin / width;
        keys.end = ae_min(keys.end, item * width + a->item_tokens[job->segment[t->segment].table + item]);
    }
    return keys;
}

static inline int64_t page_of(const ae_attention_args *a, int64_t table, int64_t position)
{
    return a->tables[table * a->table_stride + position / a->page_tokens];
}

static inline const char *page_row(const ae_attention_args *a, int values, int64_t table, int64_t head, int64_t position)
{
    const int64_t page = page_of(a, table, position), slot = position % a->page_tokens;
    const int64_t offset = values ? page * a->v_page_stride + slot * a->v_token_stride + head * a->v_kv_stride
                                  : page * a->k_page_stride + slot * a->k_token_stride + head * a->k_kv_stride;
    return (const char *)(values ? a->v_pages : a->k_pages) + offset * kv_bytes(a);
}

static inline float *scale_of(const ae_attention_args *a, int values, int64_t table, int64_t head, int64_t position)
{
    const int64_t page = page_of(a, table, position), slot = position % a->page_tokens;
    return (values ? a->v_scales : a->k_scales) + page * a->scale_page_stride + slot * a->scale_token_stride +
           head * a->scale_kv_stride;
}

/* ---- memory ---- */

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

static inline void *cut(uintptr_t *at, int64_t bytes)
{
    void *piece = (void *)*at;
    *at += (uintptr_t)ae_round_up(bytes, 64);
    return piece;
}

/* Lays out scratch from `memory` on; `bytes` gets its size. With NULL only the size is of use. */
static inline attn_scratch scratch_at(const attn_job *job, void *memory, int64_t *bytes)
{
    const int64_t rows = job->tile_rows, dim = job->dim, part = part_floats(job, rows) * 4;
    uintptr_t at = (uintptr_t)memory;
    attn_scratch w = {0};
    w.keys = cut(&at, dim * AE_BLOCK * 4);
    w.values = cut(&at, dim * AE_SPAN * 4);
    w.scores = cut(&at, rows * AE_SCORES * 4);
    w.scales = cut(&at, AE_SCORES * 4);
    w.q = cut(&at, rows * dim * 4);
    w.part = part_at(cut(&at, part), rows);
    w.total = part_at(cut(&at, part), rows);
    w.k_rows = cut(&at, (AE_SPAN + AE_AHEAD) * (int64_t)sizeof *w.k_rows);
    w.v_rows = cut(&at, (AE_SPAN + AE_AHEAD) * (int64_t)sizeof *w.v_rows);
    w.piece = cut(&at, 2 * job->tile_segments * (int64_t)sizeof *w.piece);
    *bytes = (int64_t)(at - (uintptr_t)memory);
    return w;
}

#endif
