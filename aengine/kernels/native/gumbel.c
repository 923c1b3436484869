/* Sampling a row by counter-based Gumbel noise: argmax of (logit - best) / temperature + noise(token).
 *
 * The hash is the engine's definition (see the noise module of the runner), in 32-bit words:
 *   x = (mix32(token + golden) ^ k0) * A;  x ^= x >> 15;  x = (x + k1) * B;  x ^= x >> 16;  word = x & 0x7fffffff
 *   noise = -log(-log(1 - (word + 1/2) / 2^31))
 * A token whose word is not below 2^31 / 64 has noise under 4.16, so it can win only when its logit comes that close to
 * the best token's own score. Logarithms are taken of the remaining 2 % alone; one row of 49,152 takes about 60 us.
 */
#include "internal.h"
#include "simd.h"

#include <math.h>

#define AE_MIX_A 0x7feb352du
#define AE_MIX_B 0x846ca68bu
#define AE_GOLDEN 0x9e3779b9u
#define AE_RARE ((1u << 31) / 64)

AE_INLINE vu mix32(vu x)
{
    x = (x ^ (x >> 16)) * AE_MIX_A;
    x = (x ^ (x >> 15)) * AE_MIX_B;
    return x ^ (x >> 16);
}

AE_INLINE vu words_from(uint32_t token, uint32_t k0, uint32_t k1)
{
    uint32_t t[AE_VL];
    for (int i = 0; i < AE_VL; i++) t[i] = token + (uint32_t)i;
    vu x = (mix32(*(const vu_mem *)t + AE_GOLDEN) ^ k0) * AE_MIX_A;
    x ^= x >> 15;
    x = (x + k1) * AE_MIX_B;
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

/* Of equal scores the lowest token wins. */
static int32_t choose(const float *x, int64_t n, int32_t best, float temperature, uint32_t k0, uint32_t k1)
{
    const float floor_t = fmaxf(temperature, 0x1p-126f), top = x[best];
    uint32_t word[AE_VL];
    *(vu_mem *)word = words_from((uint32_t)best, k0, k1);
    const float bound = noise_of(word[0]) - common_noise();
    float winner = -INFINITY;
    int32_t token = best;
    for (int64_t i = 0; i < n; i += AE_VL) {
        float z[AE_VL];
        const int lanes = (int)ae_min(AE_VL, n - i);
        const vf zs = ((lanes == AE_VL ? vf_load(x + i) : vf_get_part(x, i, lanes, 0)) - vf_set1(top)) / vf_set1(floor_t);
        const vu w = words_from((uint32_t)i, k0, k1);
        const vi able = (vi)(w < AE_RARE) | (vi)(zs >= vf_set1(bound));
        if (!any_lane(able)) continue;
        vf_store(z, zs);
        *(vu_mem *)word = w;
        int32_t hit[AE_VL];
        memcpy(hit, &able, sizeof hit);
        for (int l = 0; l < lanes; l++) {
            if (!hit[l]) continue;
            const float score = z[l] + noise_of(word[l]);
            if (score > winner) winner = score, token = (int32_t)(i + l);
        }
    }
    return token;
}

static void gumbel_part(void *arg, int part, int parts)
{
    const ae_gumbel_args *a = arg;
    for (int64_t r = a->rows * part / parts; r < a->rows * (part + 1) / parts; r++)
        a->tokens[r] =
            choose(a->logits + r * a->stride, a->vocab, a->best[r], a->temperatures[r], a->k0[r], a->k1[r]);
}

int AE_FN(gumbel)(ae_context *ctx, const ae_gumbel_args *a)
{
    ae_pool_run(ctx->pool, gumbel_part, (void *)a, (int)ae_min(ae_parts(ctx, a->rows * a->vocab, 8192), a->rows));
    return AE_OK;
}
