/* What surrounds a forward: a plan's columns laid out as the inputs of a step, sampled points settled into rows, and the
 * copies of rows. Integer work and memcpy only.
 */
#include "internal.h"

#include <string.h>

int ae_run_take(ae_context *ctx, const ae_take_args *a)
{
    (void)ctx;
    for (int64_t i = 0; i < a->rows; i++)
        memcpy((char *)a->out + i * a->bytes, (const char *)a->x + a->index[i] * a->stride, (size_t)a->bytes);
    return AE_OK;
}

int ae_run_columns(ae_context *ctx, const ae_columns_args *a)
{
    (void)ctx;
    for (int64_t t = 0; t < a->rows; t++) {
        const char *from = (const char *)a->x + t * a->stride * a->bytes;
        char *to = (char *)a->out + t * a->size * a->bytes;
        for (int64_t i = 0; i < a->size; i++)
            if (a->bytes == 2)
                ((uint16_t *)to)[i] = ((const uint16_t *)from)[a->index[i]];
            else
                ((uint32_t *)to)[i] = ((const uint32_t *)from)[a->index[i]];
    }
    return AE_OK;
}

int ae_run_put(ae_context *ctx, const ae_put_args *a)
{
    (void)ctx;
    memcpy(a->out, a->x, (size_t)(a->rows * a->bytes));
    for (int64_t i = 0; i < a->put_rows; i++)
        memcpy((char *)a->out + a->index[i] * a->bytes, (const char *)a->y + i * a->bytes, (size_t)a->bytes);
    return AE_OK;
}

static void copy_table(const ae_table *t, int64_t slot, int64_t row, int64_t context)
{
    const int64_t used = t->page_tokens ? ae_min(t->columns, ae_ceil_div(context, t->page_tokens)) : t->columns;
    memcpy(t->by_row + row * t->columns, t->by_slot + slot * t->columns, (size_t)used * 4);
}

/* The token's id if it can be embedded; else 0, and the row's first fault. */
static int32_t usable(const ae_lay_out_args *a, int64_t row, int32_t id, int32_t fault)
{
    if (id >= 0 && id < a->vocab) return id;
    if (!a->faults[row]) {
        a->faults[row] = fault;
        a->fault_ids[row] = id;
    }
    return 0;
}

int ae_run_lay_out(ae_context *ctx, const ae_lay_out_args *a)
{
    (void)ctx;
    const int32_t *given = a->given;
    int64_t token = 0, point = 0;
    a->row_offsets[0] = 0;
    for (int64_t row = 0; row < a->rows; row++) {
        const int32_t slot = a->slots[row], start = a->starts[row], count = a->counts[row];
        a->faults[row] = AE_FINE;
        for (int32_t i = 0; i < count; i++) {
            a->positions[token + i] = start + i;
            a->ids[token + i] = a->relayed[row] ? usable(a, row, a->relay[slot], AE_NO_RELAY)
                                                : usable(a, row, *given++, AE_BAD_ID);
        }
        token += count;
        a->row_offsets[row + 1] = (int32_t)token;
        a->context[row] = start + count;
        for (int64_t g = 0; g < a->groups; g++) copy_table(&a->tables[g], slot, row, start + count);
        for (int32_t i = a->samples[row]; i > 0; i--, point++) {
            a->point_tokens[point] = token - i;
            a->point_positions[point] = start + count - i + 1;
            a->point_slots[point] = slot;
        }
    }
    return AE_OK;
}

/* How many of a row's samples stand: those up to the first that differs from the draft behind it. */
static int32_t accepted(const ae_settle_args *a, int64_t first, int32_t samples)
{
    for (int32_t i = 0; i + 1 < samples; i++)
        if (a->tokens[first + i] != a->ids[a->point_tokens[first + i] + 1]) return i + 1;
    return samples;
}

int ae_run_settle(ae_context *ctx, const ae_settle_args *a)
{
    (void)ctx;
    int64_t first = 0;
    for (int64_t row = 0; row < a->rows; first += a->samples[row++]) {
        const int32_t samples = a->samples[row];
        int32_t *out = a->out + row * a->width;
        memset(out, 0, (size_t)a->width * 4);
        a->accepted[row] = 0;
        for (int32_t i = 0; i < samples && !a->faults[row]; i++)
            if (a->point_faults[first + i]) {
                a->faults[row] = AE_UNSAMPLED;
                a->fault_ids[row] = (int32_t)(first + i);
            }
        if (a->faults[row]) {
            a->relay[a->slots[row]] = -1;
        } else if (samples) {
            const int32_t n = a->accepted[row] = accepted(a, first, samples);
            memcpy(out, a->tokens + first, (size_t)n * 4);
            a->relay[a->slots[row]] = out[n - 1];
        }
    }
    return AE_OK;
}
