/* The inner products of attention: scores of a block of keys, weighted values staged or where they lie.
 *
 * Every product adds along j in rising order, one fused multiply-add a lane, as tile.h: its shape changes no bit. Each
 * stands in a function of its own: inlined side by side, the compiler runs out of registers and keeps an accumulator in
 * memory, which halves the rate.
 */
#ifndef AE_ATTENTION_PRODUCTS_H
#define AE_ATTENTION_PRODUCTS_H

#include "attention_pages.h"

#define AE_ALONE static __attribute__((noinline))

/* c[i, columns] (+)= sum over j of x[i, j] * w[j, columns]. */
typedef void attn_product(const float *x, int64_t ldx, const float *w, int64_t ldw, int64_t n, float *c, int64_t ldc,
                          int add);

#define PRODUCT(MR)                                                                                                    \
    AE_ALONE void product_##MR(const float *x, int64_t ldx, const float *w, int64_t ldw, int64_t n, float *c,          \
                               int64_t ldc, int add)                                                                   \
    {                                                                                                                  \
        tile_c(MR, AE_W_F32, x, ldx, w, ldw, n, c, ldc, add, 0, 0);                                                    \
    }
AE_EACH_MR(PRODUCT)
#define PRODUCT_OF(MR) product_##MR,
static attn_product *const products[] = {AE_EACH_MR(PRODUCT_OF)};

#if defined(__AVX2__)
#define AE_DIRECT 3 /* up to so many query rows take their scores straight from the pages */

/* acc[k][i] += the rows' products with 16 bytes of each of two eights of keys. */
AE_INLINE void add_eights(const int mr, const int kind, const float *x, int64_t ldx, attn_eight e0, attn_eight e1,
                          int64_t offset, __m256 acc[2][AE_DIRECT])
{
    __m256 c0[4], c1[4];
    transpose_words(e0, offset, c0);
    transpose_words(e1, offset, c1);
    AE_UNROLL
    for (int j = 0; j < 16 / kind_bytes(kind); j++) {
        const __m256 k0 = column_of(c0, kind, j), k1 = column_of(c1, kind, j);
        AE_UNROLL
        for (int i = 0; i < mr; i++) {
            const __m256 xi = _mm256_broadcast_ss(x + i * ldx + j);
            acc[0][i] = _mm256_fmadd_ps(xi, k0, acc[0][i]);
            acc[1][i] = _mm256_fmadd_ps(xi, k1, acc[1][i]);
        }
    }
    __asm__ volatile("" ::: "memory");
}

/* Scores of the rows with two eights of keys from where they lie, transposed 16 bytes at a time in registers; asks for
 * as many rows ahead. The chain of a score over head_dim is that of the staged product. */
AE_INLINE void direct_product(const int mr, const int kind, const float *x, int64_t ldx, const attn_eight *eight,
                              attn_ahead *next, int64_t head_dim, float *c)
{
    const int bytes = (int)kind_bytes(kind), step = 16 / bytes;
    const attn_eight e0 = eight[0], e1 = eight[1];
    attn_ahead ahead = *next;
    __m256 acc[2][AE_DIRECT];
    AE_UNROLL
    for (int i = 0; i < 2 * mr; i++) acc[i % 2][i / 2] = _mm256_setzero_ps();
    int64_t d = 0;
    for (; d + step <= head_dim; d += step) {
        ask(&ahead, 4);
        add_eights(mr, kind, x + d, ldx, e0, e1, d * bytes, acc);
    }
    for (; d < head_dim; d++)
        for (int k = 0; k < 2; k++) {
            float keys[8];
            for (int j = 0; j < 8; j++) keys[j] = load_one(eight[k].row + j * eight[k].step, d, kind);
            AE_UNROLL
            for (int i = 0; i < mr; i++)
                acc[k][i] = _mm256_fmadd_ps(_mm256_broadcast_ss(x + i * ldx + d), _mm256_loadu_ps(keys), acc[k][i]);
        }
    AE_UNROLL
    for (int i = 0; i < 2 * mr; i++) _mm256_storeu_ps(c + i / 2 * AE_SCORES + i % 2 * 8, acc[i % 2][i / 2]);
    *next = ahead;
}

typedef void attn_direct(const float *x, int64_t ldx, const attn_eight *eight, attn_ahead *next, int64_t head_dim,
                         float *c);

#define DIRECT_KIND(MR, KIND)                                                                            \
    AE_ALONE void direct_##KIND##_##MR(const float *x, int64_t ldx, const attn_eight *eight,             \
                                       attn_ahead *next, int64_t head_dim, float *c)               \
    {                                                                                                    \
        direct_product(MR, KIND, x, ldx, eight, next, head_dim, c);                                      \
    }
#define DIRECT(MR) DIRECT_KIND(MR, AE_F32) DIRECT_KIND(MR, AE_BF16) DIRECT_KIND(MR, AE_I8)
DIRECT(1)
DIRECT(2)
DIRECT(3)
#define DIRECT_OF(MR) {direct_AE_F32_##MR, direct_AE_BF16_##MR, direct_AE_I8_##MR}
static attn_direct *const direct[AE_DIRECT][3] = {DIRECT_OF(1), DIRECT_OF(2), DIRECT_OF(3)};

/* Scores of `rows` <= DIRECT queries with `count` keys; `copy`: room for 16 rows of keys. */
static void direct_scores(const float *q, int64_t dim, int64_t rows, const attn_job *job, const char *const *keys,
                          int64_t shift, int64_t count, char *copy, float *scores, attn_ahead *ahead)
{
    const int64_t bytes = job->args->head_dim * kv_bytes(job->args);
    for (int64_t i = 0; i < count; i += 16, keys += 16) {
        const attn_eight eight[2] = {eight_of(keys, shift, bytes, copy),
                                     eight_of(keys + 8, shift, bytes, copy + 8 * bytes)};
        direct[rows - 1][job->args->kv_dtype](q, dim, eight, ahead, job->args->head_dim, scores + i);
    }
}
#endif

/* c[i, columns] += sum over j of x[i, j] * row j, `shift` bytes on, over nv vectors; asks for row j + BLOCK. */
AE_INLINE void paged_product(const int mr, const int nv, const int kind, const float *x, const char *const *rows,
                             int64_t shift, int64_t n, float *c, int64_t ldc, attn_ahead *next)
{
    const int width = nv * AE_VL * (int)kind_bytes(kind);
    attn_ahead ahead = *next;
    vf acc[AE_MR][4];
    AE_UNROLL
    for (int i = 0; i < mr; i++)
        AE_UNROLL
        for (int k = 0; k < nv; k++) acc[i][k] = vf_load(c + i * ldc + k * AE_VL);
    for (int64_t j = 0; j < n; j++) {
        const char *w = rows[j] + shift;
        vf row[4], xi[AE_MR];
        if (width >= 64 || (j * width & 63) == 0) ask(&ahead, width >= 64 ? width / 64 : 1);
        if (mr <= nv) { /* whichever are fewer are held in registers: the other comes one by one */
            AE_UNROLL
            for (int i = 0; i < mr; i++) xi[i] = vf_set1(x[i * AE_SCORES + j]);
            AE_UNROLL
            for (int k = 0; k < nv; k++) {
                row[0] = load_kind(w + k * AE_VL * kind_bytes(kind), kind);
                AE_UNROLL
                for (int i = 0; i < mr; i++) acc[i][k] = vf_fma(xi[i], row[0], acc[i][k]);
            }
        } else {
            AE_UNROLL
            for (int k = 0; k < nv; k++) row[k] = load_kind(w + k * AE_VL * kind_bytes(kind), kind);
            AE_UNROLL
            for (int i = 0; i < mr; i++) {
                xi[0] = vf_set1(x[i * AE_SCORES + j]);
                AE_UNROLL
                for (int k = 0; k < nv; k++) acc[i][k] = vf_fma(xi[0], row[k], acc[i][k]);
            }
        }
    }
    AE_UNROLL
    for (int i = 0; i < mr; i++)
        AE_UNROLL
        for (int k = 0; k < nv; k++) vf_store(c + i * ldc + k * AE_VL, acc[i][k]);
    *next = ahead;
}

typedef void attn_paged(const float *x, const char *const *rows, int64_t shift, int64_t n, float *c, int64_t ldc,
                        attn_ahead *ahead);

#define PAGED_KIND(MR, KIND)                                                                                          \
    AE_ALONE void paged_##KIND##_##MR(const float *x, const char *const *rows, int64_t shift, int64_t n, float *c,    \
                                      int64_t ldc, attn_ahead *ahead)                                                 \
    {                                                                                                                 \
        paged_product(MR, MR <= 3 ? 4 : 2, KIND, x, rows, shift, n, c, ldc, ahead);                                   \
    }
#define PAGED(MR) PAGED_KIND(MR, AE_F32) PAGED_KIND(MR, AE_BF16) PAGED_KIND(MR, AE_I8)
AE_EACH_MR(PAGED)
#define PAGED_OF(MR) {paged_AE_F32_##MR, paged_AE_BF16_##MR, paged_AE_I8_##MR},
static attn_paged *const paged[][3] = {AE_EACH_MR(PAGED_OF)};

/* Scores of `rows` queries with one staged block of keys. */
static void block_scores(const float *q, int64_t dim, int64_t rows, const float *keys, int64_t head_dim, float *scores)
{
    for (int64_t c = 0; c < AE_BLOCK; c += AE_NR)
        for (int64_t r = 0; r < rows; r += AE_MR)
            products[ae_min(AE_MR, rows - r) - 1](q + r * dim, dim, keys + c, AE_BLOCK, head_dim, scores + r * AE_SCORES + c,
                                                  AE_SCORES, 0);
}

/* Scores of the `rows` queries from `row` on with up to a block of keys, `shift` bytes on. */
static void key_scores(const attn_job *job, const attn_scratch *w, int64_t row, int64_t rows, const char *const *keys,
                       int64_t shift, int64_t count, float *scores, attn_ahead *ahead)
{
    const int64_t head_dim = job->args->head_dim;
    const float *q = w->q + row * job->dim;
#if defined(__AVX2__)
    if (rows <= AE_DIRECT) {
        direct_scores(q, job->dim, rows, job, keys, shift, count, (char *)w->keys, scores, ahead);
        return;
    }
#endif
    switch (job->args->kv_dtype) {
    case AE_F32: stage_keys(w->keys, keys, shift, count, head_dim, AE_F32, (char *)w->values, ahead); break;
    case AE_BF16: stage_keys(w->keys, keys, shift, count, head_dim, AE_BF16, (char *)w->values, ahead); break;
    default: stage_keys(w->keys, keys, shift, count, head_dim, AE_I8, (char *)w->values, ahead);
    }
    block_scores(q, job->dim, rows, w->keys, head_dim, scores);
}

/* acc += P V over `count` staged values. */
static void staged_product(const attn_job *job, const float *p, const float *values, int64_t rows, int64_t count, float *acc)
{
    for (int64_t c = 0; c < job->args->head_dim; c += AE_NR)
        for (int64_t r = 0; r < rows; r += AE_MR)
            products[ae_min(AE_MR, rows - r) - 1](p + r * AE_SCORES, AE_SCORES, values + c * AE_SPAN, AE_NR, count,
                                                  acc + r * job->dim + c, job->dim, 1);
}

/* The same from the pages. head_dim is a multiple of four vectors. */
static void in_place_product(const attn_job *job, const float *p, const char *const *values, int64_t shift, int64_t rows,
                             int64_t count, float *acc, attn_ahead *ahead)
{
    const int64_t kind = job->args->kv_dtype, bytes = kv_bytes(job->args);
    attn_ahead again = ahead_of(values, ahead->width); /* the rows after the first tile need nothing new */
    for (int64_t r = 0; r < rows; r += AE_MR) {
        const int64_t mr = ae_min(AE_MR, rows - r), step = (mr <= 3 ? 4 : 2) * AE_VL;
        for (int64_t c = 0; c < job->dim; c += step)
            paged[mr - 1][kind](p + r * AE_SCORES, values, shift + c * bytes, count, acc + r * job->dim + c, job->dim,
                                r == 0 ? ahead : &again);
    }
}

#endif
