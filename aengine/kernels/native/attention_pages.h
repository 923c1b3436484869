/* Parts of attention that move data: staging of keys and values, scales of int8 pages, queries, the KV write. */
#ifndef AE_ATTENTION_PAGES_H
#define AE_ATTENTION_PAGES_H

#include "attention.h"

/* ---- elements of pages; `kind` (AE_F32, AE_BF16, AE_I8) is a constant at every call ---- */

AE_INLINE int64_t kind_bytes(const int kind) { return kind == AE_F32 ? 4 : kind == AE_BF16 ? 2 : 1; }

AE_INLINE vf load_i8(const int8_t *p)
{
#if AE_VL == 8 && defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#elif AE_VL == 16 && defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#else
    typedef int8_t vb __attribute__((vector_size(AE_VL), aligned(1), may_alias));
    return __builtin_convertvector(__builtin_convertvector(*(const vb *)p, vi), vf);
#endif
}

AE_INLINE vf load_kind(const char *p, const int kind)
{
    if (kind == AE_I8) return load_i8((const int8_t *)p);
    return kind == AE_BF16 ? vf_load_bf16((const uint16_t *)p) : vf_load((const float *)p);
}

AE_INLINE float load_one(const char *row, int64_t i, const int kind)
{
    if (kind == AE_I8) return (float)((const int8_t *)row)[i];
    return kind == AE_BF16 ? bf16_to_f32(((const uint16_t *)row)[i]) : ((const float *)row)[i];
}

/* ---- where rows lie ---- */

/* rows[i] for positions begin + i < end of one segment. */
static void find_run(const ae_attention_args *a, int values, int64_t table, int64_t head, int64_t begin, int64_t end,
                     const char **rows)
{
    const int64_t step = (values ? a->v_token_stride : a->k_token_stride) * kv_bytes(a);
    for (int64_t p = begin; p < end;) {
        const char *at = page_row(a, values, table, head, p);
        const int64_t stop = ae_min(end, (p / a->page_tokens + 1) * a->page_tokens);
        for (; p < stop; p++, at += step) rows[p - begin] = at;
    }
}

/* The rows of a piece, for the first head of its tile, and the rows that are read after them: after keys the values,
 * after values the next span's keys, or the next tile's (or again the first value). So row i + BLOCK is always what to
 * prefetch when row i is used, and keys that stand over the end of their piece are read from valid memory (no score of
 * them is used). Pages lie anywhere, so the hardware does not foresee them. */
static void find_rows(const ae_attention_args *a, const attn_scratch *w, const attn_segment *s, int64_t head,
                      attn_piece piece)
{
    const int64_t count = piece.end - piece.begin;
    int64_t after = ae_min(AE_BLOCK, s->end - piece.end);
    find_run(a, 0, s->table, head, piece.begin, piece.end, w->k_rows);
    find_run(a, 1, s->table, head, piece.begin, piece.end, w->v_rows);
    for (int64_t i = 0; i < AE_AHEAD; i++) w->k_rows[count + i] = w->v_rows[ae_min(i, count - 1)];
    if (after > 0) {
        find_run(a, 0, s->table, head, piece.end, piece.end + after, w->v_rows + count);
    } else if (w->next) {
        after = ae_min(AE_BLOCK, w->next->end - w->next->begin);
        find_run(a, 0, w->next_table, w->next->head, w->next->begin, w->next->begin + after, w->v_rows + count);
    }
    for (int64_t i = after; i < AE_AHEAD; i++) w->v_rows[count + i] = w->v_rows[0];
}

AE_INLINE void prefetch_row(const char *row, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
}

/* The rows BLOCK after those in work, asked for in the order of memory, spread over the work. */
typedef struct {
    const char *const *row;
    const char *at, *end;
    int64_t width;
} attn_ahead;

/* `width`: bytes of a row for all heads of the tile. */
static inline attn_ahead ahead_of(const char *const *rows, int64_t width)
{
    return (attn_ahead){rows, *rows, *rows + width, width};
}

AE_INLINE void ask(attn_ahead *ahead, const int lines)
{
    AE_UNROLL
    for (int i = 0; i < lines; i++) __builtin_prefetch(ahead->at + 64 * i, 0, 2);
    ahead->at += 64 * lines;
    if (ahead->at >= ahead->end) {
        ahead->at = *++ahead->row;
        ahead->end = ahead->at + ahead->width;
    }
}

/* ---- staging ---- */

/* Eight rows `step` bytes apart. */
typedef struct {
    const char *row;
    int64_t step;
} attn_eight;

/* Rows rows[0 .. 8) as eight at an even distance: most are, for pages hold whole eights; else a copy of them. `bytes`
 * are used of each row, from `shift` on. */
AE_INLINE attn_eight eight_of(const char *const *rows, int64_t shift, int64_t bytes, char *copy)
{
    const int64_t step = rows[1] - rows[0];
    int64_t odd = 0;
    AE_UNROLL
    for (int i = 2; i < 8; i++) odd |= rows[i] - rows[i - 1] - step;
    if (!odd) return (attn_eight){rows[0] + shift, step};
    for (int i = 0; i < 8; i++) memcpy(copy + i * bytes, rows[i] + shift, (size_t)bytes);
    return (attn_eight){copy, bytes};
}

#if defined(__AVX2__)
/* Row i beside row i + 4: a 128-bit load and an inserting load, no shuffle. */
AE_INLINE __m256 load_pair(const char *low, const char *high)
{
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps((const float *)low)),
                                _mm_loadu_ps((const float *)high), 1);
}

/* Four words of each of eight rows -> four vectors of eight; 8 shuffles. */
AE_INLINE void transpose_words(attn_eight e, int64_t offset, __m256 column[4])
{
    const char *low = e.row + offset, *high = low + 4 * e.step;
    const int64_t step3 = 3 * e.step;
    const __m256 a = load_pair(low, high), b = load_pair(low + e.step, high + e.step);
    const __m256 c = load_pair(low + 2 * e.step, high + 2 * e.step), d = load_pair(low + step3, high + step3);
    const __m256 ab_low = _mm256_unpacklo_ps(a, b), ab_high = _mm256_unpackhi_ps(a, b);
    const __m256 cd_low = _mm256_unpacklo_ps(c, d), cd_high = _mm256_unpackhi_ps(c, d);
    column[0] = _mm256_shuffle_ps(ab_low, cd_low, 0x44);
    column[1] = _mm256_shuffle_ps(ab_low, cd_low, 0xee);
    column[2] = _mm256_shuffle_ps(ab_high, cd_high, 0x44);
    column[3] = _mm256_shuffle_ps(ab_high, cd_high, 0xee);
}

/* Column i of the words of transpose_words, widened: two bf16 or four int8 travel as one word and part here. */
AE_INLINE __m256 column_of(const __m256 column[4], const int kind, const int i)
{
    if (kind == AE_F32) return column[i];
    const __m256i words = _mm256_castps_si256(column[i / (4 / kind_bytes(kind))]);
    if (kind == AE_BF16)
        return _mm256_castsi256_ps(i % 2 ? _mm256_and_si256(words, _mm256_set1_epi32((int)0xffff0000u))
                                         : _mm256_slli_epi32(words, 16));
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words, 24 - 8 * (i % 4)), 24));
}

/* 16 bytes of each of eight rows -> columns of eight fp32, BLOCK apart. */
AE_INLINE void transpose8(attn_eight e, int64_t offset, const int kind, float *to)
{
    __m256 column[4];
    transpose_words(e, offset, column);
    AE_UNROLL
    for (int i = 0; i < 16 / kind_bytes(kind); i++) _mm256_storeu_ps(to + i * AE_BLOCK, column_of(column, kind, i));
}
#else
AE_INLINE void transpose8(attn_eight e, int64_t offset, const int kind, float *to)
{
    for (int i = 0; i < 8; i++)
        for (int64_t j = 0; j < 16 / kind_bytes(kind); j++)
            to[j * AE_BLOCK + i] = load_one(e.row + i * e.step + offset, j, kind);
}
#endif

/* `count` rows of keys, up to seven more, `shift` bytes on -> [head_dim][BLOCK]. */
AE_INLINE void stage_keys(float *keys, const char *const *rows, int64_t shift, int64_t count, int64_t head_dim,
                          const int kind, char *copy, attn_ahead *ahead)
{
    const int64_t step = 16 / kind_bytes(kind);
    for (int64_t i = 0; i < count; i += 8) {
        const attn_eight now = eight_of(rows + i, shift, head_dim * kind_bytes(kind), copy);
        int64_t d = 0;
        for (; d + step <= head_dim; d += step) {
            ask(ahead, 2);
            transpose8(now, d * kind_bytes(kind), kind, keys + d * AE_BLOCK + i);
        }
        for (; d < head_dim; d++)
            for (int64_t j = 0; j < 8; j++) keys[d * AE_BLOCK + i + j] = load_one(now.row + j * now.step, d, kind);
    }
}

/* `count` rows of values, `shift` bytes on -> panels [dim / NR][SPAN][NR], padded with zeros. */
AE_INLINE void stage_values(float *values, const char *const *rows, int64_t shift, int64_t count, int64_t head_dim,
                            const int kind)
{
    for (int64_t i = 0; i < count; i++) {
        const char *from = rows[i] + shift;
        prefetch_row(rows[i + AE_BLOCK] + shift, head_dim * kind_bytes(kind));
        for (int64_t c = 0; c < head_dim; c += AE_NR) {
            float *to = values + c * AE_SPAN + i * AE_NR;
            if (c + AE_NR <= head_dim) {
                vf_store(to, load_kind(from + c * kind_bytes(kind), kind));
                vf_store(to + AE_VL, load_kind(from + (c + AE_VL) * kind_bytes(kind), kind));
            } else {
                for (int64_t d = c; d < c + AE_NR; d++) to[d - c] = d < head_dim ? load_one(from, d, kind) : 0.0f;
            }
        }
    }
}

/* scales[i] of positions begin + i of a piece; then ones for what a vector may read beyond its end. */
static void find_scales(const ae_attention_args *a, int values, const attn_segment *s, int64_t head, attn_piece piece,
                        float *scales)
{
    for (int64_t p = piece.begin; p < piece.end;) {
        const float *at = scale_of(a, values, s->table, head, p);
        const int64_t stop = ae_min(piece.end, (p / a->page_tokens + 1) * a->page_tokens);
        if (p + AE_SPAN < s->end) __builtin_prefetch(scale_of(a, values, s->table, head, p + AE_SPAN), 0, 2);
        for (; p < stop; p++, at += a->scale_token_stride) scales[p - piece.begin] = *at;
    }
    for (int64_t i = piece.end - piece.begin, end = i + AE_VL; i < end; i++) scales[i] = 1.0f;
}

/* The tile's queries times the scale of scores, as fp32 [heads][queries][dim]. */
static void load_queries(const attn_job *job, const attn_tile *t, float *q)
{
    const ae_attention_args *a = job->args;
    const vf scale = vf_set1((float)a->scale);
    const int bf16 = a->dtype == AE_BF16;
    for (int64_t h = 0; h < t->heads; h++)
        for (int64_t i = 0; i < t->segments; i++) {
            const attn_segment *s = &job->segment[t->segment + i];
            for (int64_t token = s->token; token < s->token + s->tokens; token++)
                for (int64_t g = 0; g < job->group; g++, q += job->dim) {
                    const int64_t at = token * a->q_stride + ((t->head + h) * job->group + g) * a->q_head_stride;
                    int64_t d = 0;
                    for (; d + AE_VL <= a->head_dim; d += AE_VL)
                        vf_store(q + d, (bf16 ? vf_get(a->q, at + d, 1) : vf_get(a->q, at + d, 0)) * scale);
                    if (d < a->head_dim) vf_store(q + d, vf_get_part(a->q, at + d, (int)(a->head_dim - d), bf16) * scale);
                }
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

/* x -> round(x * (127 / m)), ties to even, with m the largest |x| (under 1e-30: 0); the scale is m / 127. */
AE_INLINE float quantise_row(int8_t *to, const void *from, int64_t at, int from_bf16, int64_t n)
{
    const vu absolute = (vu)vf_set1(0.0f) + 0x7fffffffu;
    vf top = vf_set1(0.0f);
    for (int64_t d = 0; d < n; d += AE_VL)
        top = vf_max((vf)((vu)vf_get_part(from, at + d, (int)ae_min(AE_VL, n - d), from_bf16) & absolute), top);
    const float most = vf_hmax(top);
    const vf factor = vf_set1(most > 1e-30f ? 127.0f / most : 0.0f), magic = vf_set1(12582912.0f);
    for (int64_t d = 0; d < n; d += AE_VL) {
        const int count = (int)ae_min(AE_VL, n - d);
        float rounded[AE_VL];
        vf_store(rounded, (vf_get_part(from, at + d, count, from_bf16) * factor + magic) - magic);
        for (int i = 0; i < count; i++) to[d + i] = (int8_t)rounded[i];
    }
    return most / 127.0f;
}

static void write_row(const ae_attention_args *a, int values, int64_t row, int64_t head, int64_t position, const void *from,
                      int64_t at)
{
    char *to = (char *)page_row(a, values, row, head, position);
    const int bf16 = a->dtype == AE_BF16;
    if (a->kv_dtype == AE_I8)
        *scale_of(a, values, row, head, position) = quantise_row((int8_t *)to, from, at, bf16, a->head_dim);
    else
        convert_row(to, a->kv_dtype == AE_BF16, from, at, bf16, a->head_dim);
}

static void write_kv(void *arg, int part, int parts)
{
    const ae_attention_args *a = ((const attn_job *)arg)->args;
    const int64_t tokens = a->row_offsets[a->rows], t0 = tokens * part / parts, t1 = tokens * (part + 1) / parts;
    for (int64_t row = 0; row < a->rows; row++) {
        const int64_t begin = a->row_offsets[row], end = a->row_offsets[row + 1];
        const int64_t start = a->context[row] - (end - begin);
        for (int64_t t = ae_max(begin, t0); t < ae_min(end, t1); t++)
            for (int64_t h = 0; h < a->kv_heads; h++) {
                write_row(a, 0, row, h, start + t - begin, a->k, t * a->k_stride + h * a->k_head_stride);
                write_row(a, 1, row, h, start + t - begin, a->v, t * a->v_stride + h * a->v_head_stride);
            }
    }
}

#endif
