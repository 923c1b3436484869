"""The sampler: paths, order of operations, determinism, distributions, failures.

Owns: whole batches of rows with different parameters.
Does not know: models.
Invariants: seeds are fixed, so statistical verdicts do not vary between runs; their limit is 5 standard deviations.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from aengine.errors import InvalidRequest
from aengine.runner.sampler import Sampler
from aengine.types import SamplingParams, SlotSetup, TokenRules

CPU = torch.device("cpu")


def make_sampler(*rows, vocab, rules=None, prompt=4, seeds=None, history=()):
    sampler = Sampler(len(rows), vocab, 64, CPU)
    for slot, sampling in enumerate(rows):
        params = SamplingParams(**sampling)
        known = np.array(history or range(prompt), np.int32) if params.needs_history else np.zeros(0, np.int32)
        seed = seeds[slot] if seeds else slot
        sampler.setup(SlotSetup(slot, slot, prompt, params, rules or TokenRules(), seed, known))
    return sampler


def sample(sampler, logits, slots=None, positions=None):
    logits = torch.as_tensor(logits, dtype=torch.float32).clone()
    slots = np.arange(len(logits), dtype=np.int32) if slots is None else np.array(slots, np.int32)
    positions = np.full(len(logits), 4) if positions is None else np.array(positions)
    return sampler.sample(logits, slots, positions)


def random_rows(rows, vocab, seed=0, scale=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


# ---- greedy


def test_greedy_takes_the_best_and_of_equals_the_lowest_id():
    sampler = make_sampler(*[{"temperature": 0.0}] * 4, vocab=4)
    rows = [[0.0, 2.0, 2.0, 1.0], [-0.0, 0.0, -1.0, 0.0], [0.0, -0.0, 0.0, -1.0], [-5.0, -5.0, -5.0, -5.0]]
    assert sample(sampler, rows).tokens.tolist() == [1, 0, 0, 0]


def test_plain_greedy_rows_cost_one_argmax(monkeypatch):
    """No copy of the logits, no sort, no noise, no exponential."""
    sampler = make_sampler(*[{"temperature": 0.0}] * 3, vocab=50)
    for name in ("_draw_plain", "_draw_filtered", "_logprobs"):
        monkeypatch.setattr(sampler, name, None)
    monkeypatch.setattr("aengine.runner.sampler._take", None)
    rows = random_rows(3, 50)
    assert sample(sampler, rows).tokens.tolist() == rows.argmax(-1).tolist()


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0, "top_p": 0.1, "top_k": 3},
        {"temperature": 1e-6},
        {"temperature": 1e-300},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 100.0, "top_k": 1},
        {"temperature": 5.0, "top_p": 1e-9},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 1e-300, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    ],
)
def test_parameters_that_leave_only_the_best_token(sampling):
    sampler = make_sampler(*[sampling] * 16, vocab=200)
    rows = random_rows(16, 200)
    assert sample(sampler, rows).tokens.tolist() == rows.argmax(-1).tolist()


def test_a_tiny_temperature_still_draws_among_equals():
    sampler = make_sampler({"temperature": 1e-30}, vocab=4)
    drawn = {int(sample(sampler, [[1.0, 3.0, 3.0, 2.0]], positions=[p]).tokens[0]) for p in range(60)}
    assert drawn == {1, 2}


# ---- distribution


def chi_square(counts, expected):
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    freedom = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


LOGITS = [2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5]


@pytest.mark.parametrize(
    ("sampling", "support"),
    [
        ({"temperature": 1.0}, 8),
        ({"temperature": 2.0}, 8),
        ({"temperature": 0.6}, 8),
        ({"temperature": 1.0, "top_k": 3}, 3),
        ({"temperature": 1.0, "top_p": 0.8}, 4),  # 0.39 0.63 0.77 0.86
        ({"temperature": 1.0, "min_p": 0.2}, 4),  # 1 0.61 0.37 0.22 0.14
        ({"temperature": 3.0, "top_k": 6, "top_p": 0.75, "min_p": 0.1}, 4),
    ],
)
@pytest.mark.parametrize("axis", ["positions", "seeds"])
def test_tokens_are_drawn_in_proportion(sampling, support, axis):
    n, size = 3000, 500
    by_seed = axis == "seeds"
    counts = np.zeros(8)
    for first in range(0, n, size):
        seeds = list(range(first, first + size)) if by_seed else [77] * size
        sampler = make_sampler(*[sampling] * size, vocab=8, seeds=seeds)
        positions = [9] * size if by_seed else range(first, first + size)
        drawn = sample(sampler, [LOGITS] * size, positions=list(positions)).tokens
        counts += np.bincount(drawn, minlength=8)
    assert (counts[support:] == 0).all()
    expected = (torch.tensor(LOGITS[:support], dtype=torch.float64) / sampling["temperature"]).softmax(-1) * n
    assert abs(chi_square(counts[:support], expected.numpy())) < 5


def test_a_large_flat_vocabulary_is_drawn_evenly():
    sampler = make_sampler(*[{"temperature": 1.0}] * 200, vocab=8192)
    drawn = np.concatenate([sample(sampler, torch.zeros(200, 8192), positions=[p] * 200).tokens for p in range(10)])
    counts, _ = np.histogram(drawn, bins=32, range=(0, 8192))
    assert abs(chi_square(counts, np.full(32, len(drawn) / 32))) < 5


# ---- seeds and batches


@pytest.mark.parametrize("seed", [0, -1, 1, 2**63, 2**64 - 1, -(2**63)])
def test_any_seed_works_and_repeats_itself(seed):
    rows = random_rows(20, 300)
    runs = [
        sample(make_sampler(*[{}] * 20, vocab=300, seeds=[seed] * 20), rows, positions=range(20)).tokens.tolist()
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    other = sample(make_sampler(*[{}] * 20, vocab=300, seeds=[12345] * 20), rows, positions=range(20))
    assert other.tokens.tolist() != runs[0]


KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "logprobs": 0},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 3},
    {"temperature": 1.5, "min_p": 0.02},
    {"temperature": 1.0, "top_k": 2000, "top_p": 0.99, "min_p": 1e-5, "logprobs": 7},
    {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "logprobs": 3},
    {"temperature": 0.0, "logit_bias": {3: 5.0}},
    {"temperature": 1.0, "allowed_token_ids": (5, 6, 7), "logprobs": 3},
]


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_in_any_batch_and_order_are_the_same_bit_for_bit(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows = random_rows(len(KINDS), 20_000, scale=2.0)
        seeds = [(-1) ** i * 2**i for i in range(len(KINDS))]
        positions = [4 + 3 * i for i in range(len(KINDS))]

        def run(order):
            sampler = make_sampler(*KINDS, vocab=20_000, seeds=seeds, history=range(40))
            made = sample(sampler, rows[order], order, [positions[i] for i in order])
            return {slot: (int(made.tokens[i]), made.logprobs.get(i)) for i, slot in enumerate(order)}

        together = run(list(range(len(KINDS))))
        backwards = run(list(range(len(KINDS)))[::-1])
        alone = {slot: run([slot])[slot] for slot in range(len(KINDS))}
    finally:
        torch.set_num_threads(before)
    for slot in range(len(KINDS)):
        for other in (backwards, alone):
            assert other[slot][0] == together[slot][0]
            mine, theirs = together[slot][1], other[slot][1]
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert np.array_equal(mine.values, theirs.values)
                assert np.array_equal(mine.ids, theirs.ids)
                assert np.array_equal(mine.ranks, theirs.ranks)


def test_filters_that_are_off_leave_the_choice_as_it_is():
    """The two paths, whole row and ragged support, draw the same token from the same noise."""
    rows = random_rows(50, 500)
    plain = sample(make_sampler(*[{"temperature": 0.9}] * 50, vocab=500), rows).tokens
    for filters in ({"top_k": 499}, {"top_p": 1 - 1e-7}, {"min_p": 1e-30}):
        filtered = sample(make_sampler(*[{"temperature": 0.9, **filters}] * 50, vocab=500), rows).tokens
        assert filtered.tolist() == plain.tolist()


@pytest.mark.parametrize("top_k", [-1, 0, 500, 501, 2**31 - 1])
def test_top_k_that_keeps_everything_is_off(top_k):
    rows = random_rows(20, 500)
    sampler = make_sampler(*[{"temperature": 0.9, "top_k": top_k}] * 20, vocab=500)
    assert not sampler.slots.filtered.any()
    plain = make_sampler(*[{"temperature": 0.9}] * 20, vocab=500)
    assert sample(sampler, rows).tokens.tolist() == sample(plain, rows).tokens.tolist()


def test_several_positions_of_one_slot_are_like_several_steps():
    rows = random_rows(6, 300)
    sampler = make_sampler({"temperature": 1.0, "top_p": 0.95}, vocab=300)
    together = sample(sampler, rows, [0] * 6, range(10, 16)).tokens.tolist()
    single = [int(sample(sampler, rows[i : i + 1], [0], [10 + i]).tokens[0]) for i in range(6)]
    assert together == single


def test_a_slot_that_is_set_up_again_forgets_the_former_request():
    sampler = make_sampler({"temperature": 5.0, "top_k": 3, "logprobs": 2, "presence_penalty": 2.0}, vocab=30)
    sampler.setup(SlotSetup(0, 1, 4, SamplingParams(temperature=0.0), TokenRules(), 0, np.zeros(0, np.int32)))
    rows = random_rows(1, 30)
    made = sample(sampler, rows)
    assert made.tokens.tolist() == rows.argmax(-1).tolist()
    assert made.logprobs == {}


# ---- order of operations


def test_masks_bias_and_penalties_act_before_temperature_and_filters():
    """Bias makes token 2 the best; top_k 1 must then take it, at any temperature."""
    sampler = make_sampler({"temperature": 9.0, "top_k": 1, "logit_bias": {2: 10.0}}, vocab=4)
    assert sample(sampler, [[3.0, 2.0, 1.0, 0.0]]).tokens.tolist() == [2]


def test_temperature_acts_before_min_p():
    """exp(-3) is below min_p 0.1, exp(-3 / 2) = 0.22 is not: at temperature 2 token 1 is in, at 1 it is out."""
    for temperature, support in ((1.0, {0}), (2.0, {0, 1})):
        sampler = make_sampler({"temperature": temperature, "min_p": 0.1}, vocab=2)
        drawn = {int(sample(sampler, [[3.0, 0.0]], positions=[p]).tokens[0]) for p in range(80)}
        assert drawn == support


def test_logprobs_are_taken_before_everything_else():
    sampler = make_sampler(
        {"temperature": 4.0, "allowed_token_ids": (3,), "logit_bias": {3: 50.0}, "logprobs": 2}, vocab=4
    )
    row = torch.tensor([3.0, 2.0, 1.0, 0.0])
    made = sample(sampler, row.unsqueeze(0))
    assert made.tokens.tolist() == [3]
    assert made.logprobs[0].ids.tolist() == [[3, 0, 1]]
    np.testing.assert_allclose(made.logprobs[0].values[0], row.log_softmax(-1)[[3, 0, 1]], atol=1e-6)
    assert made.logprobs[0].ranks.tolist() == [4]


def test_min_tokens_keeps_a_request_from_stopping():
    sampler = make_sampler({"temperature": 0.0, "min_tokens": 2}, vocab=4, rules=TokenRules(stop_ids=(0,)))
    row = [[9.0, 1.0, 2.0, 0.0]]
    assert [int(sample(sampler, row, positions=[p]).tokens[0]) for p in (4, 5, 6)] == [2, 2, 0]


def test_min_tokens_with_temperature_never_draws_a_stop_token_too_early():
    sampler = make_sampler(*[{"min_tokens": 3}] * 200, vocab=4, rules=TokenRules(stop_ids=(0,)))
    drawn = sample(sampler, [[9.0, 1.0, 2.0, 0.0]] * 200, positions=[6] * 200).tokens
    assert set(drawn.tolist()) <= {1, 2, 3}


def test_sampled_tokens_are_penalised_from_then_on():
    sampler = make_sampler({"temperature": 0.0, "frequency_penalty": 1.0}, vocab=3)
    row = [[2.0, 1.5, -9.0]]
    tokens = [int(sample(sampler, row, positions=[p]).tokens[0]) for p in range(4, 10)]
    assert tokens == [0, 1, 0, 1, 0, 1]


def test_a_bad_word_begun_by_a_sampled_token_is_not_completed():
    sampler = make_sampler(
        {"temperature": 0.0, "bad_words": ("x",)}, vocab=6, rules=TokenRules(bad_words=((4, 4),)), history=(0, 1, 2, 3)
    )
    row = [[0.0, 0.0, 0.0, 0.0, 5.0, 4.0]]
    assert [int(sample(sampler, row, positions=[p]).tokens[0]) for p in range(4, 8)] == [4, 5, 4, 5]


# ---- failures


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"presence_penalty": 1.0, "logprobs": 1}]
)
def test_unsound_rows_fail_alone(sampling):
    rows = random_rows(6, 40)
    clean = sample(make_sampler(*[sampling] * 6, vocab=40), rows)
    bad = rows.clone()
    bad[1, 7] = math.nan
    bad[2, 0] = math.inf
    bad[4] = -math.inf
    made = sample(make_sampler(*[sampling] * 6, vocab=40), bad)
    assert sorted(made.failed) == [1, 2, 4]
    assert made.failed[1] == "the model's logits hold NaN"
    assert made.failed[2] == "the model's logits hold infinity"
    assert made.failed[4].startswith("all tokens are masked")
    assert made.tokens[[1, 2, 4]].tolist() == [0, 0, 0]
    assert made.tokens[[0, 3, 5]].tolist() == clean.tokens[[0, 3, 5]].tolist()
    assert not set(made.logprobs) & {1, 2, 4}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_all_tokens_masked_fails_alone(temperature):
    sampler = make_sampler(
        {"temperature": temperature, "allowed_token_ids": (77,)},
        {"temperature": temperature, "allowed_token_ids": (2,), "top_k": 3},
        vocab=5,
    )
    made = sample(sampler, random_rows(2, 5))
    assert list(made.failed) == [0]
    assert "after masks and penalties" in made.failed[0]
    assert made.tokens.tolist() == [0, 2]


def test_an_overflowing_penalty_fails_its_row_with_a_message():
    sampler = make_sampler({"temperature": 1.0, "repetition_penalty": 1e-39}, {}, vocab=8)
    made = sample(sampler, torch.full((2, 8), 5.0))
    assert made.failed == {0: "the logits after masks and penalties hold infinity"}


def test_logits_with_some_minus_infinity_are_sound():
    sampler = make_sampler({"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 3}, vocab=4)
    made = sample(sampler, [[-math.inf, 1.0, -math.inf, -math.inf]] * 4)
    assert made.failed == {}
    assert made.tokens.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("sampling", KINDS)
def test_a_vocabulary_of_one_token(sampling):
    sampling = {k: v for k, v in sampling.items() if k != "allowed_token_ids"}
    made = sample(make_sampler(sampling, vocab=1, history=(0,)), [[0.3]], positions=[1])
    assert (made.tokens.tolist(), made.failed) == ([0], {})


def test_no_rows():
    made = sample(make_sampler({}, vocab=5), torch.zeros(0, 5))
    assert (made.tokens.tolist(), made.logprobs, made.failed) == ([], {}, {})


def test_the_params_themselves_refuse_nan():
    """What the sampler may rely on."""
    with pytest.raises(InvalidRequest, match="temperature is nan"):
        SamplingParams(temperature=math.nan)
