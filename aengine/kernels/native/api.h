/* The foreign interface of the native CPU kernels.
 *
 * Every operation is a plain function `int ae_OP(ae_context *, const ae_OP_args *)` over a struct of arguments, so that
 * it can be called on its own (Python packs the struct and makes one call) or stand in a recorded program, a flat list
 * of (operation, arguments). All members are 8 bytes wide: a caller without a C compiler can lay them out. Strides and
 * counts are in elements. Returns a status (AE_OK ..). No function calls back into the caller.
 *
 * The law of this library: a value of the output is computed by one fixed sequence of roundings that depends only on
 * the instruction set and on that value's own inputs, never on the number of rows, on chunking, on which pages hold the
 * keys or on the number of threads.
 */
#ifndef AE_API_H
#define AE_API_H

#include <stdint.h>

#define AE_EXPORT __attribute__((visibility("default")))
#define AE_ABI 3

enum { AE_F32 = 0, AE_BF16 = 1, AE_I8 = 2 }; /* AE_I8: KV pages only */
enum { AE_OK = 0, AE_NO_MEMORY = 1, AE_BAD_CALL = 2 };

typedef struct ae_context ae_context;

/* y[r, o] = sum over i of x[r, i] * weight[o, i] + bias[o]; `weight` packed by ae_pack, bias fp32 or NULL. */
typedef struct {
    const void *x;
    int64_t x_dtype, x_stride;
    const void *weight;
    int64_t weight_dtype;
    const float *bias;
    void *y;
    int64_t y_dtype, y_stride;
    int64_t rows, in_features, out_features;
} ae_linear_args;

/* weight [out, in] with rows `stride` apart -> panels; `packed` has ae_packed_bytes(...) bytes. dtype is kept. */
typedef struct {
    const void *weight;
    int64_t dtype, stride;
    void *packed;
    int64_t in_features, out_features;
} ae_pack_args;

/* out[t] = table[ids[t]], both of `dtype`. */
typedef struct {
    const void *table;
    int64_t dtype;
    const int32_t *ids;
    void *out;
    int64_t rows, dim;
} ae_embed_args;

/* out = x / rms(x) * weight over the last dimension. Rows are (i0, i1), i1 < inner, at x + i0 * stride0 + i1 * stride1;
 * out is contiguous. With `residual` (contiguous, as `sum`): sum = x + residual, rounded to dtype, is normed instead. */
typedef struct {
    const void *x;
    const void *residual;
    const void *weight;
    void *out;
    void *sum;
    int64_t dtype, weight_dtype;
    int64_t rows, inner, stride0, stride1, dim;
    double eps;
} ae_rms_norm_args;

/* out = x + y, contiguous; y NULL: out = x * factor. */
typedef struct {
    const void *x;
    const void *y;
    void *out;
    int64_t dtype, count;
    double factor;
} ae_add_args;

/* out[t, :F] = act(gate_up[t, :F]) * gate_up[t, F:]; act 0: silu, 1: gelu with tanh. */
typedef struct {
    const void *gate_up;
    void *out;
    int64_t dtype, act, rows, features, stride;
} ae_glu_args;

/* x [rows, heads, head_dim] with strides; out contiguous. Half-split rotation of the first 2 * half elements. */
typedef struct {
    const void *x;
    void *out;
    const int32_t *positions;
    const float *cos;
    const float *sin;
    int64_t dtype, rows, heads, head_dim, half, stride_row, stride_head;
} ae_rope_args;

/* Writes k, v of the step's tokens into their pages, then attends. Rows are ragged as in StepBatch.
 * Strides of pages are (page, token, head); the last dimension is contiguous. */
typedef struct {
    const void *q;
    const void *k;
    const void *v;
    void *out; /* [tokens, heads * head_dim] */
    int64_t dtype, q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride;
    void *k_pages;
    void *v_pages;
    int64_t kv_dtype, k_page_stride, k_token_stride, k_kv_stride, v_page_stride, v_token_stride, v_kv_stride;
    int64_t page_tokens;
    const int32_t *tables;
    int64_t table_stride;
    const int32_t *row_offsets;
    const int32_t *context;
    int64_t rows, heads, kv_heads, head_dim, window, chunk;
    double scale, softcap;
    const float *sinks; /* [heads] or NULL: the score of one more key, whose value is zero */
    float *k_scales; /* kv_dtype AE_I8: per page, token and head what its elements are multiplied by; else NULL */
    float *v_scales;
    int64_t scale_page_stride, scale_token_stride, scale_kv_stride;
} ae_attention_args;

/* Per row of fp32 logits: argmax (first of equals) and log of the sum of exponentials. Either output may be NULL. */
typedef struct {
    const float *logits;
    int64_t rows, vocab, stride;
    int32_t *best;
    float *log_sum_exp;
} ae_row_stats_args;

/* Per row of fp32 logits: a token by Gumbel noise with keys k0, k1; `best` is the row's argmax. */
typedef struct {
    const float *logits;
    int64_t rows, vocab, stride;
    const int32_t *best;
    const float *temperatures;
    const uint32_t *k0;
    const uint32_t *k1;
    int32_t *tokens;
} ae_gumbel_args;

/* One operation of a recorded program; `args` points to the struct the operation takes. */
typedef struct {
    int64_t op;
    const void *args;
} ae_call;

enum {
    AE_OP_LINEAR,
    AE_OP_EMBED,
    AE_OP_RMS_NORM,
    AE_OP_ADD,
    AE_OP_GLU,
    AE_OP_ROPE,
    AE_OP_ATTENTION,
    AE_OP_ROW_STATS,
    AE_OP_GUMBEL,
    AE_OP_COUNT
};

/* isa: "avx512", "avx2", "portable", or NULL for the best this machine has. NULL when it lacks `isa` or memory. */
AE_EXPORT ae_context *ae_context_create(const char *isa, int threads);
AE_EXPORT void ae_context_destroy(ae_context *);
AE_EXPORT const char *ae_context_isa(const ae_context *);
AE_EXPORT int ae_context_threads(const ae_context *);
AE_EXPORT int ae_context_set_threads(ae_context *, int threads);
AE_EXPORT int ae_abi(void);

/* Pages for weights and buffers, zeroed, 2 MiB aligned, huge pages asked for where the system has them. */
AE_EXPORT void *ae_alloc(int64_t bytes);
AE_EXPORT void ae_free(void *, int64_t bytes);

AE_EXPORT int64_t ae_packed_bytes(const ae_context *, int64_t dtype, int64_t in_features, int64_t out_features);
AE_EXPORT int ae_pack(ae_context *, const ae_pack_args *);

AE_EXPORT int ae_linear(ae_context *, const ae_linear_args *);
AE_EXPORT int ae_embed(ae_context *, const ae_embed_args *);
AE_EXPORT int ae_rms_norm(ae_context *, const ae_rms_norm_args *);
AE_EXPORT int ae_add(ae_context *, const ae_add_args *);
AE_EXPORT int ae_glu(ae_context *, const ae_glu_args *);
AE_EXPORT int ae_rope(ae_context *, const ae_rope_args *);
AE_EXPORT int ae_attention(ae_context *, const ae_attention_args *);
AE_EXPORT int ae_row_stats(ae_context *, const ae_row_stats_args *);
AE_EXPORT int ae_gumbel(ae_context *, const ae_gumbel_args *);
AE_EXPORT int ae_program_run(ae_context *, const ae_call *, int64_t count);

#endif
