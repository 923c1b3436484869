/* The m largest values of a row, falling.
 *
 * Floats as keys whose unsigned order is theirs. A histogram of the upper 12 bits tells from which bin on there are m;
 * what lies there is sorted by radix, 11 + 11 + 10 bits. No step depends on luck: a row costs two passes and a sort of
 * what it keeps.
 */
#ifndef AE_SELECT_H
#define AE_SELECT_H

#include "simd.h"

#define AE_BINS 4096

typedef struct {
    uint32_t bins[AE_BINS];
    uint32_t *keys; /* room for the row */
    uint32_t *other;
} ae_selection;

static inline uint32_t key_from(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

static inline float key_value(uint32_t key)
{
    const uint32_t u = key & 0x80000000u ? key & 0x7fffffffu : ~key;
    float x;
    memcpy(&x, &u, 4);
    return x;
}

static void radix_pass(uint32_t *bins, const uint32_t *from, uint32_t *to, int64_t n, int shift, uint32_t mask)
{
    memset(bins, 0, (mask + 1) * sizeof *bins);
    for (int64_t i = 0; i < n; i++) bins[~from[i] >> shift & mask]++;
    uint32_t at = 0;
    for (uint32_t b = 0; b <= mask; b++) {
        const uint32_t count = bins[b];
        bins[b] = at;
        at += count;
    }
    for (int64_t i = 0; i < n; i++) to[bins[~from[i] >> shift & mask]++] = from[i];
}

/* The m largest of x[n], m <= n, as falling keys in w->other. */
static void largest(ae_selection *w, const float *x, int64_t n, int64_t m)
{
    memset(w->bins, 0, sizeof w->bins);
    for (int64_t i = 0; i < n; i++) w->bins[key_from(x[i]) >> 20]++;
    int64_t count = 0, bin = AE_BINS;
    while (count < m) count += w->bins[--bin];
    const uint32_t least = (uint32_t)bin << 20;
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t key = key_from(x[i]);
        w->keys[kept] = key;
        kept += key >= least;
    }
    radix_pass(w->bins, w->keys, w->other, count, 0, 2047);
    radix_pass(w->bins, w->other, w->keys, count, 11, 2047);
    radix_pass(w->bins, w->keys, w->other, count, 22, 1023);
}

#endif
