/* Sampling a row by counter-based Gumbel noise: argmax of (logit - best) / temperature + noise(token).
 *
 * The hash is the engine's definition (see the noise module of the runner), in 32-bit words:
 *   x = (mix32(token + golden) ^ k0) * A;  x ^= x >> 15;  x = (x + k1) * B;  x ^= x >> 16;  word = x & 0x7fffffff
 *   noise = -log(-log(1 - (word + 1/2) / 2^31))
 * A token whose word is not below 2^31 / 64 has noise under 4.16, so it can win only when its logit comes that close to
 * the best token's own score. Logarithms are taken of the remaining 2 % alone; one row of 49,152 takes about 60 us.
 *   key(seed, position) = mix64(mix64(seed) + position * golden64), its halves k0 (high) and k1
 */
#ifndef AE_GUMBEL_H
#define AE_GUMBEL_H

#include "internal.h"
#include "simd.h"

#include <math.h>

#define AE_MIX_A 0x7feb352du
#define AE_MIX_B 0x846ca68bu
#define AE_GOLDEN 0x9e3779b9u
#define AE_RARE ((1u << 31) / 64)

typedef struct {
    uint32_t k0, k1;
} ae_key;

static uint64_t mix64(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static ae_key key_of(uint64_t seed, int64_t position)
{
    const uint64_t key = mix64(mix64(seed) + (uint64_t)position * 0x9e3779b97f4a7c15u);
    return (ae_key){(uint32_t)(key >> 32), (uint32_t)key};
}

AE_INLINE vu mix32(vu x)
{
    x = (x ^ (x >> 16)) * AE_MIX_A;
    x = (x ^ (x >> 15)) * AE_MIX_B;
    return x ^ (x >> 16);
}

AE_INLINE vu words_from(uint32_t token, ae_key key)
{
    uint32_t t[AE_VL];
    for (int i = 0; i < AE_VL; i++) t[i] = token + (uint32_t)i;
    vu x = (mix32(*(const vu_mem *)t + AE_GOLDEN) ^ key.k0) * AE_MIX_A;
    x ^= x >> 15;
    x = (x + key.k1) * AE_MIX_B;
    x ^= x >> 16;
    return x & 0x7fffffffu;
}

/* v stays under 1, where fp32 would round it up and the noise be minus infinity. */
static float noise_of(uint32_t word)
{
    const float v = fminf(((float)word + 0.5f) * 0x1p-31f, 1.0f - 0x1p-24f);
    return -logf(-log1pf(-v));
}

static float common_noise(void)
{
    return (float)(-log(-log1p(-(double)AE_RARE / 0x1p31)) + 1e-3);
}

typedef struct {
    float score;
    int32_t token;
} ae_winner;

/* Score the lanes of `able` among the tokens from `first`; of equal scores the lowest token wins. */
AE_INLINE void score_lanes(ae_winner *best, int32_t first, int lanes, vi able, vf zs, vu words)
{
    float z[AE_VL];
    uint32_t word[AE_VL];
    int32_t hit[AE_VL];
    vf_store(z, zs);
    *(vu_mem *)word = words;
    memcpy(hit, &able, sizeof hit);
    for (int l = 0; l < lanes; l++) {
        if (!hit[l]) continue;
        const float score = z[l] + noise_of(word[l]);
        if (score > best->score) *best = (ae_winner){score, first + l};
    }
}

/* Of the whole row x, its greatest value at `best`. */
static int32_t draw_plain(const float *x, int64_t n, int32_t best, float temperature, ae_key key)
{
    const vf top = vf_set1(x[best]), scale = vf_set1(temperature);
    uint32_t word[AE_VL];
    *(vu_mem *)word = words_from((uint32_t)best, key);
    const vf bound = vf_set1(noise_of(word[0]) - common_noise());
    ae_winner winner = {-INFINITY, best};
    for (int64_t i = 0; i < n; i += AE_VL) {
        const int lanes = (int)ae_min(AE_VL, n - i);
        const vf zs = ((lanes == AE_VL ? vf_load(x + i) : vf_get_part(x, i, lanes, 0)) - top) / scale;
        const vu words = words_from((uint32_t)i, key);
        const vi able = (vi)(words < AE_RARE) | (vi)(zs >= bound);
        if (any_lane(able)) score_lanes(&winner, (int32_t)i, lanes, able, zs, words);
    }
    return winner.token;
}

/* Of the tokens with z >= cut. z has room for a whole last vector, which holds minus infinity behind the row. */
static int32_t draw_among(const float *z, int64_t n, int32_t best, float cut, ae_key key)
{
    ae_winner winner = {-INFINITY, best};
    for (int64_t i = 0; i < n; i += AE_VL) {
        const vf zs = vf_load(z + i);
        const vi able = (vi)(zs >= vf_set1(cut));
        if (any_lane(able))
            score_lanes(&winner, (int32_t)i, AE_VL, able, zs, words_from((uint32_t)i, key));
    }
    return winner.token;
}

#endif
