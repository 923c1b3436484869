/* Tiles of the integer product: some rows of activations by a run of units of a panel, one function for each number of
 * rows, form of codes and size of groups. */
#ifndef AE_QUANTISED_TILES_H
#define AE_QUANTISED_TILES_H

#include "quantised.h"

/* The most rows of a tile. Where products come out of the instruction set, AVX2's 16 registers hold 6 rows x 2 integer
 * sums, two vectors of codes, one of x and one product. Few rows come in tiles of any number. Many, over AE_FEW, are cut
 * into equal tiles, which have no fewer than 4 of 6 or 6 of 8 rows. */
#if AE_VL == 16 && AE_FAST_STEP
#define AE_QR 8
#define AE_EACH_FEW(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#define AE_EACH_MANY(CASE) CASE(6) CASE(7) CASE(8)
#define AE_EACH_SECOND(CASE) CASE(8) CASE(4) CASE(2) CASE(1)
#elif AE_FAST_STEP
#define AE_QR 6
#define AE_EACH_FEW(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#define AE_EACH_MANY(CASE) CASE(4) CASE(5) CASE(6)
#define AE_EACH_SECOND(CASE) CASE(6) CASE(4) CASE(2) CASE(1)
#else
#define AE_QR 2
#define AE_EACH_FEW(CASE) CASE(1) CASE(2)
#define AE_EACH_MANY(CASE) CASE(1) CASE(2)
#define AE_EACH_SECOND(CASE) CASE(2) CASE(1)
#endif
#define AE_FEW (3 * AE_QR)

/* Bytes of codes ahead of the one in use that a single tile asks for. */
#define AE_AHEAD 2048

/* Between two branches: what both begin with is not taken out in front of them, where it would need registers. */
#define AE_APART() __asm__ volatile("" ::: "memory")

/* A run of units of a panel. */
typedef struct {
    const uint8_t *codes;
    const char *scale; /* [group][outputs], fp32 or fp16 */
    const char *minimum;
    int64_t units;
    int64_t group_units; /* units that share a scale */
    int64_t left;        /* of them, those of the first group from the first unit on */
    int64_t codes16;     /* from a unit of activations to its codes as 16-bit integers, in units */
    int f16;
    int first;   /* sums begin here, rather than with what c holds */
    int last;    /* no unit comes after these */
    int streams; /* the codes come from memory: ask for them ahead */
    const int32_t *totals; /* of each row of the tile, the sum of its int16 codes */
} code_run;

/* How codes are stored and multiplied. By int8: packed nibbles, those taken apart to bytes, or bytes of 5 bits. By int16:
 * packed bytes, or those taken apart to signed 16-bit integers. */
enum { AE_PACKED4, AE_BYTES4, AE_BYTES5, AE_WIDE8, AE_APART16, AE_FORMS };
#define AE_IS16(form) ((form) >= AE_WIDE8)

/* Of how many inputs integer sums are: of units, of half units, or of all. */
enum { AE_OF_UNITS, AE_OF_HALVES, AE_OF_ROWS, AE_SUMS };

AE_INLINE int64_t form_bytes(const int form) /* of a unit */
{
    return (form == AE_PACKED4 ? 1 : form == AE_APART16 ? 4 : 2) * AE_STEPS * 4 * AE_VL;
}

AE_INLINE vu alternate(vu v, int odd) /* bytes 0 and 2 of each four as 16-bit integers, or 1 and 3 */
{
    typedef uint16_t v16 __attribute__((vector_size(4 * AE_VL)));
    return odd ? (vu)((v16)v >> 8) : v & 0x00ff00ff;
}

/* The two vectors of a step, `odd` of a step of 16-bit integers; p: the first code of the unit. */
AE_INLINE void load_codes(const uint8_t *p, const int form, int step, int odd, vu *w0, vu *w1)
{
    const vu_mem *v = (const vu_mem *)p;
    if (form == AE_PACKED4) {
        *w0 = v[step] & 0x0f0f0f0f;
        *w1 = (v[step] >> 4) & 0x0f0f0f0f;
        return;
    }
    const int at = form == AE_APART16 ? 2 * step + odd : step;
    *w0 = v[2 * at];
    *w1 = v[2 * at + 1];
    if (form == AE_WIDE8) {
        *w0 = alternate(*w0, odd);
        *w1 = alternate(*w1, odd);
    }
}

AE_INLINE vu signed_codes(vu v) /* AE_OFFSET off each of the 16-bit integers */
{
    typedef uint16_t v16 __attribute__((vector_size(4 * AE_VL)));
    return (vu)((v16)v - AE_OFFSET);
}

AE_INLINE vu four_codes(const int8_t *p)
{
    uint32_t x;
    memcpy(&x, p, 4);
    return (vu){0} + x;
}

AE_INLINE vf load_scale(const char *p, int column, int f16)
{
    return f16 ? vf_load_f16((const uint16_t *)p + column * AE_VL) : vf_load((const float *)p + column * AE_VL);
}

AE_INLINE void fetch(const void *p, int64_t from, int64_t to)
{
    for (int64_t i = from; i < to; i += 64) __builtin_prefetch((const char *)p + i, 0, 2);
}

/* The scale of a unit of int8, in every lane: where products come apart, as integers. */
AE_INLINE vu unit_scale(const ae_x_unit *x) { return AE_SPLIT ? (vu){0} + x->pair : (vu)vf_set1(x->scale); }

/* sum + integer sums times both scales; that of int16 units is their row's factor, which comes later. */
AE_INLINE vf add_scaled(const int form, vi dot, vu scale_x, vf scale, vf sum)
{
    if (AE_IS16(form)) return vf_fma(scale, __builtin_convertvector(dot, vf), sum);
#if AE_SPLIT
    return vf_fma(scale, __builtin_convertvector(multiply_pairs((vu)dot, scale_x), vf), sum);
#else
    return vf_fma((vf)scale_x, scale * __builtin_convertvector(dot, vf), sum);
#endif
}

/* Integer sums of mr rows into their fp32 sums: those of `acc` when `keep`, of c otherwise. */
AE_INLINE void add_group(const int mr, const int form, const int keep, const int which, vi sums[][2], const ae_x_unit *x,
                         int64_t ldx, const char *scale, const char *minimum, int f16, vf acc[][2], float *c)
{
    vf s[2], m[2];
    for (int k = 0; k < 2; k++) {
        s[k] = load_scale(scale, k, f16);
        m[k] = minimum ? load_scale(minimum, k, f16) : s[k] * vf_set1(form == AE_BYTES5 ? -AE_OFFSET5 : 0.0f);
    }
    AE_UNROLL
    for (int i = 0; i < mr; i++) {
        const ae_x_unit *xi = x + i * ldx;
        const vu scale_x = AE_IS16(form) ? (vu){0} : unit_scale(xi);
        const vf sum_x = vf_set1(xi->sums[which]);
        AE_UNROLL
        for (int k = 0; k < 2; k++) {
            float *at = c + (i * 2 + k) * AE_VL;
            vf sum = keep ? acc[i][k] : vf_load(at);
            sum = add_scaled(form, sums[i][k], scale_x, s[k], sum);
            if (minimum || form == AE_BYTES5) sum = vf_fma(m[k], sum_x, sum);
            if (keep)
                acc[i][k] = sum;
            else
                vf_store(at, sum);
        }
    }
}

AE_INLINE void add_products(const int mr, const int form, int step, int odd, const uint8_t *codes, const ae_x_unit *x,
                            int64_t ldx, int64_t codes16, vi sums[][2])
{
    vu w0, w1;
    load_codes(codes, form, step, odd, &w0, &w1);
    AE_UNROLL
    for (int i = 0; i < mr; i++) {
        const vu xj = four_codes(AE_IS16(form) ? x[i * ldx + codes16].code + 32 * odd + 4 * step
                                               : x[i * ldx].code + 4 * step);
        add_step(AE_IS16(form), &sums[i][0], &sums[i][1], w0, w1, xj);
    }
}

/* c [mr][outputs of the panel] += the product of mr rows of units with a run. All but the last four are constants. Of
 * many rows the fp32 sums live in c, so that the integer sums have the registers. */
AE_INLINE void code_tile(const int mr, const int form, const int halves, const code_run *b, const ae_x_unit *x,
                         int64_t ldx, float *c)
{
    const int keep = mr <= AE_QR / 2, apart = form == AE_BYTES4 || form == AE_APART16;
    const int offset = form == AE_WIDE8, split = halves || form == AE_BYTES5; /* integer sums of half a unit */
    const int f16 = !apart && b->f16, streams = !apart && b->streams;
    const int64_t scale_bytes = AE_PANEL * (f16 ? 2 : 4), codes16 = b->codes16;
    const uint8_t *codes = b->codes;
    const char *scale = b->scale, *minimum = b->minimum;
    int64_t left = b->left;
    vf acc[AE_QR][2];
    AE_UNROLL
    for (int i = 0; i < mr; i++)
        for (int k = 0; k < 2; k++) {
            float *at = c + (i * 2 + k) * AE_VL;
            if (keep)
                acc[i][k] = b->first ? vf_set1(0.0f) : vf_load(at);
            else if (b->first)
                vf_store(at, vf_set1(0.0f));
        }
    for (int64_t u = 0; u < b->units; u++, x++, codes += form_bytes(form)) {
        vi sums[AE_QR][2];
        if (streams) {
            fetch(codes + AE_AHEAD, 0, form_bytes(form));
            __builtin_prefetch(scale + AE_AHEAD / 8, 0, 2);
            if (minimum) __builtin_prefetch(minimum + AE_AHEAD / 8, 0, 2);
        }
        AE_UNROLL
        for (int h = 0; h < 2; h++) {
            const int which = split ? 1 + h : 0;
            AE_UNROLL
            for (int i = 0; i < mr; i++)
                if (h == 0 || split)
                    sums[i][0] = sums[i][1] = (vi){0} + (offset ? x[i * ldx].offsets[which] : 0);
            AE_UNROLL_STEPS
            for (int j = 4 * h; j < 4 * h + 4; j++) {
                add_products(mr, form, j, 0, codes, x, ldx, codes16, sums);
                if (AE_IS16(form)) add_products(mr, form, j, 1, codes, x, ldx, codes16, sums);
            }
            if (h == 0 && !split) continue;
            if (minimum) {
                AE_APART();
                add_group(mr, form, keep, which, sums, x, ldx, scale, minimum, f16, acc, c);
            } else {
                AE_APART();
                add_group(mr, form, keep, which, sums, x, ldx, scale, NULL, f16, acc, c);
            }
            if (halves || (h == 1 && --left == 0)) {
                scale += scale_bytes;
                if (minimum) minimum += scale_bytes;
                left = b->group_units;
            }
        }
    }
    AE_UNROLL
    for (int i = 0; i < mr && keep; i++)
        for (int k = 0; k < 2; k++) vf_store(c + (i * 2 + k) * AE_VL, acc[i][k]);
}

/* The same where all units of a row share a scale: c holds integers until the last run. */
AE_INLINE void row_tile(const int mr, const int form, const code_run *b, const ae_x_unit *x, int64_t ldx, float *c)
{
    const int64_t codes16 = b->codes16;
    const uint8_t *codes = b->codes;
    vi sums[AE_QR][2];
    AE_UNROLL
    for (int i = 0; i < mr; i++)
        for (int k = 0; k < 2; k++)
            sums[i][k] = !b->first ? (vi)vf_load(c + (i * 2 + k) * AE_VL)
                                   : (vi){0} - (form == AE_WIDE8 ? AE_OFFSET * b->totals[i] : 0);
    for (int64_t u = 0; u < b->units; u++, x++, codes += form_bytes(form)) {
        if (form == AE_WIDE8 && b->streams) fetch(codes + AE_AHEAD, 0, form_bytes(form));
        AE_UNROLL_STEPS
        for (int j = 0; j < AE_STEPS; j++) {
            add_products(mr, form, j, 0, codes, x, ldx, codes16, sums);
            add_products(mr, form, j, 1, codes, x, ldx, codes16, sums);
        }
    }
    AE_UNROLL
    for (int k = 0; k < 2; k++) {
        const vf scale = load_scale(b->scale, k, b->f16);
        const vf minimum = b->minimum ? load_scale(b->minimum, k, b->f16) : vf_set1(0.0f);
        AE_UNROLL
        for (int i = 0; i < mr; i++) {
            const vf sum = scale * __builtin_convertvector(sums[i][k], vf);
            const vf both = b->minimum ? vf_fma(minimum, vf_set1((float)b->totals[i]), sum) : sum;
            vf_store(c + (i * 2 + k) * AE_VL, b->last ? both : (vf)sums[i][k]);
        }
    }
}

/* c [row - first][outputs of the panel] += the product of mr units of second codes, at the same place of rows as they
 * say, with a panel that begins at b. */
AE_INLINE void second_tile(const int mr, const int form, const int halves, const code_run *b,
                           const ae_x_unit *const *x, int64_t first, float *c)
{
    const int64_t unit = x[0]->offsets[0], groups = halves ? 2 : 1, scale_bytes = AE_PANEL * (b->f16 ? 2 : 4);
    const int split = halves || form == AE_BYTES5;
    const uint8_t *codes = b->codes + unit * form_bytes(form);
    const char *scale = b->scale + unit / b->group_units * groups * scale_bytes;
    vi sums[AE_QR][2];
    AE_UNROLL
    for (int h = 0; h < 2; h++) {
        AE_UNROLL
        for (int i = 0; i < mr; i++)
            if (h == 0 || split) sums[i][0] = sums[i][1] = (vi){0};
        AE_UNROLL_STEPS
        for (int j = 4 * h; j < 4 * h + 4; j++) {
            vu w0, w1;
            load_codes(codes, form, j, 0, &w0, &w1);
            AE_UNROLL
            for (int i = 0; i < mr; i++)
                add_step(0, &sums[i][0], &sums[i][1], w0, w1, four_codes(x[i]->code + 4 * j));
        }
        if (h == 0 && !split) continue;
        vf of_256[2];
        for (int k = 0; k < 2; k++) of_256[k] = load_scale(scale, k, b->f16) * vf_set1(0x1p-8f);
        AE_UNROLL
        for (int i = 0; i < mr; i++) {
            const vu scale_x = unit_scale(x[i]);
            float *at = c + (x[i]->offsets[1] - first) * AE_PANEL;
            for (int k = 0; k < 2; k++, at += AE_VL)
                vf_store(at, add_scaled(form, sums[i][k], scale_x, of_256[k], vf_load(at)));
        }
        if (halves) scale += scale_bytes;
    }
}

typedef void (*second_fn)(const code_run *b, const ae_x_unit *const *x, int64_t first, float *c);
#define SECOND(FORM, HALVES, MR)                                                                                      \
    static __attribute__((noinline)) void second_##FORM##_##HALVES##_##MR(                                            \
        const code_run *b, const ae_x_unit *const *x, int64_t first, float *c)                                        \
    {                                                                                                                 \
        second_tile(MR, FORM, HALVES, b, x, first, c);                                                                \
    }
#define SECONDS(MR)                                                                                                   \
    SECOND(AE_PACKED4, 0, MR) SECOND(AE_PACKED4, 1, MR) SECOND(AE_BYTES5, 0, MR) SECOND(AE_BYTES5, 1, MR)
AE_EACH_SECOND(SECONDS)
#define SECOND_ENTRY(MR)                                                                                              \
    {MR, {{second_AE_PACKED4_0_##MR, second_AE_PACKED4_1_##MR}, {second_AE_BYTES5_0_##MR, second_AE_BYTES5_1_##MR}}},
/* Numbers of units, falling, and tiles of so many: [5 bits][groups of 16]. */
static const struct {
    int units;
    second_fn tile[2][2];
} second_tiles[] = {AE_EACH_SECOND(SECOND_ENTRY)};

typedef void (*code_tile_fn)(const code_run *, const ae_x_unit *x, int64_t ldx, float *c);
#define CODE_TILE(FORM, HALVES, MR)                                                                                   \
    static __attribute__((noinline)) void tile_##FORM##_##HALVES##_##MR(const code_run *b, const ae_x_unit *x,        \
                                                                        int64_t ldx, float *c)                        \
    {                                                                                                                 \
        code_tile(MR, FORM, HALVES, b, x, ldx, c);                                                                    \
    }
#define ROW_TILE(FORM, MR)                                                                                            \
    static __attribute__((noinline)) void tile_##FORM##_rows_##MR(const code_run *b, const ae_x_unit *x, int64_t ldx, \
                                                                  float *c)                                           \
    {                                                                                                                 \
        row_tile(MR, FORM, b, x, ldx, c);                                                                             \
    }
#define FEW_TILES(MR)                                                                                                 \
    CODE_TILE(AE_PACKED4, 0, MR) CODE_TILE(AE_PACKED4, 1, MR) CODE_TILE(AE_BYTES5, 0, MR) CODE_TILE(AE_BYTES5, 1, MR) \
    CODE_TILE(AE_WIDE8, 0, MR) CODE_TILE(AE_WIDE8, 1, MR) ROW_TILE(AE_WIDE8, MR)
#define MANY_TILES(MR)                                                                                                \
    CODE_TILE(AE_BYTES4, 0, MR) CODE_TILE(AE_BYTES4, 1, MR) CODE_TILE(AE_APART16, 0, MR) CODE_TILE(AE_APART16, 1, MR) \
    ROW_TILE(AE_APART16, MR)
AE_EACH_FEW(FEW_TILES)
AE_EACH_MANY(MANY_TILES)
#define PACKED4_ENTRY(MR) [MR] = {tile_AE_PACKED4_0_##MR, tile_AE_PACKED4_1_##MR},
#define BYTES4_ENTRY(MR) [MR] = {tile_AE_BYTES4_0_##MR, tile_AE_BYTES4_1_##MR},
#define BYTES5_ENTRY(MR) [MR] = {tile_AE_BYTES5_0_##MR, tile_AE_BYTES5_1_##MR},
#define WIDE8_ENTRY(MR) [MR] = {tile_AE_WIDE8_0_##MR, tile_AE_WIDE8_1_##MR, tile_AE_WIDE8_rows_##MR},
#define APART16_ENTRY(MR) [MR] = {tile_AE_APART16_0_##MR, tile_AE_APART16_1_##MR, tile_AE_APART16_rows_##MR},
/* [form][rows][what integer sums are of] */
static const code_tile_fn code_tiles[AE_FORMS][AE_QR + 1][AE_SUMS] = {
    [AE_PACKED4] = {AE_EACH_FEW(PACKED4_ENTRY)},
    [AE_BYTES4] = {AE_EACH_MANY(BYTES4_ENTRY)},
    [AE_BYTES5] = {AE_EACH_FEW(BYTES5_ENTRY)},
    [AE_WIDE8] = {AE_EACH_FEW(WIDE8_ENTRY)},
    [AE_APART16] = {AE_EACH_MANY(APART16_ENTRY)},
};

#endif
