"""Greedy tokens equal transformers' own, and nothing the engine does about them changes one.

transformers' answers lie in tests/golden. The first tests hold the engine at its default settings against them, token
by token and log-probability by log-probability, and some of them against transformers itself. The others run the engine
in other ways and hold it against the same tokens: greedy and seeded ones in one batch.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec
import pytest
import torch

from aengine import AsyncEngine, RequestOutput, SamplingParams
from tests.e2e.conftest import Reference, config, last, run_all
from tests.e2e.prompts import PROMPTS
from tests.golden import TOKENS, Answer, smollm2

pytestmark = pytest.mark.usefixtures("shared_weights")

TIE = 1e-4  # a divergence counts as equal only where the reference's own best two logits are closer than this
ALL = slice(None)
HALVES = (slice(0, 16), slice(16, 32))  # what one setting alone is tried with; all 32 where two settings meet
LONG = 32  # greedy tokens where the engine runs in other ways: each row begins two pages
SHORT = 24  # tokens of seeded runs and of the live check
SEEDED = [
    SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=1000 + i, max_tokens=SHORT, ignore_eos=True)
    for i in range(len(PROMPTS))
]


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@dataclass(frozen=True)
class Golden:
    """transformers' answers, and what the engine said at the default settings."""

    answers: list[Answer]
    greedy: list[RequestOutput]
    seeded: list[list[int]]


@pytest.fixture(scope="module")
def golden(shared_weights: None) -> Golden:
    async def run() -> Golden:
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=2)
        async with AsyncEngine(config(threads=None)) as engine:
            greedy = await run_all(engine, PROMPTS, params)
            return Golden(smollm2(), greedy, ids(await run_all(engine, PROMPTS, SEEDED)))

    return asyncio.run(run())


def assert_same(got: list[list[int]], want: list[Answer]) -> None:
    """As many of the reference's tokens as `got` has, up to its first tie."""
    for i, (tokens, answer) in enumerate(zip(got, want, strict=True)):
        for at, (token, best, gap) in enumerate(zip(tokens, answer.tokens, answer.gaps, strict=False)):
            if token != best:
                assert gap < TIE, f"prompt {i}, token {at}: {token} is not {best} (the reference's gap is {gap:.2e})"
                print(f"prompt {i}: tie at token {at}, gap {gap:.2e}")
                break


def test_greedy_tokens_and_logprobs_equal_transformers(golden: Golden) -> None:
    assert [output.prompt_token_ids for output in golden.greedy] == [answer.prompt_ids for answer in golden.answers]
    assert [len(tokens) for tokens in ids(golden.greedy)] == [TOKENS] * len(PROMPTS)
    assert_same(ids(golden.greedy), golden.answers)
    worst = 0.0
    for output, answer in zip(golden.greedy, golden.answers, strict=True):
        for token, told, want in zip(answer.tokens, output.outputs[0].logprobs or [], answer.logprobs, strict=True):
            if told.token_id != token:
                break  # behind a tie
            worst = max(worst, abs(told.logprob - want))
            assert told.rank == 1
            assert len(told.top) == 2
    assert worst < 1e-4, f"log-probabilities differ by {worst:.2e}"
    print(f"largest difference of log-probabilities: {worst:.2e}")


def test_the_golden_answers_are_transformers_own(golden: Golden, reference: Reference) -> None:
    """Some of them again, live: one by generate itself, one with log-probabilities and gaps."""
    prompt = torch.tensor([golden.answers[2].prompt_ids])
    out = reference.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=SHORT,
        min_new_tokens=SHORT,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert_same([out[0, prompt.shape[1] :].tolist()], golden.answers[2:3])
    answer = golden.answers[25]
    logits = reference.logits(answer.prompt_ids + answer.tokens[:-1])[len(answer.prompt_ids) - 1 :]
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1] - torch.tensor(answer.gaps)).abs().max() < 1e-3
    told = torch.log_softmax(logits, -1)[torch.arange(TOKENS), answer.tokens]
    assert (told - torch.tensor(answer.logprobs)).abs().max() < 1e-4


async def _check(engine: AsyncEngine, golden: Golden, *, odd: int = 0, of: slice = ALL, tokens: int = LONG) -> None:
    """Prompts at once, greedy and seeded ones by turns in one batch: another company than the golden run's."""
    long = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    params = [long if i % 2 == odd else SEEDED[i] for i in range(len(PROMPTS))]
    got = ids(await run_all(engine, PROMPTS[of], params[of]))
    greedy, seeded = slice(odd, None, 2), slice(1 - odd, None, 2)
    assert [len(each) for each in got[greedy]] == [tokens] * (len(got) // 2)
    assert_same(got[greedy], golden.answers[of][greedy])
    assert got[seeded] == golden.seeded[of][seeded]


@pytest.mark.parametrize("depth", [0, 2])
async def test_depth(golden: Golden, depth: int) -> None:
    async with AsyncEngine(config(depth=depth)) as engine:
        await _check(engine, golden, odd=1, of=HALVES[depth == 2])


@pytest.mark.parametrize("budget", [16, 64])
async def test_budget(golden: Golden, budget: int) -> None:
    async with AsyncEngine(config(max_batched_tokens=budget)) as engine:
        await _check(engine, golden, odd=1, of=HALVES[budget == 16])


async def test_depth_0_and_a_budget_of_16(golden: Golden) -> None:
    async with AsyncEngine(config(depth=0, max_batched_tokens=16)) as engine:
        await _check(engine, golden)
        assert engine.stats().steps_overlapped == 0


async def test_depth_2_and_a_budget_of_64(golden: Golden) -> None:
    async with AsyncEngine(config(depth=2, max_batched_tokens=64, speculate=0)) as engine:  # drafts wait for steps
        await _check(engine, golden, odd=1)
        assert engine.stats().steps_overlapped > 0.9 * engine.stats().steps


async def test_budget_2048_and_a_hot_cache(golden: Golden) -> None:
    """The second pass finds every prompt in the prefix cache, the seeded ones greedy now and the other way round."""
    async with AsyncEngine(config(max_batched_tokens=2048)) as engine:
        await _check(engine, golden)
        before = engine.stats().prefix_hits
        await _check(engine, golden, odd=1)
        hot = sum((len(answer.prompt_ids) - 1) // 16 * 16 for answer in golden.answers)
        assert engine.stats().prefix_hits - before >= hot


async def test_cache_off(golden: Golden) -> None:
    async with AsyncEngine(config(prefix_caching=False)) as engine:
        await _check(engine, golden)
        assert engine.stats().prefix_hits == 0


async def test_tiny_pool_preempts_dozens_of_times(golden: Golden) -> None:
    kv_token = 30 * 2 * 3 * 64 * 4
    async with AsyncEngine(config(kv_bytes=38 * 16 * kv_token, max_model_len=560)) as engine:
        for odd in (0, 1, 0, 1):
            await _check(engine, golden, odd=odd, tokens=TOKENS)
            if (preemptions := engine.stats().preemptions) >= 24:
                break
        assert preemptions >= 24, f"{preemptions} preemptions"


async def test_alone(golden: Golden) -> None:
    """One request at a time, against the batch of 32. A third of the answers begin a page."""
    few = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    async with AsyncEngine(config(max_num_seqs=1)) as engine:
        greedy = [(await last(engine, prompt, few)).outputs[0].token_ids for prompt in PROMPTS]
        assert_same(greedy, golden.answers)
        for i in range(0, 32, 4):
            sampling = msgspec.structs.replace(SEEDED[i], max_tokens=12)
            assert (await last(engine, PROMPTS[i], sampling)).outputs[0].token_ids == golden.seeded[i][:12]
