/* What a slot's request does to its logits before a token is chosen; order and meaning as in the runner's rules module:
 * its grammar's mask; allowed ids, bias, bad words, stop tokens before min_tokens; then repetition, frequency, presence.
 */
#ifndef AE_RULES_H
#define AE_RULES_H

#include "internal.h"

#include <math.h>
#include <string.h>

static void mask_words(const ae_slot *s, float *row, int64_t seen)
{
    const int32_t *word = s->bad_words;
    for (int64_t i = 0; i < s->bad_words_count; i++) {
        const int64_t before = word[0] - 1, start = seen - before;
        if (start >= 0 && memcmp(s->history + start, word + 1, (size_t)before * 4) == 0) row[word[before + 1]] = -INFINITY;
        word += before + 2;
    }
}

/* counts: room for a number per token. A token seen often is divided once; image placeholders lie above the vocabulary. */
static void repeat(const ae_slot *s, float *row, int64_t vocab, int64_t seen, int32_t *counts)
{
    const float factor = (float)s->repetition;
    memset(counts, 0, (size_t)vocab * 4);
    for (int64_t p = 0; p < seen; p++) {
        const int32_t token = s->history[p];
        if (token < vocab && !counts[token]++) row[token] = row[token] > 0.0f ? row[token] / factor : row[token] * factor;
    }
}

static void count_output(const ae_slot *s, float *row, int64_t vocab, int64_t seen, int32_t *counts)
{
    memset(counts, 0, (size_t)vocab * 4);
    for (int64_t p = s->prompt_tokens; p < seen; p++) counts[s->history[p]]++;
    for (int64_t p = s->prompt_tokens; p < seen; p++) {
        const int32_t token = s->history[p];
        if (!counts[token]) continue;
        row[token] = row[token] - (float)s->frequency * (float)counts[token] - (float)s->presence;
        counts[token] = 0;
    }
}

static void apply_mask(const uint32_t *mask, float *row, int64_t vocab)
{
    for (int64_t first = 0; first < vocab; first += 32) {
        const uint32_t word = mask[first / 32];
        if (word == UINT32_MAX) continue;
        for (int64_t i = 0; i < ae_min(32, vocab - first); i++)
            if (!(word >> i & 1)) row[first + i] = -INFINITY;
    }
}

/* `raw` with the rules applied -> row. */
static void apply_rules(const ae_slot *s, const float *raw, float *row, int64_t vocab, int64_t position, int32_t *counts)
{
    if (s->allowed_count < 0) {
        memcpy(row, raw, (size_t)vocab * 4);
    } else {
        for (int64_t i = 0; i < vocab; i++) row[i] = -INFINITY;
        for (int64_t i = 0; i < s->allowed_count; i++) row[s->allowed[i]] = raw[s->allowed[i]];
    }
    if (s->mask) apply_mask(s->mask, row, vocab);
    const int64_t seen = ae_min(position, s->history_count);
    for (int64_t i = 0; i < s->biased_count; i++) row[s->biased[i]] += s->bias[i];
    for (int64_t i = 0; i < s->bad_count; i++) row[s->bad[i]] = -INFINITY;
    if (s->history) mask_words(s, row, seen);
    for (int64_t i = 0; i < s->stops_count && position < s->stops_until; i++) row[s->stops[i]] = -INFINITY;
    if (s->history && s->repetition != 1.0) repeat(s, row, vocab, seen, counts);
    if (s->history && (s->frequency != 0.0 || s->presence != 0.0)) count_output(s, row, vocab, seen, counts);
}

#endif
