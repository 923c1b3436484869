"""Greedy tokens equal transformers' own, and nothing the engine does about them changes one."""

from __future__ import annotations

import torch

from aengine import AsyncEngine, RequestOutput, SamplingParams
from tests.e2e.conftest import Reference, config, last, run_all
from tests.e2e.prompts import PROMPTS

TOKENS = 64
TIE = 1e-4  # a divergence counts as equal only where the reference's own best two logits are closer than this
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
SEEDED = [
    SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=1000 + i, max_tokens=24, ignore_eos=True)
    for i in range(len(PROMPTS))
]


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


class Golden:
    """The engine's tokens at the default settings, once; each test compares its own run with them."""

    greedy: list[list[int]] | None = None
    seeded: list[list[int]] | None = None
    prompts: list[list[int]]


async def golden() -> type[Golden]:
    if Golden.greedy is None:
        async with AsyncEngine(config()) as engine:
            outputs = await run_all(engine, PROMPTS, GREEDY)
            Golden.prompts = [output.prompt_token_ids for output in outputs]
            Golden.greedy = ids(outputs)
            Golden.seeded = ids(await run_all(engine, PROMPTS, SEEDED))
    return Golden


def assert_same(got: list[list[int]], want: list[list[int]], reference: Reference, prompts: list[list[int]]) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if a == b:
            continue
        at = next(j for j, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        best = reference.logits(prompts[i] + b[:at])[-1].topk(2).values
        gap = float(best[0] - best[1])
        assert gap < TIE, f"prompt {i}, token {at}: {a[at]} is not {b[at]} (the reference's gap is {gap:.2e})"
        print(f"prompt {i}: tie at token {at}, gap {gap:.2e}")


async def test_greedy_tokens_and_logprobs_equal_transformers(reference: Reference) -> None:
    """One forward of transformers over prompt + output: its argmax at each position is what generate would choose."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=2)
    async with AsyncEngine(config()) as engine:
        outputs = await run_all(engine, PROMPTS, params)
    worst = 0.0
    for i, output in enumerate(outputs):
        prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        assert len(tokens) == TOKENS
        logits = reference.logits(prompt + tokens[:-1])[len(prompt) - 1 :]
        best = logits.topk(2)
        for j, token in enumerate(tokens):
            gap = float(best.values[j, 0] - best.values[j, 1])
            assert token == int(best.indices[j, 0]) or gap < TIE, f"prompt {i}, token {j}, gap {gap:.2e}"
        logprobs = torch.log_softmax(logits, -1)
        for j, told in enumerate(output.outputs[0].logprobs or []):
            worst = max(worst, abs(told.logprob - float(logprobs[j, told.token_id])))
            assert told.rank == 1
            assert len(told.top) == 2
    assert worst < 1e-4, f"log-probabilities differ by {worst:.2e}"
    print(f"largest difference of log-probabilities: {worst:.2e}")


async def test_first_prompts_equal_generate_itself(reference: Reference) -> None:
    """The same through transformers' generate, for a few prompts: guards the argument of the test above."""
    expected = await golden()
    assert expected.greedy is not None
    for i in (2, 8, 25):
        prompt = torch.tensor([expected.prompts[i]])
        out = reference.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert_same([out[0, prompt.shape[1] :].tolist()], [expected.greedy[i]], reference, [expected.prompts[i]])


async def _check(engine: AsyncEngine, reference: Reference, *, odd: int = 0) -> None:
    """All 32 prompts at once, greedy and seeded ones by turns in one batch: another company than the golden run's."""
    expected = await golden()
    assert expected.greedy is not None
    assert expected.seeded is not None
    params = [GREEDY if i % 2 == odd else SEEDED[i] for i in range(len(PROMPTS))]
    got = ids(await run_all(engine, PROMPTS, params))
    greedy, seeded = slice(odd, None, 2), slice(1 - odd, None, 2)
    assert_same(got[greedy], expected.greedy[greedy], reference, expected.prompts[greedy])
    assert got[seeded] == expected.seeded[seeded]


async def test_depth_0(reference: Reference) -> None:
    async with AsyncEngine(config(depth=0)) as engine:
        await _check(engine, reference)
        assert engine.stats().steps_overlapped == 0


async def test_depth_2(reference: Reference) -> None:
    async with AsyncEngine(config(depth=2)) as engine:
        await _check(engine, reference)
        assert engine.stats().steps_overlapped > 0.9 * engine.stats().steps


async def test_budget_16(reference: Reference) -> None:
    async with AsyncEngine(config(max_batched_tokens=16)) as engine:
        await _check(engine, reference)


async def test_budget_64(reference: Reference) -> None:
    async with AsyncEngine(config(max_batched_tokens=64)) as engine:
        await _check(engine, reference)


async def test_budget_2048_and_a_hot_cache(reference: Reference) -> None:
    """The second pass finds every prompt in the prefix cache, the seeded ones greedy now and the other way round."""
    async with AsyncEngine(config(max_batched_tokens=2048)) as engine:
        await _check(engine, reference)
        before = engine.stats().prefix_hits
        await _check(engine, reference, odd=1)
        hot = sum((len(prompt) - 1) // 16 * 16 for prompt in (await golden()).prompts)
        assert engine.stats().prefix_hits - before >= hot


async def test_cache_off(reference: Reference) -> None:
    async with AsyncEngine(config(prefix_caching=False)) as engine:
        await _check(engine, reference)
        assert engine.stats().prefix_hits == 0


async def test_tiny_pool_preempts_dozens_of_times(reference: Reference) -> None:
    kv_token = 30 * 2 * 3 * 64 * 4
    async with AsyncEngine(config(kv_bytes=44 * 16 * kv_token, max_model_len=560)) as engine:
        for odd in (0, 1, 0, 1):
            await _check(engine, reference, odd=odd)
            if (preemptions := engine.stats().preemptions) >= 24:
                break
        assert preemptions >= 24, f"{preemptions} preemptions"


async def test_alone(reference: Reference) -> None:
    """One request at a time, against the batch of 32."""
    expected = await golden()
    assert expected.greedy is not None
    assert expected.seeded is not None
    async with AsyncEngine(config(max_num_seqs=1)) as engine:
        short = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        greedy = [(await last(engine, prompt, short)).outputs[0].token_ids for prompt in PROMPTS]
        assert_same(greedy, [tokens[:20] for tokens in expected.greedy], reference, expected.prompts)
        for i in range(0, 32, 8):
            assert (await last(engine, PROMPTS[i], SEEDED[i])).outputs[0].token_ids == expected.seeded[i]
