"""Log-probabilities of chosen tokens and the best alternatives.

Owns: values, order, ranks, ties, edges.
Does not know: sampling.
Invariants: the reference is a log-softmax in fp64 and a full sort.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from aengine.runner.logprobs import join_logprobs, make_logprobs, on_device

LOGITS = torch.randn(6, 300, generator=torch.Generator().manual_seed(0)) * 4
CHOSEN = torch.tensor([0, 299, 5, 17, 100, int(LOGITS[5].argmax())])


@pytest.mark.parametrize("make", [make_logprobs, on_device])
@pytest.mark.parametrize("k", [0, 1, 5, 300])
def test_values_ids_and_ranks(make, k):
    made = make(LOGITS, CHOSEN, k)
    assert (made.ids.dtype, made.values.dtype, made.ranks.dtype) == (np.int32, np.float32, np.int32)
    assert made.ids.shape == made.values.shape == (6, k + 1)
    wide = LOGITS.double().log_softmax(-1).numpy()
    for i in range(6):
        order = np.argsort(-wide[i], kind="stable")
        assert made.ids[i].tolist() == [int(CHOSEN[i]), *order[:k].tolist()]
        np.testing.assert_allclose(made.values[i], wide[i][made.ids[i]], atol=1e-5)
        assert made.ranks[i] == order.tolist().index(int(CHOSEN[i])) + 1
    assert made.ranks[5] == 1


def test_more_alternatives_than_tokens():
    assert make_logprobs(LOGITS, CHOSEN, 1024).ids.shape == (6, 301)


def test_equal_values_stand_by_id_and_share_a_rank():
    made = make_logprobs(torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0]]), torch.tensor([4]), 2)
    assert made.ids.tolist() == [[4, 1, 2]]
    assert made.ranks.tolist() == [1]


def test_a_row_does_not_depend_on_its_neighbours():
    together = make_logprobs(LOGITS, CHOSEN, 5)
    for i in range(6):
        alone = make_logprobs(LOGITS[i : i + 1], CHOSEN[i : i + 1], 5)
        assert np.array_equal(alone.values[0], together.values[i])
        assert np.array_equal(alone.ids[0], together.ids[i])


def test_masked_logits_have_minus_infinity():
    made = make_logprobs(torch.tensor([[0.0, -math.inf, 0.0]]), torch.tensor([1]), 3)
    assert made.ids.tolist() == [[1, 0, 2, 1]]
    assert made.values[0].tolist() == pytest.approx([-math.inf, -math.log(2), -math.log(2), -math.inf])
    assert made.ranks.tolist() == [3]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_unsound_row_has_nan_and_does_not_touch_others(bad):
    logits = LOGITS.clone()
    logits[2, 7] = bad
    made = make_logprobs(logits, CHOSEN, 4)
    assert np.isnan(made.values[2]).all()
    clean = make_logprobs(LOGITS, CHOSEN, 4)
    others = [0, 1, 3, 4, 5]
    assert np.array_equal(made.values[others], clean.values[others])


def test_parts_are_joined_in_order():
    whole = make_logprobs(LOGITS, CHOSEN, 3)
    parts = [make_logprobs(LOGITS[i : i + 2], CHOSEN[i : i + 2], 3) for i in (0, 2, 4)]
    joined = join_logprobs(parts)
    assert np.array_equal(joined.ids, whole.ids)
    assert np.array_equal(joined.values, whole.values)
    assert np.array_equal(joined.ranks, whole.ranks)
    assert join_logprobs(parts[:1]) is parts[0]
