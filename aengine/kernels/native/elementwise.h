/* Vectors of a row that may end within one, and gates. */
#ifndef AE_ELEMENTWISE_H
#define AE_ELEMENTWISE_H

#include "simd.h"

AE_INLINE vf get_vec(const void *p, int64_t i, int64_t n, int bf16)
{
    return n >= AE_VL ? vf_get(p, i, bf16) : vf_get_part(p, i, (int)n, bf16);
}

AE_INLINE void put_vec(void *p, int64_t i, int64_t n, vf v, int bf16)
{
    if (n >= AE_VL)
        vf_put(p, i, v, bf16);
    else
        vf_put_part(p, i, (int)n, v, bf16);
}

/* silu(x) = x / (1 + e^-x). gelu_tanh(x) = x (1 + tanh u) / 2 = x / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x^3):
 * the same form, and free of the cancellation of 1 + tanh u at negative u. */
AE_INLINE vf gate(vf x, const int act)
{
    const vf one = vf_set1(1.0f);
    if (act == 0) return x / (one + vf_exp(-x));
    const vf u = x * vf_fma(x * x, vf_set1(0.044715f * 1.5957691216f), vf_set1(1.5957691216f));
    return x / (one + vf_exp(-u));
}

#endif
