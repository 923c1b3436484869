/* Which queries are computed together: segments, tiles, and the pieces of pages that segments of a tile share.
 *
 * Nothing here touches a bit of any result: a query's own sequence of operations is the same in every tile.
 */
#ifndef AE_ATTENTION_PLAN_H
#define AE_ATTENTION_PLAN_H

#include "attention.h"

/* ---- pieces of a span ---- */

typedef struct {
    const ae_attention_args *args;
    const attn_segment *segment; /* of the tile */
    int64_t stop;                /* of the span */
    attn_scratch *scratch;
} piece_walk;

static inline int64_t stop_in(const piece_walk *walk, int64_t i) { return ae_min(walk->segment[i].end, walk->stop); }

static inline void add_piece(piece_walk *walk, int64_t first, int64_t last, int64_t begin, int64_t end)
{
    walk->scratch->piece[walk->scratch->pieces++] = (attn_piece){first, last, begin, end};
}

/* Cuts positions `from` .. of segments first .. last - 1 into pieces: as long as the segments name the same pages they
 * stay together, then each run of equals goes on alone. A segment's pieces come in rising order. */
static void walk_pieces(piece_walk *walk, int64_t first, int64_t last, int64_t from)
{
    const int64_t page = walk->args->page_tokens;
    while (first < last) {
        const attn_segment *lead = &walk->segment[first];
        const int64_t begin = ae_max(from, lead->begin);
        int64_t end = stop_in(walk, first), run = first + 1;
        if (begin >= end) {
            first++;
            continue;
        }
        for (; run < last; run++) {
            const attn_segment *s = &walk->segment[run];
            if (ae_max(from, s->begin) != begin || stop_in(walk, run) <= begin) break;
            if (page_of(walk->args, s->table, begin) != page_of(walk->args, lead->table, begin)) break;
            end = ae_min(end, stop_in(walk, run));
        }
        int64_t shared = run == first + 1 ? end : ae_min(end, (begin / page + 1) * page);
        while (shared < end) {
            const int64_t name = page_of(walk->args, lead->table, shared);
            int64_t i = first + 1;
            while (i < run && page_of(walk->args, walk->segment[i].table, shared) == name) i++;
            if (i < run) break;
            shared = ae_min(end, shared + page);
        }
        add_piece(walk, first, run, begin, shared);
        if (run > first + 1) walk_pieces(walk, first, run, shared);
        first = run;
    }
}

static void find_pieces(const attn_job *job, const attn_tile *t, int64_t span, attn_scratch *w)
{
    piece_walk walk = {job->args, job->segment + t->segment, span_keys(job, t, span).end, w};
    w->pieces = 0;
    walk_pieces(&walk, 0, t->segments, span * AE_SPAN);
}

/* ---- tiles ---- */

static inline int64_t row_tokens(const ae_attention_args *a, int64_t row)
{
    return a->row_offsets[row + 1] - a->row_offsets[row];
}

static inline int64_t row_table(const ae_attention_args *a, int64_t row) { return a->row_items ? a->row_items[row] : row; }

/* First and last key + 1 that any token of a row sees. */
static inline attn_keys row_keys(const ae_attention_args *a, int64_t row)
{
    if (!a->row_items) return (attn_keys){key_begin(a, a->context[row] - row_tokens(a, row)), a->context[row]};
    const int64_t last = a->row_items[row + 1] - 1;
    return (attn_keys){0, (last - a->row_items[row]) * a->table_stride * a->page_tokens + a->item_tokens[last]};
}

/* Rows by their pages, from the first they read; then by number. */
static int rows_in_order(const ae_attention_args *a, int64_t x, int64_t y)
{
    const attn_keys kx = row_keys(a, x), ky = row_keys(a, y);
    const int64_t cx = kx.begin / a->page_tokens, cy = ky.begin / a->page_tokens;
    if (cx != cy) return cx < cy;
    const int64_t columns = (ae_min(kx.end, ky.end) - 1) / a->page_tokens + 1;
    const int32_t *tx = a->tables + row_table(a, x) * a->table_stride, *ty = a->tables + row_table(a, y) * a->table_stride;
    for (int64_t c = cx; c < columns; c++)
        if (tx[c] != ty[c]) return tx[c] < ty[c];
    return x < y;
}

static void sort_rows(const ae_attention_args *a, int64_t *rows, int64_t count)
{
    for (int64_t gap = count / 2; gap > 0; gap = gap == 2 ? 1 : gap * 5 / 11)
        for (int64_t i = gap; i < count; i++) {
            const int64_t row = rows[i];
            int64_t j = i;
            for (; j >= gap && rows_in_order(a, row, rows[j - gap]); j -= gap) rows[j] = rows[j - gap];
            rows[j] = row;
        }
}

/* Whether two rows see the same items: all their entries in the same pages. */
static int share_items(const ae_attention_args *a, int64_t x, int64_t y)
{
    const int64_t ix = a->row_items[x], iy = a->row_items[y], items = a->row_items[x + 1] - ix;
    if (a->row_items[y + 1] - iy != items) return 0;
    for (int64_t i = 0; i < items; i++) {
        if (a->item_tokens[ix + i] != a->item_tokens[iy + i]) return 0;
        for (int64_t p = 0; p < a->item_tokens[ix + i]; p += a->page_tokens)
            if (page_of(a, ix + i, p) != page_of(a, iy + i, p)) return 0;
    }
    return 1;
}

static int share_pages(const ae_attention_args *a, int64_t x, int64_t y)
{
    if (a->row_items) return share_items(a, x, y);
    const attn_keys kx = row_keys(a, x), ky = row_keys(a, y);
    const int64_t begin = kx.begin / a->page_tokens, end = begin + ae_ceil_div(AE_SHARED_TOKENS, a->page_tokens);
    if (begin != ky.begin / a->page_tokens || end * a->page_tokens > ae_min(kx.end, ky.end)) return 0;
    for (int64_t c = begin; c < end; c++)
        if (a->tables[x * a->table_stride + c] != a->tables[y * a->table_stride + c]) return 0;
    return 1;
}

/* Adds tokens first .. first + tokens - 1 of a row to the tile under construction. */
static void add_segment(attn_job *job, attn_tile *t, int64_t row, int64_t first, int64_t tokens)
{
    const ae_attention_args *a = job->args;
    const int64_t position = a->row_items ? 0 : a->context[row] - row_tokens(a, row) + first;
    const attn_segment s = {.table = row_table(a, row),
                            .token = a->row_offsets[row] + first,
                            .tokens = tokens,
                            .position = position,
                            .begin = key_begin(a, position),
                            .end = a->row_items ? row_keys(a, row).end : position + tokens,
                            .at = t->queries};
    if (t->segments == 0) *t = (attn_tile){.segment = job->segments, .begin = s.begin, .end = s.end};
    job->segment[job->segments++] = s;
    t->segments++;
    t->queries += tokens * job->group;
    t->begin = ae_min(t->begin, s.begin);
    t->end = ae_max(t->end, s.end);
    job->keys += tokens * a->kv_heads * (s.end - s.begin);
}

/* The tile once for each `heads` heads. */
static void add_tile(attn_job *job, attn_tile *t, int64_t heads)
{
    for (int64_t h = 0; h < job->args->kv_heads; h += heads) {
        job->tile[job->tiles] = *t;
        job->tile[job->tiles].head = h;
        job->tile[job->tiles++].heads = heads;
    }
    job->tile_rows = ae_max(job->tile_rows, t->queries * heads);
    job->tile_segments = ae_max(job->tile_segments, t->segments);
    *t = (attn_tile){0};
}

/* Rows of few tokens, those that share pages side by side. A row alone is one task with all its heads, where tasks are
 * enough for every thread: a block of its pages is then read as one contiguous piece. Where they are few and do not go
 * round evenly, as three heads of one row for two threads, each thread gets a share of every row's tokens. */
static void add_small_rows(attn_job *job, int64_t *rows, int64_t count, int64_t tile_tokens, int threads)
{
    const ae_attention_args *a = job->args;
    int64_t spans = 0;
    for (int64_t i = 0; i < count; i++) spans += (row_keys(a, rows[i]).end - row_keys(a, rows[i]).begin) / AE_SPAN + 1;
    const int64_t together = spans >= 4 * threads ? a->kv_heads : 1, tasks = job->tiles + spans * a->kv_heads;
    const int64_t shares = tasks < 4 * threads && tasks % threads ? threads : 1;
    sort_rows(a, rows, count);
    for (int64_t i = 0; i < count;) {
        attn_tile t = {0};
        int64_t tokens = row_tokens(a, rows[i]);
        if (shares > 1 && tokens > 1) {
            const int64_t share = ae_ceil_div(tokens, shares), row = rows[i++];
            for (int64_t first = 0; first < tokens; first += share) {
                add_segment(job, &t, row, first, ae_min(share, tokens - first));
                add_tile(job, &t, 1);
            }
            continue;
        }
        add_segment(job, &t, rows[i++], 0, tokens);
        for (; i < count && (tokens += row_tokens(a, rows[i])) <= tile_tokens && share_pages(a, rows[i - 1], rows[i]); i++)
            add_segment(job, &t, rows[i], 0, row_tokens(a, rows[i]));
        add_tile(job, &t, t.segments == 1 && t.queries <= AE_IN_PLACE ? together : 1);
    }
}

/* Rows of many tokens first, for they make the large tasks. */
static void add_tiles(attn_job *job, int64_t *rows, int threads)
{
    const ae_attention_args *a = job->args;
    const int64_t most = ae_max(1, AE_TILE_FLOATS / (2 * job->dim + AE_SPAN) / AE_MR * AE_MR / job->group);
    int64_t small = 0;
    for (int64_t row = 0; row < a->rows; row++) {
        const int64_t tokens = row_tokens(a, row);
        if (tokens == 0) continue;
        if (2 * tokens <= most) {
            rows[small++] = row;
            continue;
        }
        for (int64_t first = 0; first < tokens; first += most) {
            attn_tile t = {0};
            add_segment(job, &t, row, first, ae_min(most, tokens - first));
            add_tile(job, &t, 1);
        }
    }
    add_small_rows(job, rows, small, most, threads);
}

static int plan_job(ae_context *ctx, attn_job *job, int threads)
{
    const ae_attention_args *a = job->args;
    const int64_t tokens = a->row_offsets[a->rows];
    const int64_t tiles = tokens * a->kv_heads * (int64_t)sizeof(attn_tile);
    const int64_t segments = tokens * (int64_t)sizeof(attn_segment);
    char *memory = ae_pool_scratch(ctx->pool, AE_SHARED_A, (size_t)(tiles + segments + a->rows * 8));
    if (!memory) return 1;
    job->tile = (attn_tile *)memory;
    job->segment = (attn_segment *)(memory + tiles);
    add_tiles(job, (int64_t *)(memory + tiles + segments), threads);
    int64_t last = 0, bytes;
    for (int64_t i = 0; i < job->tiles; i++) last = ae_max(last, (job->tile[i].end - 1) / AE_SPAN);
    job->spans = job->tiles < 4 * threads && threads > 1 ? last + 1 : 1;
    if (job->spans > 1) {
        const int64_t floats = job->tiles * job->spans * part_floats(job, job->tile_rows);
        job->partials = ae_pool_scratch(ctx->pool, AE_SHARED_B, (size_t)floats * 4);
        if (!job->partials) return 1;
    }
    scratch_at(job, NULL, &bytes);
    for (int i = 0; i < threads; i++)
        if (!(job->scratch[i] = ae_pool_scratch(ctx->pool, i, (size_t)bytes))) return 1;
    return 0;
}

#endif
