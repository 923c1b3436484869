"""Device sampling against the torch sampler: the same tokens, faults and log-probabilities for any mix of rows.

Owns: columns and rules of slots made from setups.
Does not know: how kernels sample.
Invariants: run by `test_interpreted.py`, in Triton's interpreter, or with a GPU directly.
"""

from __future__ import annotations

from itertools import zip_longest

import numpy as np
import pytest
import torch

from aengine.kernels.triton import sampling
from aengine.kernels.triton.launch import INTERPRETED
from aengine.runner.logprobs import make_logprobs
from aengine.runner.noise import TokenNoise, make_keys, seed_word
from aengine.runner.sampler import Sampler
from aengine.types import SlotSetup
from tests.runner.test_native_sampler import KNOWN, LENGTH, ROWS, random_logits, random_setup

ASKED = 6  # rows of a step
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def fault_of(message: str) -> int:
    after = 3 * ("after masks" in message)
    return after + (4 if "NaN" in message else 6 if "all tokens are masked" in message else 5)


def padded(rows: list[list[int]], fill: int) -> torch.Tensor:
    columns = list(zip_longest(*rows, fillvalue=fill)) or [(fill,) * len(rows)]
    return torch.tensor(columns).T.contiguous().int()


def parameters_of(setups: list[SlotSetup]) -> sampling.SlotParameters:
    params = [setup.sampling for setup in setups]
    seeds = np.array([seed_word(setup.seed) for setup in setups], dtype=np.uint64).view(np.int64)
    return sampling.SlotParameters(
        temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32).to(DEVICE),
        top_k=torch.tensor([max(p.top_k, 0) for p in params], dtype=torch.int32).to(DEVICE),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64).to(DEVICE),
        floor=torch.tensor([sampling.min_p_floor(p.min_p) for p in params], dtype=torch.float32).to(DEVICE),
        seed=torch.from_numpy(seeds).to(DEVICE),
    )


def allowed_bits(setups: list[SlotSetup], vocab: int) -> torch.Tensor:
    bits = np.zeros((len(setups), -(-vocab // 32) * 32), dtype=bool)
    for row, setup in enumerate(setups):
        ids = setup.sampling.allowed_token_ids
        bits[row, : vocab if ids is None else 0] = True
        bits[row, [i for i in ids or () if 0 <= i < vocab]] = True
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32)).to(DEVICE)


def rules_of(setups: list[SlotSetup], vocab: int) -> sampling.SlotRules:
    biased = [sorted(i for i in setup.sampling.logit_bias or {} if 0 <= i < vocab) for setup in setups]
    bias = torch.zeros(len(setups), max(1, *map(len, biased)))
    banned: list[list[tuple[tuple[int, ...], int]]] = []
    for row, setup in enumerate(setups):
        for column, token in enumerate(biased[row]):
            bias[row, column] = (setup.sampling.logit_bias or {})[token]
        until = setup.prompt_tokens + setup.sampling.min_tokens
        words = [(word, sampling.FOREVER) for word in setup.rules.bad_words if max(word) < vocab]
        banned.append(words + [((token,), until) for token in setup.rules.stop_ids])
    length = max(len(word) for row in banned for word, _ in row)
    flat = [[token for word, _ in row for token in (-1,) * (length - len(word)) + word] for row in banned]
    words = padded(flat, -1)
    history = torch.zeros(len(setups), LENGTH + 1, dtype=torch.int32)
    for row, setup in enumerate(setups):
        history[row, : len(setup.history_ids)] = torch.from_numpy(setup.history_ids)
    penalties = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in (s.sampling for s in setups)]
    return sampling.SlotRules(
        allowed=allowed_bits(setups, vocab),
        bias_ids=padded(biased, -1).to(DEVICE),
        bias=bias.to(DEVICE),
        banned=words.view(len(setups), -1, length).to(DEVICE),
        until=padded([[until for _, until in row] for row in banned], 0).to(DEVICE),
        penalties=torch.tensor(penalties).to(DEVICE),
        history=history.to(DEVICE),
        prompt_tokens=torch.tensor([setup.prompt_tokens for setup in setups], dtype=torch.int32).to(DEVICE),
    )


@pytest.mark.parametrize(("vocab", "trials"), [(5, 2), (97, 2), (5000, 1)])
def test_tokens_faults_and_logprobs_equal_the_torch_samplers(vocab: int, trials: int) -> None:
    rng = np.random.default_rng(vocab)
    for _ in range(trials):
        theirs = Sampler(ROWS, vocab, LENGTH, torch.device("cpu"))
        setups = [random_setup(rng, slot, vocab) for slot in range(ROWS)]
        for setup in setups:
            theirs.setup(setup)
        parameters, rules = parameters_of(setups), rules_of(setups, vocab)
        for position in range(KNOWN, KNOWN + 2):
            slots = rng.permutation(ROWS)[:ASKED].astype(np.int32)
            positions, logits = np.full(ASKED, position), random_logits(rng, vocab)[:ASKED]
            want = theirs.sample(logits.clone(), slots, positions)
            faults = torch.full((ASKED,), -1, dtype=torch.int32, device=DEVICE)
            at = torch.from_numpy(slots).to(DEVICE), torch.from_numpy(positions).to(DEVICE)
            given = logits.to(DEVICE)
            got = sampling.sample(given, *at, parameters, rules, faults)
            assert torch.equal(given.cpu().nan_to_num(7.0), logits.nan_to_num(7.0)), "the logits were changed"
            assert got.cpu().tolist() == want.tokens.tolist()
            assert {row: fault for row, fault in enumerate(faults.tolist()) if fault} == {
                row: fault_of(message) for row, message in want.failed.items()
            }
            sampling.remember(rules.history, *at, got)
            for row, expected in want.logprobs.items():
                one = slice(row, row + 1)
                made = sampling.logprobs(given[one], got[one], int(setups[slots[row]].sampling.logprobs or 0))
                assert np.array_equal(made.ids.cpu().numpy(), expected.ids)
                assert np.array_equal(made.ranks.cpu().numpy(), expected.ranks)
                assert np.allclose(made.values.cpu().numpy(), expected.values, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("vocab", [1, 33, 3000])
def test_plain_draws_follow_the_noise(vocab: int) -> None:
    """Every row alone draws what it draws among others; bf16 logits count as they are."""
    rows = 16
    logits = (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 3).bfloat16()
    logits[:, vocab // 2 + 1 :: 5] = float("-inf")
    seeds, positions = np.arange(rows, dtype=np.uint64) * np.uint64(2**60 + 7), np.arange(rows) * 2**30
    parameters = sampling.slot_parameters(rows, DEVICE)
    parameters.temperature.fill_(0.7)
    parameters.seed.copy_(torch.from_numpy(seeds.view(np.int64)))
    slots, at = torch.arange(rows, dtype=torch.int32, device=DEVICE), torch.from_numpy(positions).to(DEVICE)
    wide = logits.to(DEVICE)
    got = sampling.sample(wide, slots, at, parameters).tolist()
    keys, noise, best = make_keys(seeds, positions), TokenNoise(vocab, torch.device("cpu")), logits.float().argmax(1)
    for row in range(rows):
        assert got[row] == noise.choose(logits[row].float(), int(best[row]), 0.7, keys.k0[row], keys.k1[row])
    one = slice(5, 6)
    assert sampling.sample(wide[one], slots[one], at[one], parameters).tolist() == got[one]


def test_unsound_rows_have_no_logprobs_and_ties_stand_by_id() -> None:
    logits = torch.zeros(3, 70)
    logits[1, 9], logits[2, 3] = float("nan"), 4.0
    chosen = torch.tensor([5, 4, 3], device=DEVICE)
    made = sampling.logprobs(logits.to(DEVICE), chosen, 100)
    assert made.ids.shape == (3, 71)
    assert made.values[1].isnan().all()
    want = make_logprobs(logits[[0, 2]], torch.tensor([5, 3]), 70)
    assert np.array_equal(made.ids[[0, 2]].cpu().numpy(), want.ids)
    assert np.array_equal(made.ranks[[0, 2]].cpu().numpy(), want.ranks)


def test_words_of_several_tokens_and_penalties_need_a_history() -> None:
    zero = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    words = torch.zeros(1, 1, 2, dtype=torch.int32, device=DEVICE)
    for rules in (
        sampling.SlotRules(banned=words, until=words[:, :, 0]),
        sampling.SlotRules(penalties=torch.ones(1, 3, device=DEVICE)),
    ):
        with pytest.raises(ValueError, match="need the history"):
            sampling.sample(torch.zeros(1, 4, device=DEVICE), zero, zero, sampling.slot_parameters(1, DEVICE), rules)
