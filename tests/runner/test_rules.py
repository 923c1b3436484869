"""Masks, bias, bad words and penalties of one row.

Owns: SlotRules against formulas written out by hand.
Does not know: batches.
Invariants: rows are changed only where the rule says so.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from aengine.runner.rules import SlotRules
from aengine.types import SamplingParams, SlotSetup, TokenRules

VOCAB = 12
MASKED = -math.inf


def make(prompt=(1, 2, 3), output=(), rules=None, max_len=40, **sampling):
    params = SamplingParams(**sampling)
    known = np.array([*prompt, *output] if params.needs_history else [], dtype=np.int32)
    setup = SlotSetup(0, 0, len(prompt), params, rules or TokenRules(), 0, known)
    return SlotRules(setup, VOCAB, max_len, torch.device("cpu"))


def applied(rules, position, row=None):
    row = torch.arange(1.0, VOCAB + 1) if row is None else torch.tensor(row, dtype=torch.float32)
    rules.apply(row, position)
    return row.tolist()


PLAIN = [float(i) for i in range(1, VOCAB + 1)]


def with_(changes):
    return [changes.get(i, value) for i, value in enumerate(PLAIN)]


def test_allowed_ids_mask_all_others():
    row = applied(make(allowed_token_ids=(3, 3, 7, 99, -1)), 3)
    assert row == [PLAIN[i] if i in (3, 7) else MASKED for i in range(VOCAB)]


def test_allowed_ids_all_outside_the_vocabulary_mask_everything():
    assert applied(make(allowed_token_ids=(99,)), 3) == [MASKED] * VOCAB


def test_bias_is_added_and_outside_ids_are_ignored():
    assert applied(make(logit_bias={0: -100.0, 5: 2.5, 99: 1.0, -1: 1.0}), 3) == with_({0: -99.0, 5: 8.5})


def test_bias_does_not_bring_back_what_is_not_allowed():
    row = applied(make(logit_bias={0: 100.0}, allowed_token_ids=(1,)), 3)
    assert row == [PLAIN[1] if i == 1 else MASKED for i in range(VOCAB)]


@pytest.mark.parametrize(("position", "masked"), [(3, True), (4, True), (5, False), (6, False)])
def test_stop_tokens_are_masked_for_the_first_min_tokens_of_output(position, masked):
    """Prompt of 3: positions 3 and 4 are output tokens 0 and 1."""
    rules = make(rules=TokenRules(stop_ids=(2, 9, 99)), min_tokens=2)
    assert applied(rules, position) == (with_({2: MASKED, 9: MASKED}) if masked else PLAIN)


BAD = TokenRules(bad_words=((4,), (2, 3), (5, 6, 7), (3, 3, 3), (99,), (1, 99)))


@pytest.mark.parametrize(
    ("output", "masked"),
    [
        ((), {4}),
        ((2,), {4, 3}),
        ((5,), {4}),
        ((5, 6), {4, 7}),
        ((6, 5), {4}),
        ((3,), {4, 3}),  # the prompt's last token counts: 3 3 may not become 3 3 3
        ((1,), {4}),
    ],
)
def test_bad_words_mask_the_token_that_would_complete_them(output, masked):
    rules = make(output=output, rules=BAD, bad_words=("x",))
    assert applied(rules, 3 + len(output)) == with_(dict.fromkeys(masked, MASKED))


def test_a_bad_word_longer_than_the_history():
    rules = make(prompt=(6,), rules=TokenRules(bad_words=((5, 6, 7),)), bad_words=("x",))
    assert applied(rules, 1) == PLAIN


@pytest.mark.parametrize(("prompt", "seen"), [((VOCAB + 3, 2, VOCAB), (2,)), ((VOCAB + 3, VOCAB - 1), (VOCAB - 1,))])
def test_placeholders_of_images_are_no_tokens(prompt, seen):
    """They lie above the vocabulary, and its last token is not taken for them."""
    row = applied(make(prompt=prompt, repetition_penalty=2.0), len(prompt))
    assert row == with_({token: PLAIN[token] / 2 for token in seen})


def test_repetition_counts_prompt_and_output_and_moves_logits_towards_the_unlikely():
    rules = make(prompt=(1, 2, 1), output=(5,), repetition_penalty=2.0)
    row = [-3.0 if i in (2, 7) else 4.0 for i in range(VOCAB)]
    expected = [2.0 if i in (1, 5) else -6.0 if i == 2 else value for i, value in enumerate(row)]
    assert applied(rules, 4, row) == expected


def test_presence_and_frequency_count_the_output_only():
    rules = make(prompt=(1, 1, 2), output=(5, 6, 5, 2), presence_penalty=0.5, frequency_penalty=0.25)
    assert applied(rules, 7) == with_({5: 6.0 - 0.5 - 0.5, 6: 7.0 - 0.25 - 0.5, 2: 3.0 - 0.25 - 0.5})


def test_negative_penalties_encourage():
    assert applied(make(output=(5,), presence_penalty=-2.0), 4) == with_({5: 8.0})


def test_penalties_come_after_bias_and_in_order():
    rules = make(prompt=(1,), output=(3,), logit_bias={3: 6.0}, repetition_penalty=2.0, frequency_penalty=1.0)
    assert applied(rules, 2) == with_({1: 1.0, 3: (4.0 + 6.0) / 2.0 - 1.0})


def test_masked_tokens_stay_masked_under_penalties():
    rules = make(output=(4, 4), rules=BAD, repetition_penalty=0.5, presence_penalty=-2.0, bad_words=("x",))
    assert applied(rules, 5)[4] == MASKED


def test_tokens_sampled_later_join_the_history():
    rules = make(prompt=(1,), presence_penalty=1.0)
    rules.append(5, 1)
    assert applied(rules, 2) == with_({5: 5.0})
    rules.append(6, 2)
    assert applied(rules, 3) == with_({5: 5.0, 6: 6.0})
    assert applied(rules, 2) == with_({5: 5.0}), "a position sees only what stands before it"


def test_writing_beyond_the_context_is_harmless():
    rules = make(prompt=(1,), presence_penalty=1.0, max_len=4)
    for position in range(1, 9):
        rules.append(5, position)
    assert applied(rules, 4) == with_({5: 5.0})


def test_history_is_kept_only_where_it_is_needed():
    assert make(logit_bias={1: 1.0})._history is None
    assert make(presence_penalty=1.0)._history is not None
