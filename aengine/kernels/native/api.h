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
#define AE_ABI 7

enum { AE_F32 = 0, AE_BF16 = 1, AE_I8 = 2, AE_F16 = 3, AE_QUANTISED = 4 }; /* AE_I8: KV pages only */
enum { AE_OK = 0, AE_NO_MEMORY = 1, AE_BAD_CALL = 2 };
/* What befell a row or a sampled position alone. */
enum {
    AE_FINE = 0,
    AE_NO_RELAY,   /* its slot holds no sampled token to go on from */
    AE_BAD_ID,     /* a token id outside the vocabulary */
    AE_UNSAMPLED,  /* one of its positions could not be sampled */
    AE_RAW_NAN,    /* the logits as they came: hold NaN */
    AE_RAW_INF,
    AE_RAW_MASKED, /* are minus infinity everywhere */
    AE_RULED_NAN,  /* the same of the logits after the slot's rules */
    AE_RULED_INF,
    AE_RULED_MASKED
};

typedef struct ae_context ae_context;

/* Some outputs of a quantised weight: value = scale * code + minimum, one scale and minimum per `group` inputs (16 or a
 * multiple of 32). Filled in by ae_pack_quantised, which says how the arrays lie. */
typedef struct {
    void *codes;
    void *scale;
    void *minimum; /* NULL: zero */
    int64_t bits, group, scale_dtype; /* 4, 5 or 8; scale and minimum fp32 or fp16 */
    int64_t out_features;
} ae_segment;

/* A weight of dtype AE_QUANTISED: its outputs are those of the segments, one after another. */
typedef struct {
    int64_t count;
    const ae_segment *segments;
} ae_quantised;

/* y[r, o] = sum over i of x[r, i] * weight[o, i] + bias[o]; bias fp32 or NULL. `weight` is packed by ae_pack, or, if
 * weight_dtype is AE_QUANTISED, an ae_quantised: x is then rounded to 8 bits per row and 32 inputs, or to 16 per
 * row (see quantised.h). */
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

/* codes [out, in] with rows `stride` bytes apart, uint8 0 .. 15 or int8; scale, minimum [out, ceil(in / group)] of
 * segment->scale_dtype -> the arrays of `segment`, which have the bytes that ae_codes_bytes and ae_scale_bytes tell. */
typedef struct {
    const void *codes;
    const void *scale;
    const void *minimum;
    const ae_segment *segment;
    int64_t stride, in_features;
} ae_pack_quantised_args;

/* `count` blocks of the GGML format of number `kind` -> codes, one byte each (0 .. 15 of 4-bit formats, else int8), and
 * for each group of them a scale and a minimum; `minimum` is NULL exactly where the format has none. */
typedef struct {
    const void *blocks;
    int64_t kind, count;
    void *codes;
    float *scale, *minimum;
} ae_unpack_args;

/* out[t] = row ids[t] of a weight packed for ae_linear, as it was before packing, rounded once to out_dtype. */
typedef struct {
    const void *weight;
    int64_t weight_dtype;
    const int32_t *ids;
    void *out;
    int64_t out_dtype, rows, in_features, out_features;
} ae_embed_packed_args;

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
 * Strides of pages are (page, token, head); the last dimension is contiguous.
 *
 * Cross-attention: all tokens of row r see items row_items[r] .. row_items[r + 1] - 1, at least one, each whole and one
 * after another; table i is that of item i, which has item_tokens[i] > 0 entries. The entries that a table could name
 * (table_stride * page_tokens) are a multiple of 256; tables are dense. */
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
    const int32_t *row_items; /* NULL, or cross-attention, which writes nothing and uses neither k, v nor context: */
    const int32_t *item_tokens;
} ae_attention_args;

/* out = x * y, rows of `dim` elements; out contiguous. */
typedef struct {
    const void *x;
    const void *y;
    void *out;
    int64_t dtype, rows, dim, x_stride, y_stride;
} ae_mul_args;

/* out = x * factors[position], x [rows, heads, head_dim] with strides; out contiguous. */
typedef struct {
    const void *x;
    void *out;
    const int32_t *positions;
    const float *factors;
    int64_t dtype, rows, heads, head_dim, stride_row, stride_head;
} ae_scale_positions_args;

/* out[i] = x[index[i]]: rows of `bytes` bytes, those of x `stride` bytes apart. */
typedef struct {
    const void *x;
    const int64_t *index;
    void *out;
    int64_t rows, bytes, stride;
} ae_take_args;

/* out[t][i] = x[t][index[i]]: columns of rows of `size` elements of 2 or 4 bytes; x's rows are `stride` elements apart. */
typedef struct {
    const void *x;
    const int32_t *index;
    void *out;
    int64_t rows, size, stride, bytes;
} ae_columns_args;

/* out = x, but for out[index[i]] = y[i]; x and out [rows], y [put_rows], all of `bytes` bytes a row, contiguous. */
typedef struct {
    const void *x;
    const int64_t *index;
    const void *y;
    void *out;
    int64_t rows, put_rows, bytes;
} ae_put_args;

/* Causal convolution of ragged rows, channel by channel, going on from state pages [taps - 1, dim] (contiguous, pages
 * `page_stride` apart); tables [rows, 2]: page read, page written. All rows read before any writes. weight fp32
 * [taps, dim], bias fp32 [dim] or NULL; x and out [tokens, dim] contiguous; before: room for rows * (taps - 1) * dim. */
typedef struct {
    const void *x;
    const float *weight;
    const float *bias;
    void *out;
    void *before;
    void *pages;
    const int32_t *tables;
    const int32_t *row_offsets;
    int64_t dtype, page_dtype, page_stride, table_stride, rows, dim, taps;
} ae_short_conv_args;

/* The experts that the scores [rows, experts] choose for each row of x [rows, dim] (both contiguous, of `dtype`).
 * gate_up[e], down[e]: what ae_linear takes, but for x, y and rows. scoring 0: softmax over the chosen scores, 1:
 * sigmoid of each; weigh 0: the weight multiplies the input, 1: the output; activation 0: silu, 1: clamped.
 * Workspaces: chosen int32 and weights fp32 [rows, top_k], members int32 [rows], gathered [rows, dim], wide
 * [rows, 2 * ffn], active [rows, ffn], results [rows, dim], total fp32 [rows, dim]. */
typedef struct {
    const void *x;
    const void *scores;
    void *out;
    const ae_linear_args *gate_up;
    const ae_linear_args *down;
    int32_t *chosen;
    float *weights;
    int32_t *members;
    void *gathered;
    void *wide;
    void *active;
    void *results;
    float *total;
    int64_t dtype, rows, dim, ffn, experts, top_k, scoring, weigh, activation;
    double alpha, limit;
} ae_mixture_args;

/* A block table by slot [slots, columns] and its copy by row [rows, columns]; of a row only the columns of pages that
 * its context reaches are copied, all of them where page_tokens is 0. */
typedef struct {
    const int32_t *by_slot;
    int32_t *by_row;
    int64_t columns, page_tokens;
} ae_table;

/* From a plan's columns to the inputs of a step. relay[slot] is the last token sampled for a slot, -1 for none; rows
 * with `relayed` read it, the others take `given` ids in turn. Unusable ids become 0 and are told in faults, fault_ids
 * [rows]. Points are the last samples[i] tokens of row i: index of the token, position and slot of what is sampled. */
typedef struct {
    const int32_t *slots;
    const int32_t *starts;
    const int32_t *counts;
    const int32_t *samples;
    const int32_t *relayed;
    const int32_t *given;
    const int32_t *relay;
    const ae_table *tables;
    int64_t rows, groups, vocab;
    int32_t *ids;
    int32_t *positions;
    int32_t *row_offsets;
    int32_t *context;
    int32_t *faults;
    int32_t *fault_ids;
    int64_t *point_tokens;
    int64_t *point_positions;
    int32_t *point_slots;
} ae_lay_out_args;

/* How the request in a slot is sampled. Lists hold ids inside the vocabulary. History is indexed by position, or NULL:
 * then there are no bad words and penalties. bad_words: per word its length and its tokens, two at least. */
typedef struct {
    double temperature, top_p, min_p;
    int64_t top_k;
    uint64_t seed;
    int64_t alternatives; /* logprobs of so many best tokens, -1: no logprobs */
    int64_t always_ruled, stops_until; /* positions below stops_until must not be one of `stops` */
    const int32_t *allowed;
    int64_t allowed_count; /* -1: all */
    const int32_t *biased;
    const float *bias;
    int64_t biased_count;
    const int32_t *bad;
    int64_t bad_count;
    const int32_t *bad_words;
    int64_t bad_words_count;
    const int32_t *stops;
    int64_t stops_count;
    int32_t *history;
    int64_t history_count, prompt_tokens;
    double repetition, frequency, presence;
    const uint32_t *mask; /* bit t % 32 of word t / 32: token t may be chosen; NULL: all may */
} ae_slot;

/* One token for each of `rows` positions of slots, from raw logits fp32 [rows, vocab], which stay as they are.
 * Log-probabilities of rows that want them: ids, values [rows, width], width > alternatives, chosen first; ranks. */
typedef struct {
    const float *logits;
    int64_t rows, vocab, stride;
    const ae_slot *table;
    const int32_t *slots;
    const int64_t *positions;
    int32_t *tokens;
    int32_t *faults;
    int64_t width;
    int32_t *ids;
    float *values;
    int32_t *ranks;
    const uint8_t *phases; /* [rows]: only those whose phase is `phase` are sampled; NULL: all are */
    int64_t phase;
} ae_sample_args;

/* Log-probabilities of targets [rows] and of the `alternatives` best tokens, from raw logits: as above. */
typedef struct {
    const float *logits;
    int64_t rows, vocab, stride, alternatives;
    const int32_t *targets;
    int64_t width;
    int32_t *ids;
    float *values;
    int32_t *ranks;
} ae_logprobs_args;

/* From sampled points to rows: drafts are kept up to the first that differs from what was sampled; the relay gets a
 * row's last token, -1 where it failed (faults, from ae_lay_out or set since, or a fault of one of its points, whose
 * number then stands in fault_ids). accepted [rows], out [rows, width]. */
typedef struct {
    const int32_t *slots;
    const int32_t *samples;
    const int32_t *ids;
    const int64_t *point_tokens;
    const int32_t *point_faults;
    const int32_t *tokens;
    int64_t rows, width;
    int32_t *faults;
    int32_t *fault_ids;
    int32_t *out;
    int32_t *accepted;
    int32_t *relay;
} ae_settle_args;

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
    AE_OP_MUL,
    AE_OP_SCALE_POSITIONS,
    AE_OP_TAKE,
    AE_OP_PUT,
    AE_OP_SHORT_CONV,
    AE_OP_MIXTURE,
    AE_OP_LAY_OUT,
    AE_OP_SAMPLE,
    AE_OP_LOGPROBS,
    AE_OP_SETTLE,
    AE_OP_EMBED_PACKED,
    AE_OP_COLUMNS,
    AE_OP_COUNT
};

/* isa: "avx512vnni", "avx512", "avx2vnni", "avx2", "portable", or NULL for the best that this machine has of
 * those compiled. NULL when it lacks `isa` or memory. */
AE_EXPORT ae_context *ae_context_create(const char *isa, int threads);
AE_EXPORT void ae_context_destroy(ae_context *);
AE_EXPORT const char *ae_context_isa(const ae_context *);
AE_EXPORT int ae_context_threads(const ae_context *);
AE_EXPORT int ae_context_set_threads(ae_context *, int threads);
AE_EXPORT int ae_abi(void);

/* Pages for weights and buffers, zeroed, 2 MiB aligned, huge pages asked for where the system has them. */
AE_EXPORT void *ae_alloc(int64_t bytes);
AE_EXPORT void ae_free(void *, int64_t bytes);

/* Has the system give the memory of `bytes` bytes from `p` on, which it does at the first write to each page. Changes none
 * of them, whoever writes there meanwhile. */
AE_EXPORT void ae_touch(void *p, int64_t bytes);

AE_EXPORT int64_t ae_packed_bytes(const ae_context *, int64_t dtype, int64_t in_features, int64_t out_features);
AE_EXPORT int ae_pack(ae_context *, const ae_pack_args *);

/* Bytes of a segment's codes; of its scale (the minimum has as many) when `scale_dtype` is AE_F32 or AE_F16. */
AE_EXPORT int64_t ae_codes_bytes(const ae_context *, int64_t bits, int64_t in_features, int64_t out_features);
AE_EXPORT int64_t ae_scale_bytes(const ae_context *, int64_t bits, int64_t group, int64_t scale_dtype,
                                 int64_t in_features, int64_t out_features);
AE_EXPORT int ae_pack_quantised(ae_context *, const ae_pack_quantised_args *);

AE_EXPORT int ae_unpack(ae_context *, const ae_unpack_args *);

AE_EXPORT int ae_linear(ae_context *, const ae_linear_args *);
AE_EXPORT int ae_embed(ae_context *, const ae_embed_args *);
AE_EXPORT int ae_embed_packed(ae_context *, const ae_embed_packed_args *);
AE_EXPORT int ae_rms_norm(ae_context *, const ae_rms_norm_args *);
AE_EXPORT int ae_add(ae_context *, const ae_add_args *);
AE_EXPORT int ae_glu(ae_context *, const ae_glu_args *);
AE_EXPORT int ae_rope(ae_context *, const ae_rope_args *);
AE_EXPORT int ae_attention(ae_context *, const ae_attention_args *);
AE_EXPORT int ae_mul(ae_context *, const ae_mul_args *);
AE_EXPORT int ae_scale_positions(ae_context *, const ae_scale_positions_args *);
AE_EXPORT int ae_take(ae_context *, const ae_take_args *);
AE_EXPORT int ae_columns(ae_context *, const ae_columns_args *);
AE_EXPORT int ae_put(ae_context *, const ae_put_args *);
AE_EXPORT int ae_short_conv(ae_context *, const ae_short_conv_args *);
AE_EXPORT int ae_mixture(ae_context *, const ae_mixture_args *);
AE_EXPORT int ae_lay_out(ae_context *, const ae_lay_out_args *);
AE_EXPORT int ae_sample(ae_context *, const ae_sample_args *);
AE_EXPORT int ae_logprobs(ae_context *, const ae_logprobs_args *);
AE_EXPORT int ae_settle(ae_context *, const ae_settle_args *);

/* The number of an operation in a program, by its name ("linear"); -1: there is none. */
AE_EXPORT int64_t ae_operation(const char *name);
AE_EXPORT int ae_program_run(ae_context *, const ae_call *, int64_t count);

#endif
