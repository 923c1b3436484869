/* The last step of every matrix product: bias, rounding, and the stores of the outputs that exist. */
#ifndef AE_STORE_H
#define AE_STORE_H

#include "internal.h"
#include "simd.h"

/* Where output `out` of a row stands, in bytes from y. */
static inline int64_t output_at(const ae_linear_args *a, int64_t row, int64_t out)
{
    return (row * a->y_stride + out) * ae_dtype_bytes(a->y_dtype);
}

/* Outputs [out, out + width) of one row, from fp32 sums at c (readable up to a whole vector). */
static inline void store_row(const ae_linear_args *a, int64_t row, int64_t out, int64_t width, const float *c)
{
    const int y_bf16 = a->y_dtype == AE_BF16;
    char *to = (char *)a->y + output_at(a, row, out);
    for (int64_t i = 0; i < width; i += AE_VL) {
        const int n = (int)ae_min(AE_VL, width - i);
        vf v = vf_load(c + i);
        if (a->bias) v += n == AE_VL ? vf_load(a->bias + out + i) : vf_get_part(a->bias, out + i, n, 0);
        if (n < AE_VL)
            vf_put_part(to, i, n, v, y_bf16);
        else if (y_bf16)
            vf_put(to, i, v, 1);
        else
            vf_put(to, i, v, 0);
    }
}

#endif
