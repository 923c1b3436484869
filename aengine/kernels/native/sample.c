/* Sampling: a token and, where wanted, log-probabilities for each position, row by row on one thread each.
 *
 * Raw logits stay as they are: a row under rules is chosen from a copy. Order: best of the raw row; rules; best again;
 * temperature; min-p, top-k, top-p; noise. The definitions are those of the runner's sampler, which is the oracle.
 */
#include "gumbel.h"
#include "internal.h"
#include "rowstats.h"
#include "rules.h"
#include "select.h"

#include <float.h>


/* Values looked at first for a nucleus; 8 times as many when it does not fit, up to all. */
#define AE_FIRST_CANDIDATES 1024

/* One thread's memory; rows have a whole vector of minus infinity behind them where a loop reads on. */
typedef struct {
    float *row;
    float *z;
    int32_t *counts;
    int32_t *picked;
    ae_selection select;
} sample_scratch;

static int64_t row_room(int64_t vocab) { return ae_round_up(vocab + AE_VL, 16); }

static size_t scratch_bytes(int64_t vocab) { return sizeof(sample_scratch) + 64 + (size_t)row_room(vocab) * 4 * 6; }

static sample_scratch *scratch_at(void *memory, int64_t vocab)
{
    const int64_t n = row_room(vocab);
    sample_scratch *w = memory;
    float *rows = (float *)((char *)memory + ae_round_up(sizeof *w, 64));
    w->row = rows;
    w->z = rows + n;
    w->counts = (int32_t *)(rows + 2 * n);
    w->picked = (int32_t *)(rows + 3 * n);
    w->select.keys = (uint32_t *)(rows + 4 * n);
    w->select.other = (uint32_t *)(rows + 5 * n);
    return w;
}

static int fault_of(float best, int nan)
{
    if (best != best) return nan;
    if (isinf(best)) return best > 0.0f ? nan + 1 : nan + 2;
    return AE_FINE;
}

/* ---- the support */

/* The threshold of one row from its m largest values, falling; 0 when the support may reach beyond them. */
static int cut_within(const ae_slot *s, const uint32_t *keys, int64_t m, int64_t n, int64_t top_k, double whole, float *cut)
{
    const int64_t reach = m == n ? m : m - 1; /* the last value may have unseen twins */
    float floor = *cut;
    if (top_k < n) {
        if (top_k > reach) return 0;
        floor = fmaxf(floor, key_value(keys[top_k - 1]));
    }
    if (s->top_p < 1.0) {
        int64_t kept = 0, last = 0;
        double sum = 0.0;
        while (kept < m && key_value(keys[kept]) >= floor) kept++;
        if (kept > reach && isnan(whole)) return 0;
        if (isnan(whole)) {
            whole = 0.0;
            for (int64_t i = 0; i < kept; i++) whole += exp((double)key_value(keys[i]));
        }
        for (; last < kept; last++) /* the first values that hold top_p of the mass */
            if ((sum += exp((double)key_value(keys[last]))) >= s->top_p * whole) break;
        if (last >= kept ? kept > reach : last >= reach) return 0;
        if (last < kept) floor = fmaxf(floor, key_value(keys[last]));
    }
    *cut = floor;
    return 1;
}

/* The support of a row is z >= cut: min-p, then top-k, then top-p of the mass that these leave. */
static float cut_of(const ae_slot *s, sample_scratch *w, const float *z, int64_t n)
{
    float cut = s->min_p > 0.0 ? (float)fmax(log(s->min_p), -FLT_MAX) : -FLT_MAX;
    const int64_t top_k = s->top_k <= 0 || s->top_k >= n ? n : s->top_k;
    if (top_k == n && s->top_p >= 1.0) return cut;
    const double whole = s->top_p < 1.0 && s->min_p <= 0.0 && top_k == n ? exact_exp_sum_of(z, n) : NAN;
    int64_t m = AE_FIRST_CANDIDATES;
    if (top_k < n) m = ae_max(m, top_k + 1);
    for (;; m *= 8) {
        m = ae_min(m, n);
        largest(&w->select, z, n, m);
        if (cut_within(s, w->select.other, m, n, top_k, whole, &cut) || m == n) return cut;
    }
}

static int32_t draw_filtered(const ae_slot *s, sample_scratch *w, const float *x, int64_t n, int32_t best, float scale,
                             ae_key key)
{
    const vf top = vf_set1(x[best]);
    for (int64_t i = 0; i < n; i += AE_VL)
        vf_store(w->z + i, ((n - i >= AE_VL ? vf_load(x + i) : vf_get_part(x, i, (int)(n - i), 0)) - top) / vf_set1(scale));
    for (int64_t i = n; i < ae_round_up(n, AE_VL); i++) w->z[i] = -INFINITY;
    return draw_among(w->z, n, best, cut_of(s, w, w->z, n), key);
}

/* ---- log-probabilities */

typedef struct {
    int32_t *ids;
    float *values;
    int32_t *rank;
} logprob_row;

/* Into w->picked the k best of v, by falling value, of equals by rising id. Room for all of a row is there. */
static void pick_best(sample_scratch *w, const float *v, int64_t n, int64_t k)
{
    if (k == 0) return;
    largest(&w->select, v, n, k);
    const float least = key_value(w->select.other[k - 1]);
    int64_t above = 0;
    while (above < k && key_value(w->select.other[above]) > least) above++;
    int64_t held = 0, equal = k - above;
    for (int64_t i = 0; i < n && held < k; i++) {
        if (!(v[i] >= least) || (v[i] == least && equal-- <= 0)) continue;
        int64_t at = held++; /* insertion: k is small, and ids rise */
        for (; at > 0 && v[w->picked[at - 1]] < v[i]; at--) w->picked[at] = w->picked[at - 1];
        w->picked[at] = (int32_t)i;
    }
}

static void logprobs_of(sample_scratch *w, const float *x, int64_t n, float best, int32_t token, int64_t k, logprob_row out)
{
    const vf m = vf_set1(best), log_sum = vf_set1(logf(exp_sum_of(x, n, best)));
    for (int64_t i = 0; i < n; i += AE_VL)
        vf_store(w->z + i, ((n - i >= AE_VL ? vf_load(x + i) : vf_get_part(x, i, (int)(n - i), 0)) - m) - log_sum);
    const float own = w->z[token];
    int32_t rank = 1;
    for (int64_t i = 0; i < n; i++) rank += w->z[i] > own;
    pick_best(w, w->z, n, k);
    out.ids[0] = token;
    out.values[0] = own;
    *out.rank = rank;
    for (int64_t i = 0; i < k; i++) {
        out.ids[i + 1] = w->picked[i];
        out.values[i + 1] = w->z[w->picked[i]];
    }
}

/* ---- rows */

static int32_t sample_row(const ae_sample_args *a, int64_t i, sample_scratch *w)
{
    const ae_slot *s = &a->table[a->slots[i]];
    const float *raw = a->logits + i * a->stride, *x = raw;
    const int64_t n = a->vocab, position = a->positions[i];
    float top, raw_top;
    int32_t token = best_of(raw, n, &raw_top);
    if ((a->faults[i] = fault_of(raw_top, AE_RAW_NAN))) return 0;
    if (s->always_ruled || s->mask || position < s->stops_until) {
        apply_rules(s, raw, w->row, n, position, w->counts);
        x = w->row;
        token = best_of(x, n, &top);
        if ((a->faults[i] = fault_of(top, AE_RULED_NAN))) return 0;
    }
    if (s->temperature > 0.0) {
        const int filtered = (s->top_k > 0 && s->top_k < n) || s->top_p < 1.0 || s->min_p > 0.0;
        const float scale = fmaxf((float)s->temperature, FLT_MIN);
        const ae_key key = key_of(s->seed, position);
        token = filtered ? draw_filtered(s, w, x, n, token, scale, key) : draw_plain(x, n, token, scale, key);
    }
    if (s->alternatives >= 0) {
        const logprob_row out = {a->ids + i * a->width, a->values + i * a->width, a->ranks + i};
        logprobs_of(w, raw, n, raw_top, token, ae_min(s->alternatives, n), out);
    }
    return token;
}

typedef struct {
    const void *args;
    sample_scratch *scratch[AE_MAX_THREADS];
} row_job;

static int make_scratch(ae_context *ctx, row_job *job, int parts, int64_t vocab)
{
    for (int i = 0; i < parts; i++) {
        void *memory = ae_pool_scratch(ctx->pool, i, scratch_bytes(vocab));
        if (!memory) return AE_NO_MEMORY;
        job->scratch[i] = scratch_at(memory, vocab);
    }
    return AE_OK;
}

static int row_parts(const ae_context *ctx, int64_t rows, int64_t vocab)
{
    return (int)ae_max(1, ae_min(ae_parts(ctx, rows * vocab, 16384), rows));
}

static int in_phase(const ae_sample_args *a, int64_t row) { return !a->phases || a->phases[row] == a->phase; }

static void sample_part(void *arg, int part, int parts)
{
    const row_job *job = arg;
    const ae_sample_args *a = job->args;
    for (int64_t r = a->rows * part / parts; r < a->rows * (part + 1) / parts; r++)
        if (in_phase(a, r)) a->tokens[r] = sample_row(a, r, job->scratch[part]);
}

/* Histories are written when all rows are through: a slot's drafts are one row each, and none sees what another drew. */
int AE_FN(sample)(ae_context *ctx, const ae_sample_args *a)
{
    row_job job = {.args = a};
    const int parts = row_parts(ctx, a->rows, a->vocab);
    if (make_scratch(ctx, &job, parts, a->vocab)) return AE_NO_MEMORY;
    ae_pool_run(ctx->pool, sample_part, &job, parts);
    for (int64_t i = 0; i < a->rows; i++) {
        const ae_slot *s = &a->table[a->slots[i]];
        if (!in_phase(a, i)) continue;
        if (s->history && !a->faults[i] && a->positions[i] < s->history_count) s->history[a->positions[i]] = a->tokens[i];
    }
    return AE_OK;
}

/* A row that holds NaN or infinity, or no finite logit, gets NaN values. */
static void logprobs_row(const ae_logprobs_args *a, int64_t i, sample_scratch *w)
{
    const float *x = a->logits + i * a->stride;
    const logprob_row out = {a->ids + i * a->width, a->values + i * a->width, a->ranks + i};
    float best;
    best_of(x, a->vocab, &best);
    if (!isinf(best) && !isnan(best)) {
        logprobs_of(w, x, a->vocab, best, a->targets[i], ae_min(a->alternatives, a->vocab), out);
        return;
    }
    *out.rank = 1;
    for (int64_t k = 0; k < a->width; k++) {
        out.ids[k] = k ? 0 : a->targets[i];
        out.values[k] = NAN;
    }
}

static void logprobs_part(void *arg, int part, int parts)
{
    const row_job *job = arg;
    const ae_logprobs_args *a = job->args;
    for (int64_t r = a->rows * part / parts; r < a->rows * (part + 1) / parts; r++)
        logprobs_row(a, r, job->scratch[part]);
}

int AE_FN(logprobs)(ae_context *ctx, const ae_logprobs_args *a)
{
    row_job job = {.args = a};
    const int parts = row_parts(ctx, a->rows, a->vocab);
    if (make_scratch(ctx, &job, parts, a->vocab)) return AE_NO_MEMORY;
    ae_pool_run(ctx->pool, logprobs_part, &job, parts);
    return AE_OK;
}
