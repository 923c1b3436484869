"""The native sampler against the torch sampler: the same tokens, failures and log-probabilities for any mix of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from aengine.config import usable_home
from aengine.kernels.native import NativeOps, Unavailable, load_native_ops
from aengine.runner.masks import Masks
from aengine.runner.native_sampler import NativeSampler
from aengine.runner.sampler import Sampler
from aengine.types import SamplingParams, SlotSetup, TokenRules

ROWS, LENGTH, PROMPT, KNOWN = 12, 64, 6, 9


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    made = load_native_ops(usable_home() / "native", threads=2)
    assert not isinstance(made, Unavailable), made.reason
    return made


def random_params(rng: np.random.Generator, vocab: int) -> dict[str, Any]:
    """Each parameter on in a third of the rows."""
    choices: dict[str, Any] = {
        "top_k": rng.choice([1, 3, 40, 1023, 1024, 5000, vocab, vocab + 5]),
        "top_p": rng.choice([0.1, 0.5, 0.9, 0.95, 0.999]),
        "min_p": rng.choice([0.01, 0.1, 0.5, 1.0]),
        "repetition_penalty": rng.choice([0.5, 1.3]),
        "frequency_penalty": rng.choice([-0.5, 0.7]),
        "presence_penalty": rng.choice([-0.5, 0.3]),
        "logprobs": rng.choice([0, 1, 5, 20]),
        "min_tokens": 5,
    }
    on = {name: value.item() if hasattr(value, "item") else value for name, value in choices.items()}
    on["logit_bias"] = {int(token): float(rng.normal() * 3) for token in rng.integers(0, vocab + 3, 5)}
    on["allowed_token_ids"] = tuple(rng.integers(0, vocab + 2, int(rng.choice([1, 7, 50]))).tolist())
    on["bad_words"] = ("x", "y")
    kept = {name: value for name, value in on.items() if rng.random() < 0.33}
    return kept | {"temperature": float(rng.choice([0.0, 0.3, 1.0, 2.0, 50.0])), "max_tokens": 50}


def random_setup(rng: np.random.Generator, slot: int, vocab: int) -> SlotSetup:
    params = SamplingParams(**random_params(rng, vocab))
    history = rng.integers(0, vocab + 2 * (rng.random() < 0.1), KNOWN).astype(np.int32)  # placeholders among the prompt
    history[PROMPT:] %= vocab
    last, other = int(history[-1]), int(history[-2])
    words = ((last, int(rng.integers(vocab))), (int(rng.integers(vocab)),), (other, last, int(rng.integers(vocab))))
    rules = TokenRules(
        stop_ids=tuple(rng.integers(0, vocab + 2, 3).tolist()), bad_words=words if params.bad_words else ()
    )
    known = history if params.needs_history else np.zeros(0, np.int32)
    return SlotSetup(slot, slot, PROMPT, params, rules, int(rng.integers(-(2**62), 2**62)), known)


def random_logits(rng: np.random.Generator, vocab: int) -> torch.Tensor:
    logits = torch.from_numpy(rng.normal(size=(ROWS, vocab)).astype(np.float32)) * float(rng.choice([0.01, 1.0, 4.0]))
    if rng.random() < 0.3:
        logits = (logits * 2).round()  # ties
    if rng.random() < 0.3:
        logits[0, rng.integers(vocab)] = float(rng.choice([np.nan, np.inf]))
        logits[1] = -np.inf
    return logits


def random_masks(rng: np.random.Generator, vocab: int) -> Masks:
    """Of a third of the rows; whole words of ones and zeros, single bits, and bits above the vocabulary."""
    rows = np.flatnonzero(rng.random(ROWS) < 0.33)
    bits = rng.integers(-(2**31), 2**31, (len(rows), -(-vocab // 32)), np.int32)
    bits[rng.random(bits.shape) < 0.3] = -1
    bits[rng.random(bits.shape) < 0.3] = 0
    return Masks(rows, bits)


@pytest.mark.parametrize(("vocab", "trials"), [(5, 15), (17, 15), (97, 15), (1500, 8), (20000, 3)])
def test_tokens_failures_and_logprobs_equal_the_torch_samplers(ops: NativeOps, vocab: int, trials: int) -> None:
    rng = np.random.default_rng(vocab)
    for _ in range(trials):
        theirs, mine = (
            Sampler(ROWS, vocab, LENGTH, torch.device("cpu")),
            NativeSampler(ops.context, ROWS, vocab, LENGTH),
        )
        for slot in range(ROWS):
            setup = random_setup(rng, slot, vocab)
            theirs.setup(setup)
            mine.setup(setup)
        for position in range(KNOWN, KNOWN + 4):
            slots = rng.permutation(ROWS).astype(np.int32)
            positions, logits = np.full(ROWS, position), random_logits(rng, vocab)
            given = logits.clone()
            masks = random_masks(rng, vocab) if position % 2 else None
            got = mine.sample(given, slots, positions, masks)
            want = theirs.sample(logits.clone(), slots, positions, masks)
            assert np.array_equal(given.numpy(), logits.numpy(), equal_nan=True), "the logits were changed"
            assert got.failed == want.failed
            assert np.array_equal(got.tokens, want.tokens)
            for row, bits in [] if masks is None else zip(masks.rows.tolist(), masks.bits, strict=True):
                token = int(got.tokens[row])
                assert row in got.failed or bits[token // 32] >> (token % 32) & 1
            assert got.logprobs.keys() == want.logprobs.keys()
            for row, expected in want.logprobs.items():
                assert np.array_equal(got.logprobs[row].ids, expected.ids)
                assert np.array_equal(got.logprobs[row].ranks, expected.ranks)
                assert np.allclose(got.logprobs[row].values, expected.values, rtol=1e-6, atol=1e-5)


def test_a_slot_keeps_nothing_of_its_former_request(ops: NativeOps) -> None:
    sampler = NativeSampler(ops.context, 1, 50, LENGTH)
    params = SamplingParams(temperature=0.0, allowed_token_ids=(3,), repetition_penalty=2.0, logprobs=4, min_tokens=9)
    rules = TokenRules(stop_ids=(4,))
    sampler.setup(SlotSetup(0, 0, 4, params, rules, 1, np.arange(4, dtype=np.int32)))
    logits = torch.randn(1, 50)
    first = sampler.sample(logits, np.zeros(1, np.int32), np.array([4]))
    assert first.tokens.tolist() == [3]
    assert first.logprobs[0].ids.shape == (1, 5)
    sampler.setup(SlotSetup(0, 1, 4, SamplingParams(temperature=0.0), TokenRules(), 1, np.zeros(0, np.int32)))
    second = sampler.sample(logits, np.zeros(1, np.int32), np.array([4]))
    assert second.tokens.tolist() == [int(logits.argmax())]
    assert not second.logprobs


def test_positions_of_one_slot_do_not_see_what_the_others_draw(ops: NativeOps) -> None:
    """Drafts: three positions of a slot with a penalty, sampled together as one by one from the same history."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    setup = SlotSetup(
        0, 0, 4, SamplingParams(temperature=0.0, presence_penalty=2.0), TokenRules(), 1, np.arange(4, dtype=np.int32)
    )
    theirs, mine = Sampler(1, 50, LENGTH, torch.device("cpu")), NativeSampler(ops.context, 1, 50, LENGTH)
    theirs.setup(setup)
    mine.setup(setup)
    for _ in range(2):  # the second time over a written history
        at = np.zeros(3, np.int32), np.arange(4, 7)
        assert mine.sample(logits, *at).tokens.tolist() == theirs.sample(logits.clone(), *at).tokens.tolist()
