/* GGML's integer block formats taken apart into codes, scales and minima, one pass over the blocks.
 *
 * Bit for bit what the plain form of it makes (models/blocks.py): a scale or minimum is a half, or one rounded product of
 * a half and a small integer. Codes of 8 bits are int8, written as bytes.
 */
#include "internal.h"
#include "quantised.h"

typedef void (*unpack_block)(const uint8_t *b, uint8_t *codes, float *scale, float *minimum);

/* fp16 at any address -> fp32; infinities and NaN too, which a broken file may hold. */
AE_INLINE float half_at(const uint8_t *b)
{
    uint16_t h;
    memcpy(&h, b, 2);
    if ((h & 0x7c00) != 0x7c00) return f16_to_f32(h);
    const uint32_t bits = (uint32_t)(h & 0x8000) << 16 | 0x7f800000u | (uint32_t)(h & 0x3ff) << 13;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* `n` bytes -> 2 n codes: all low nibbles, then all high ones. */
AE_INLINE void nibbles(const uint8_t *from, uint8_t *codes, const int n)
{
    for (int i = 0; i < n; i++) {
        codes[i] = from[i] & 15;
        codes[n + i] = from[i] >> 4;
    }
}

/* 32 bits, the least significant first, above the nibbles of 32 codes. */
AE_INLINE void fifth_bits(const uint8_t *from, uint8_t *codes)
{
    for (int i = 0; i < 32; i++) codes[i] |= (uint8_t)((from[i / 8] >> i % 8 & 1) << 4);
}

/* Codes of 2 bits: from[i] holds those of four runs of 32. */
AE_INLINE void pairs(const uint8_t *from, uint8_t *codes)
{
    for (int run = 0; run < 4; run++)
        for (int i = 0; i < 32; i++) codes[32 * run + i] = from[i] >> 2 * run & 3;
}

AE_INLINE void take_off(uint8_t *codes, const int n, const int zero)
{
    for (int i = 0; i < n; i++) codes[i] = (uint8_t)(codes[i] - zero);
}

static void q4_0(const uint8_t *b, uint8_t *codes, float *scale, float *minimum)
{
    nibbles(b + 2, codes, 16);
    scale[0] = half_at(b);
    minimum[0] = scale[0] * -8.0f;
}

static void q4_1(const uint8_t *b, uint8_t *codes, float *scale, float *minimum)
{
    nibbles(b + 4, codes, 16);
    scale[0] = half_at(b);
    minimum[0] = half_at(b + 2);
}

static void q5_0(const uint8_t *b, uint8_t *codes, float *scale, float *minimum)
{
    (void)minimum;
    nibbles(b + 6, codes, 16);
    fifth_bits(b + 2, codes);
    take_off(codes, 32, 16);
    scale[0] = half_at(b);
}

static void q5_1(const uint8_t *b, uint8_t *codes, float *scale, float *minimum)
{
    nibbles(b + 8, codes, 16);
    fifth_bits(b + 4, codes);
    scale[0] = half_at(b);
    minimum[0] = half_at(b + 2);
}

static void q8_0(const uint8_t *b, uint8_t *codes, float *scale, float *minimum)
{
    (void)minimum;
    memcpy(codes, b + 2, 32);
    scale[0] = half_at(b);
}

static void q2_k(const uint8_t *b, uint8_t *codes, float *scale, float *minimum)
{
    const float d = half_at(b + 80), least = -half_at(b + 82);
    pairs(b + 16, codes);
    pairs(b + 48, codes + 128);
    for (int g = 0; g < 16; g++) {
        scale[g] = d * (float)(b[g] & 15);
        minimum[g] = least * (float)(b[g] >> 4);
    }
}

static void q3_k(const uint8_t *b, uint8_t *codes, float *scale, float *minimum)
{
    const uint8_t *low = b + 96, *high = b + 104;
    const float d = half_at(b + 108);
    (void)minimum;
    pairs(b + 32, codes);
    pairs(b + 64, codes + 128);
    for (int run = 0; run < 8; run++)
        for (int i = 0; i < 32; i++) codes[32 * run + i] |= (uint8_t)((b[i] >> run & 1) << 2);
    take_off(codes, 256, 4);
    for (int g = 0; g < 16; g++) {
        const int nibble = g < 8 ? low[g] & 15 : low[g - 8] >> 4, upper = high[g % 4] >> 2 * (g / 4) & 3;
        scale[g] = d * (float)((nibble | upper << 4) - 32);
    }
}

/* 8 scales and 8 minima of 6 bits in bytes 4 .. 15. */
AE_INLINE void k_scales(const uint8_t *b, float *scale, float *minimum)
{
    const uint8_t *low = b + 4, *mid = b + 8, *high = b + 12;
    const float d = half_at(b), least = half_at(b + 2);
    for (int g = 0; g < 4; g++) {
        scale[g] = d * (float)(low[g] & 63);
        scale[4 + g] = d * (float)((high[g] & 15) | (low[g] >> 2 & 48));
        minimum[g] = -(least * (float)(mid[g] & 63));
        minimum[4 + g] = -(least * (float)(high[g] >> 4 | (mid[g] >> 2 & 48)));
    }
}

static void q4_k(const uint8_t *b, uint8_t *codes, float *scale, float *minimum)
{
    for (int run = 0; run < 4; run++) nibbles(b + 16 + 32 * run, codes + 64 * run, 32);
    k_scales(b, scale, minimum);
}

static void q5_k(const uint8_t *b, uint8_t *codes, float *scale, float *minimum)
{
    for (int run = 0; run < 4; run++) nibbles(b + 48 + 32 * run, codes + 64 * run, 32);
    for (int run = 0; run < 8; run++)
        for (int i = 0; i < 32; i++) codes[32 * run + i] |= (uint8_t)((b[16 + i] >> run & 1) << 4);
    k_scales(b, scale, minimum);
}

static void q6_k(const uint8_t *b, uint8_t *codes, float *scale, float *minimum)
{
    const float d = half_at(b + 208);
    (void)minimum;
    for (int half = 0; half < 2; half++) {
        const uint8_t *upper = b + 128 + 32 * half;
        uint8_t *to = codes + 128 * half;
        nibbles(b + 64 * half, to, 64);
        for (int run = 0; run < 4; run++)
            for (int i = 0; i < 32; i++) to[32 * run + i] |= (uint8_t)((upper[i] >> 2 * run & 3) << 4);
    }
    take_off(codes, 256, 32);
    for (int g = 0; g < 16; g++) scale[g] = d * (float)(int8_t)b[192 + g];
}

typedef struct {
    int64_t kind; /* GGML's number of the format */
    unpack_block unpack;
    int64_t bytes, elements, groups, has_minimum;
} block_format;

static const block_format formats[] = {
    {2, q4_0, 18, 32, 1, 1},     {3, q4_1, 20, 32, 1, 1},      {6, q5_0, 22, 32, 1, 0},     {7, q5_1, 24, 32, 1, 1},
    {8, q8_0, 34, 32, 1, 0},     {10, q2_k, 84, 256, 16, 1},   {11, q3_k, 110, 256, 16, 0}, {12, q4_k, 144, 256, 8, 1},
    {13, q5_k, 176, 256, 8, 1},  {14, q6_k, 210, 256, 16, 0},
};

typedef struct {
    const ae_unpack_args *args;
    const block_format *format;
} unpack_job;

static void unpack_part(void *arg, int part, int parts)
{
    const unpack_job *job = arg;
    const ae_unpack_args *a = job->args;
    const block_format *f = job->format;
    for (int64_t i = a->count * part / parts; i < a->count * (part + 1) / parts; i++)
        f->unpack((const uint8_t *)a->blocks + i * f->bytes, (uint8_t *)a->codes + i * f->elements,
                  a->scale + i * f->groups, f->has_minimum ? a->minimum + i * f->groups : NULL);
}

int AE_FN(unpack)(ae_context *ctx, const ae_unpack_args *a)
{
    unpack_job job = {.args = a};
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (formats[i].kind == a->kind) job.format = &formats[i];
    if (!job.format || !a->minimum != !job.format->has_minimum) return AE_BAD_CALL;
    const int64_t elements = a->count * job.format->elements;
    ae_pool_run(ctx->pool, unpack_part, &job, ae_fine_parts(ae_parts(ctx, elements, 1 << 15), elements, 1 << 15));
    return AE_OK;
}
