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

/* Rows of scores with one block of keys, over four vectors of columns: with 3 rows or fewer two vectors leave the
 * multipliers idle. The chain of a column is the same. */
AE_INLINE void wide_product(const int mr, const float *x, int64_t ldx, const float *w, int64_t n, float *c)
{
    vf acc[3][4];
    AE_UNROLL
    for (int k = 0; k < 4 * mr; k++) acc[k / 4][k % 4] = vf_set1(0.0f);
    for (int64_t j = 0; j < n; j++, w += AE_BLOCK) {
        vf row[4];
        AE_UNROLL
        for (int k = 0; k < 4; k++) row[k] = vf_load(w + k * AE_VL);
        AE_UNROLL
        for (int i = 0; i < mr; i++) {
            const vf xi = vf_set1(x[i * ldx + j]);
            AE_UNROLL
            for (int k = 0; k < 4; k++) acc[i][k] = vf_fma(xi, row[k], acc[i][k]);
        }
    }
    AE_UNROLL
    for (int k = 0; k < 4 * mr; k++) vf_store(c + k / 4 * AE_SCORES + k % 4 * AE_VL, acc[k / 4][k % 4]);
}

#define WIDE(MR)                                                                                   \
    AE_ALONE void wide_##MR(const float *x, int64_t ldx, const float *w, int64_t n, float *c)      \
    {                                                                                              \
        wide_product(MR, x, ldx, w, n, c);                                                         \
    }
WIDE(1)
WIDE(2)
WIDE(3)

/* c[i, columns] += sum over j of x[i, j] * row j, `shift` bytes on, over nv vectors; asks for row j + BLOCK. */
AE_INLINE void paged_product(const int mr, const int nv, const int kind, const float *x, const char *const *rows,
                             int64_t shift, int64_t n, float *c, int64_t ldc, attn_ahead *next)
{
    attn_ahead ahead = *next;
    vf acc[AE_MR][4];
    AE_UNROLL
    for (int i = 0; i < mr; i++)
        AE_UNROLL
        for (int k = 0; k < nv; k++) acc[i][k] = vf_load(c + i * ldc + k * AE_VL);
    for (int64_t j = 0; j < n; j++) {
        const char *w = rows[j] + shift;
        vf row[4], xi[AE_MR];
        ask(&ahead);
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

#define PAGED_KIND(MR, KIND)                                                                                            \
    AE_ALONE void paged_##KIND##_##MR(const float *x, const char *const *rows, int64_t shift, int64_t n, float *c,      \
                                      int64_t ldc, attn_ahead *ahead)                                                   \
    {                                                                                                                   \
        paged_product(MR, MR <= 3 ? 4 : 2, KIND, x, rows, shift, n, c, ldc, ahead);                                     \
    }
#define PAGED(MR) PAGED_KIND(MR, AE_F32) PAGED_KIND(MR, AE_BF16) PAGED_KIND(MR, AE_I8)
AE_EACH_MR(PAGED)
#define PAGED_OF(MR) {paged_AE_F32_##MR, paged_AE_BF16_##MR, paged_AE_I8_##MR},
static attn_paged *const paged[][3] = {AE_EACH_MR(PAGED_OF)};

/* Scores of `rows` queries with one staged block of keys. */
static void block_scores(const float *q, int64_t dim, int64_t rows, const float *keys, int64_t head_dim, float *scores)
{
    switch (rows) {
    case 1: wide_1(q, dim, keys, head_dim, scores); return;
    case 2: wide_2(q, dim, keys, head_dim, scores); return;
    case 3: wide_3(q, dim, keys, head_dim, scores); return;
    }
    for (int64_t c = 0; c < AE_BLOCK; c += AE_NR)
        for (int64_t r = 0; r < rows; r += AE_MR)
            products[ae_min(AE_MR, rows - r) - 1](q + r * dim, dim, keys + c, AE_BLOCK, head_dim, scores + r * AE_SCORES + c,
                                                  AE_SCORES, 0);
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
    for (int64_t r = 0; r < rows; r += AE_MR) {
        const int64_t mr = ae_min(AE_MR, rows - r), step = (mr <= 3 ? 4 : 2) * AE_VL;
        for (int64_t c = 0; c < job->dim; c += step)
            paged[mr - 1][kind](p + r * AE_SCORES, values, shift + c * bytes, count, acc + r * job->dim + c, job->dim,
                                ahead);
    }
}

#endif
