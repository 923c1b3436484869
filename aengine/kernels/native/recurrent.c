/* Recurrent state: the short causal convolution.
 *
 * Products and sums one by one, oldest tap first, never fused: a token's bits depend neither on the other rows nor on how
 * its sequence is cut. Threads split the channels, which do not meet; each reads the states of all rows before it
 * writes one.
 */
#include "elementwise.h"
#include "internal.h"

/* Channels a thread takes at once: whole cache lines of bf16. */
#define AE_CONV_BLOCK 64

static void convert(void *to, int64_t t, const void *from, int64_t f, int64_t n, int to_bf16, int from_bf16)
{
    for (int64_t i = 0; i < n; i += AE_VL) put_vec(to, t + i, n - i, get_vec(from, f + i, n - i, from_bf16), to_bf16);
}

/* Input `at` of a row, channel c: of its state when negative (the last one is -1), else of the step's tokens. */
AE_INLINE vf input(const ae_short_conv_args *a, int64_t row, int64_t begin, int64_t at, int64_t c, int64_t n, int bf16)
{
    const int64_t keep = a->taps - 1;
    if (at < 0) return get_vec(a->before, (row * keep + keep + at) * a->dim + c, n, bf16);
    return get_vec(a->x, (begin + at) * a->dim + c, n, bf16);
}

AE_INLINE void conv_token(const ae_short_conv_args *a, int64_t row, int64_t begin, int64_t at, int64_t c0, int64_t c1,
                          const int bf16)
{
    for (int64_t c = c0; c < c1; c += AE_VL) {
        const int64_t n = c1 - c;
        vf sum = input(a, row, begin, at - a->taps + 1, c, n, bf16) * get_vec(a->weight, c, n, 0);
        for (int64_t k = 1; k < a->taps; k++) {
            const vf product = input(a, row, begin, at - a->taps + 1 + k, c, n, bf16) *
                               get_vec(a->weight, k * a->dim + c, n, 0);
            sum = sum + product;
        }
        if (a->bias) sum = sum + get_vec(a->bias, c, n, 0);
        put_vec(a->out, (begin + at) * a->dim + c, n, sum, bf16);
    }
}

static void *page_of(const ae_short_conv_args *a, int64_t row, int written)
{
    const int64_t page = a->tables[row * a->table_stride + written];
    return (char *)a->pages + page * a->page_stride * ae_dtype_bytes(a->page_dtype);
}

static void conv_channels(const ae_short_conv_args *a, int64_t c0, int64_t c1)
{
    const int bf16 = a->dtype == AE_BF16, page_bf16 = a->page_dtype == AE_BF16;
    const int64_t keep = a->taps - 1, n = c1 - c0;
    for (int64_t row = 0; row < a->rows; row++)
        for (int64_t i = 0; i < keep; i++)
            convert(a->before, (row * keep + i) * a->dim + c0, page_of(a, row, 0), i * a->dim + c0, n, bf16, page_bf16);
    for (int64_t row = 0; row < a->rows; row++) {
        const int64_t begin = a->row_offsets[row], count = a->row_offsets[row + 1] - begin;
        for (int64_t t = 0; t < count; t++)
            bf16 ? conv_token(a, row, begin, t, c0, c1, 1) : conv_token(a, row, begin, t, c0, c1, 0);
        const int keeps = a->tables[row * a->table_stride + 1] != 0; /* page 0 stays zero */
        for (int64_t i = 0; keeps && i < keep; i++) {
            const int64_t at = count - keep + i;
            const void *from = at < 0 ? a->before : a->x;
            const int64_t f = (at < 0 ? row * keep + keep + at : begin + at) * a->dim + c0;
            convert(page_of(a, row, 1), i * a->dim + c0, from, f, n, page_bf16, bf16);
        }
    }
}

static void conv_part(void *arg, int part, int parts)
{
    const ae_short_conv_args *a = arg;
    const int64_t blocks = ae_ceil_div(a->dim, AE_CONV_BLOCK);
    const int64_t c0 = blocks * part / parts * AE_CONV_BLOCK, c1 = blocks * (part + 1) / parts * AE_CONV_BLOCK;
    conv_channels(a, c0, ae_min(c1, a->dim));
}

int AE_FN(short_conv)(ae_context *ctx, const ae_short_conv_args *a)
{
    const int64_t work = (a->row_offsets[a->rows] + a->rows) * a->dim * a->taps;
    ae_pool_run(ctx->pool, conv_part, (void *)a,
                (int)ae_min(ae_parts(ctx, work, 32768), ae_ceil_div(a->dim, AE_CONV_BLOCK)));
    return AE_OK;
}
