"""What top-k, top-p and min-p leave, against a reference that sorts the whole vocabulary.

Owns: thresholds of rows.
Does not know: sampling, slots.
Invariants: the reference handles ties the documented way (equal logits stay or go together).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aengine.runner import support
from aengine.runner.support import Cuts, thresholds


def cuts(*rows):
    """rows of (top_k, top_p, min_p)"""
    top_k, top_p, min_p = zip(*rows, strict=True)
    return Cuts(np.array(top_k, np.int64), np.array(top_p, float), np.array(min_p, float))


def kept(logits, *rows):
    logits = torch.as_tensor(logits, dtype=torch.float32)
    z = logits - logits.amax(-1, keepdim=True)
    mask = z >= thresholds(z, cuts(*rows)).unsqueeze(1)
    return [set(row.nonzero().squeeze(1).tolist()) for row in mask]


def reference(logits, top_k, top_p, min_p):
    """min-p, then top-k, then top-p of what is left, one token at a time."""
    logits = np.asarray(logits, dtype=np.float64)
    weight = np.exp(logits - logits.max())
    left = {i for i in range(len(logits)) if weight[i] >= min_p}
    if 0 < top_k < len(logits):
        at_least = sorted((logits[i] for i in left), reverse=True)[: min(top_k, len(left))][-1]
        left = {i for i in left if logits[i] >= at_least}
    if top_p < 1.0:
        total, seen, least = sum(weight[i] for i in left), 0.0, math.inf
        for i in sorted(left, key=lambda i: -logits[i]):
            if seen >= top_p * total:
                break
            seen, least = seen + weight[i], logits[i]
        left = {i for i in left if logits[i] >= least}
    return left


def random_rows(rows, vocab, seed=0, scale=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


KINDS = [
    (5, 1.0, 0.0),
    (1, 1.0, 0.0),
    (0, 0.9, 0.0),
    (0, 0.5, 0.0),
    (0, 1.0, 0.1),
    (20, 0.8, 0.0),
    (20, 0.8, 0.05),
    (300, 0.99, 1e-4),
    (0, 0.95, 1e-3),
    (0, 0.9999, 0.0),
    (10**9, 0.7, 0.0),
]


@pytest.mark.parametrize("scale", [0.3, 3.0])
@pytest.mark.parametrize("vocab", [17, 1023, 1024, 1025, 3000])
def test_supports_agree_with_the_reference(vocab, scale):
    logits = random_rows(len(KINDS), vocab, seed=vocab, scale=scale)
    assert kept(logits, *KINDS) == [reference(row, *kind) for row, kind in zip(logits.tolist(), KINDS, strict=True)]


def test_a_row_is_cut_alike_alone_and_in_a_batch():
    logits = random_rows(len(KINDS), 5000, scale=1.0)
    together = kept(logits, *KINDS)
    assert together == [kept(logits[i : i + 1], kind)[0] for i, kind in enumerate(KINDS)]


@pytest.mark.parametrize("first", [1, 2, 7, 64])
def test_the_number_of_candidates_does_not_show(monkeypatch, first):
    logits = random_rows(len(KINDS), 400)
    expected = kept(logits, *KINDS)
    monkeypatch.setattr(support, "FIRST_CANDIDATES", first)
    assert kept(logits, *KINDS) == expected


def test_equal_logits_stay_or_go_together():
    row = [5.0, 4.0, 4.0, 4.0, 1.0]
    assert kept([row], (2, 1.0, 0.0)) == [{0, 1, 2, 3}]
    assert kept([row], (0, 0.5, 0.0)) == [{0, 1, 2, 3}]
    assert kept([row], (1, 1.0, 0.0)) == [{0}]
    assert kept([[1.0] * 6], (3, 0.1, 0.9)) == [set(range(6))]


def test_equal_logits_beyond_the_first_candidates(monkeypatch):
    """40 twins at the cut, and only 8 values looked at first: the mass must count all of them."""
    monkeypatch.setattr(support, "FIRST_CANDIDATES", 8)
    row = [3.0] + [2.0] * 40 + [0.0] * 100
    for kind in ((4, 1.0, 0.0), (4, 0.6, 0.0), (4, 0.05, 0.0), (0, 0.3, 0.2)):
        assert kept([row], kind) == [reference(row, *kind)]


@pytest.mark.parametrize("kind", [(3, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.3), (3, 0.9, 0.3), (0, 1e-12, 0.0)])
def test_masked_tokens_never_come_back(kind):
    row = [-math.inf, 1.0, -math.inf, 0.5, -math.inf, -math.inf]
    assert kept([row], kind)[0] <= {1, 3}
    assert 1 in kept([row], kind)[0]


def test_fewer_tokens_left_than_top_k():
    row = [2.0, -math.inf, 1.0, -math.inf, -math.inf]
    mask = kept([row], (3, 0.99, 0.0))[0]
    assert {0, 2} <= mask
    assert all(row[i] > -math.inf for i in kept([row], (3, 0.99, 1e-9))[0])


@pytest.mark.parametrize("top_p", [1e-300, 1e-9, 0.001])
def test_a_tiny_top_p_keeps_the_best_token_only(top_p):
    assert kept(random_rows(1, 3000), (0, top_p, 0.0)) == [{int(random_rows(1, 3000).argmax())}]


def test_min_p_of_one_keeps_the_best_and_its_equals():
    assert kept([[1.0, 3.0, 3.0, 2.9999]], (0, 1.0, 1.0)) == [{1, 2}]


def test_a_vocabulary_of_one_token():
    for kind in KINDS:
        assert kept([[0.7]], kind) == [{0}]


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.integers(-40, 40).map(lambda i: i / 4), min_size=1, max_size=40),
    top_k=st.integers(-1, 50),
    top_p=st.sampled_from([1.0, 0.999, 0.97, 0.83, 0.41, 0.05]),
    min_p=st.sampled_from([0.0, 0.001, 0.07, 0.33]),
)
def test_any_row_with_many_ties(logits, top_k, top_p, min_p):
    assert kept([logits], (max(top_k, 0), top_p, min_p)) == [reference(logits, max(top_k, 0), top_p, min_p)]
