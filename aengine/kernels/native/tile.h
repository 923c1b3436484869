/* The one inner product of the library: a tile of MR rows by 2 vectors of columns.
 *
 * c[i, 0 .. 2 VL) (+)= sum over j of x[i, j] * w[j, 0 .. 2 VL), j rising, one fused multiply-add per j and lane. A column
 * is a lane, so its chain of roundings is the same whatever MR is, wherever a loop over j is cut, and whichever columns
 * stand beside it: that is how a row alone and a row among 512 get the same bits. 6 x 2 accumulators of 8 lanes fill
 * AVX2's 16 registers (12 + 2 of w + 1 of x); 12 x 2 AVX-512's 32.
 */
#ifndef AE_TILE_H
#define AE_TILE_H

#include "simd.h"

#if AE_VL == 16 && defined(__AVX512F__)
#define AE_MR 12
#elif AE_VL == 4 && !defined(__aarch64__)
#define AE_MR 4
#else
#define AE_MR 6
#endif
#define AE_NR (2 * AE_VL)

/* How a row of w is stored. AE_W_PAIRS: a bf16 weight panel; each 32-bit word holds column i in its low half and column
 * i + VL in its high half, so that widening is a shift and a mask. */
enum { AE_W_F32, AE_W_PAIRS };

AE_INLINE void load_w(const void *w, int64_t offset, const int kind, vf *w0, vf *w1)
{
    if (kind == AE_W_PAIRS) {
        vu v = *(const vu_mem *)((const uint16_t *)w + offset);
        *w0 = (vf)(v << 16);
        *w1 = (vf)(v & 0xffff0000u);
    } else {
        *w0 = vf_load((const float *)w + offset);
        *w1 = vf_load((const float *)w + offset + AE_VL);
    }
}

/* `mr`, `kind` and `fetch` are constants at every call. With `fetch`, w is also prefetched `ahead` elements further. */
AE_INLINE void tile_chain(const int mr, const int kind, const float *x, int64_t ldx, const void *w, int64_t ldw, int64_t n,
                          const int fetch, int64_t ahead, vf acc[][2])
{
    for (int64_t j = 0; j < n; j++) {
        vf w0, w1;
        load_w(w, j * ldw, kind, &w0, &w1);
        if (fetch) __builtin_prefetch((const char *)w + (j * ldw + ahead) * (kind == AE_W_F32 ? 4 : 2), 0, 2);
        AE_UNROLL
        for (int i = 0; i < mr; i++) {
            vf xi = vf_set1(x[i * ldx + j]);
            acc[i][0] = vf_fma(xi, w0, acc[i][0]);
            acc[i][1] = vf_fma(xi, w1, acc[i][1]);
        }
    }
}

/* Tile with fp32 c in memory: c = x w, or c += x w when `add`. */
AE_INLINE void tile_c(const int mr, const int kind, const float *x, int64_t ldx, const void *w, int64_t ldw, int64_t n,
                      float *c, int64_t ldc, const int add, const int fetch, int64_t ahead)
{
    vf acc[AE_MR][2];
    AE_UNROLL
    for (int i = 0; i < mr; i++) {
        acc[i][0] = add ? vf_load(c + i * ldc) : vf_set1(0.0f);
        acc[i][1] = add ? vf_load(c + i * ldc + AE_VL) : vf_set1(0.0f);
    }
    tile_chain(mr, kind, x, ldx, w, ldw, n, fetch, ahead, acc);
    AE_UNROLL
    for (int i = 0; i < mr; i++) {
        vf_store(c + i * ldc, acc[i][0]);
        vf_store(c + i * ldc + AE_VL, acc[i][1]);
    }
}

/* Expands CASE(mr) for every row count a tile may have. */
#if AE_MR == 12
#define AE_EACH_MR(CASE) \
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#elif AE_MR == 6
#define AE_EACH_MR(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#else
#define AE_EACH_MR(CASE) CASE(1) CASE(2) CASE(3) CASE(4)
#endif

#endif
