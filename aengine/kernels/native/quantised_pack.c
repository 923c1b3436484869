/* Quantised weights into panels, and rows of any packed weight back out of them. */
#include "internal.h"
#include "quantised.h"
#include "tile.h"

/* Inputs k .. k + 3 of a row as one word in memory order; what lies behind the row's end is zero. */
AE_INLINE uint32_t four_codes(const uint8_t *row, int64_t k, int64_t n)
{
    uint32_t word = 0;
    if (row && k + 4 <= n)
        memcpy(&word, row + k, 4);
    else if (row && k < n)
        memcpy(&word, row + k, (size_t)(n - k));
    return word;
}

/* Four inputs of one output are one word (see code_at); byte by byte it took ten times as long. */
static void pack_codes(const ae_pack_quantised_args *a, int64_t panel)
{
    const ae_segment *s = a->segment;
    const int64_t wide = AE_PANEL, n = a->in_features, units = code_units(n);
    const int64_t have = ae_min(wide, s->out_features - panel * wide);
    const uint32_t added = s->bits == 8 ? 0x80808080u : s->minimum ? 0 : 0x10101010u; /* 128 or 16 to each */
    const uint32_t used = s->bits == 8 ? ~0u : 0x1f1f1f1fu;
    const uint8_t *rows = (const uint8_t *)a->codes + panel * wide * a->stride;
    uint32_t *to = (uint32_t *)((uint8_t *)s->codes + panel * units * AE_UNIT_BYTES(s->bits));
    for (int64_t first = 0; first < units * AE_UNIT; first += AE_UNIT, to += AE_UNIT_BYTES(s->bits) / 4)
        for (int64_t o = 0; o < AE_VL; o++) {
            const uint8_t *low = o < have ? rows + o * a->stride : NULL;
            const uint8_t *high = o + AE_VL < have ? rows + (o + AE_VL) * a->stride : NULL;
            for (int64_t step = 0; step < AE_STEPS; step++) {
                const uint32_t word0 = four_codes(low, first + 4 * step, n);
                const uint32_t word1 = four_codes(high, first + 4 * step, n);
                if (s->bits != 4) {
                    to[2 * step * AE_VL + o] = low ? (word0 ^ added) & used : 0;
                    to[(2 * step + 1) * AE_VL + o] = high ? (word1 ^ added) & used : 0;
                } else {
                    to[step * AE_VL + o] = (word0 & 0x0f0f0f0fu) | (word1 & 0x0f0f0f0fu) << 4;
                }
            }
        }
}

/* [out, groups] -> [panel][group][output of the panel]; what lies outside is zero. */
static void pack_scale(const ae_pack_quantised_args *a, int64_t panel, const void *values, void *packed)
{
    const ae_segment *s = a->segment;
    const int64_t wide = AE_PANEL, groups = code_groups(a->in_features, s->group), half = s->scale_dtype == AE_F16;
    const int64_t have = ae_ceil_div(a->in_features, s->group), size = half ? 2 : 4;
    const char *from = (const char *)values + panel * wide * have * size;
    char *to = (char *)packed + panel * groups * wide * size;
    memset(to, 0, (size_t)(groups * wide * size));
    for (int64_t o = 0; o < ae_min(wide, s->out_features - panel * wide); o++)
        for (int64_t g = 0; g < have; g++)
            if (half)
                ((uint16_t *)to)[g * wide + o] = ((const uint16_t *)from)[o * have + g];
            else
                ((uint32_t *)to)[g * wide + o] = ((const uint32_t *)from)[o * have + g];
}

static void pack_part(void *arg, int part, int parts)
{
    const ae_pack_quantised_args *a = arg;
    const int64_t panels = ae_ceil_div(a->segment->out_features, AE_PANEL);
    for (int64_t p = panels * part / parts; p < panels * (part + 1) / parts; p++) {
        pack_codes(a, p);
        pack_scale(a, p, a->scale, a->segment->scale);
        if (a->minimum) pack_scale(a, p, a->minimum, a->segment->minimum);
    }
}

int AE_FN(pack_quantised)(ae_context *ctx, const ae_pack_quantised_args *a)
{
    const int64_t panels = ae_ceil_div(a->segment->out_features, AE_PANEL);
    ae_pool_run(ctx->pool, pack_part, (void *)a, ae_parts(ctx, panels, 4));
    return AE_OK;
}

/* Row `o` of a segment: one product and one sum, each rounded, as the format defines a value. */
static void segment_row(const ae_segment *s, int64_t o, int64_t n, float *to)
{
    const int64_t wide = AE_PANEL, panel = o / wide, groups = code_groups(n, s->group);
    const uint8_t *codes = (const uint8_t *)s->codes + panel * code_units(n) * AE_UNIT_BYTES(s->bits);
    o %= wide;
    for (int64_t k = 0; k < n; k++) {
        const int64_t at = (panel * groups + k / s->group) * wide + o;
        const int byte = codes[code_at(s->bits, o, k)];
        const int code = s->bits == 8   ? byte - AE_OFFSET
                         : s->bits == 5 ? byte - (s->minimum ? 0 : AE_OFFSET5)
                         : o < AE_VL    ? byte & 15
                                        : byte >> 4;
        to[k] = (float)code * scale_at(s->scale, at, s->scale_dtype);
        if (s->minimum) to[k] += scale_at(s->minimum, at, s->scale_dtype);
    }
}

/* Row `o` of the panels that ae_pack makes (see load_w for the order of a bf16 panel). */
static void panel_row(const void *weight, int64_t dtype, int64_t o, int64_t n, float *to)
{
    const int64_t first = o / AE_NR * n * AE_NR, c = o % AE_NR;
    const int64_t pair = first + (c < AE_VL ? 2 * c : 2 * (c - AE_VL) + 1);
    for (int64_t k = 0; k < n; k++)
        to[k] = dtype == AE_BF16 ? bf16_to_f32(((const uint16_t *)weight)[pair + k * AE_NR])
                                 : ((const float *)weight)[first + c + k * AE_NR];
}

static void packed_row(const ae_embed_packed_args *a, int64_t o, float *to)
{
    if (a->weight_dtype != AE_QUANTISED) {
        panel_row(a->weight, a->weight_dtype, o, a->in_features, to);
        return;
    }
    const ae_quantised *w = a->weight;
    const ae_segment *s = w->segments;
    for (; o >= s->out_features; s++) o -= s->out_features;
    segment_row(s, o, a->in_features, to);
}

typedef struct {
    const ae_embed_packed_args *args;
    float *rows[AE_MAX_THREADS]; /* per part: a row in fp32, when the output is not */
} embed_job;

static void embed_part(void *arg, int part, int parts)
{
    const embed_job *job = arg;
    const ae_embed_packed_args *a = job->args;
    const int64_t n = a->in_features;
    for (int64_t t = a->rows * part / parts; t < a->rows * (part + 1) / parts; t++) {
        float *row = job->rows[part] ? job->rows[part] : (float *)a->out + t * n;
        packed_row(a, a->ids[t], row);
        if (a->out_dtype == AE_BF16)
            for (int64_t k = 0; k < n; k++) ((uint16_t *)a->out)[t * n + k] = f32_to_bf16(row[k]);
    }
}

int AE_FN(embed_packed)(ae_context *ctx, const ae_embed_packed_args *a)
{
    embed_job job = {.args = a};
    const int parts = (int)ae_max(1, ae_min(ae_parts(ctx, a->rows * a->in_features, 4096), a->rows));
    for (int64_t t = 0; t < a->rows; t++)
        if (a->ids[t] < 0 || a->ids[t] >= a->out_features) return AE_BAD_CALL;
    for (int i = 0; a->out_dtype == AE_BF16 && i < parts; i++) {
        job.rows[i] = ae_pool_scratch(ctx->pool, i, (size_t)(4 * a->in_features));
        if (!job.rows[i]) return AE_NO_MEMORY;
    }
    ae_pool_run(ctx->pool, embed_part, &job, parts);
    return AE_OK;
}
