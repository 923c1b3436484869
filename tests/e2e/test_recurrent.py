"""Recurrent state beside attention (LFM2), through the whole engine, against transformers.

Prefix hits stand at checkpoints only: the prompt's end cut to a page, the junction of two prompts, and the exact end of
a released sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from transformers import Lfm2Config, Lfm2ForCausalLM

import aengine.engine.build as build
from aengine import AsyncEngine, RequestOutput, SamplingParams
from aengine.scheduler import DraftRow
from aengine.types import Int32s, StepPlan, StepResult
from tests.e2e.conftest import last, run_all
from tests.e2e.tiny import SIZES, Tiny, assert_follows, prompts

PAGE = 16
LAYERS = ["conv", "conv", "full_attention", "conv", "full_attention"]
LENGTHS = (1, 2, 3, 15, 16, 17, 18, 31, 32, 33, 48, 49, 77, 100, 161)
TOKENS = 26
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=1)


def lfm2(**changes: Any) -> Lfm2ForCausalLM:
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    given = {"num_hidden_layers": len(LAYERS), "layer_types": LAYERS, "block_multiple_of": 8}
    return Lfm2ForCausalLM(Lfm2Config(**sizes | given | changes))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(lfm2(), tmp_path_factory.mktemp("lfm2"))


async def run(tiny: Tiny, **changes: Any) -> list[RequestOutput]:
    async with AsyncEngine(tiny.config(page_tokens=PAGE, **changes)) as engine:
        return await run_all(engine, prompts(LENGTHS), GREEDY)


@pytest.mark.parametrize("budget", [5, 16, 64, 512])
async def test_tokens_equal_transformers_whatever_the_chunks(tiny: Tiny, budget: int) -> None:
    assert_follows(await run(tiny, max_batched_tokens=budget), tiny)


@pytest.mark.parametrize("depth", [0, 2])
async def test_depth(tiny: Tiny, depth: int) -> None:
    assert_follows(await run(tiny, depth=depth, max_batched_tokens=64), tiny)


async def test_reference_kernels_without_cache(tiny: Tiny) -> None:
    assert_follows(await run(tiny, kernels="reference", prefix_caching=False, max_batched_tokens=48), tiny)


@pytest.mark.parametrize(
    "changes",
    [
        {"conv_bias": True, "tie_word_embeddings": False},
        {"conv_L_cache": 4, "block_auto_adjust_ff_dim": False},
        {"conv_L_cache": 2, "layer_types": ["full_attention", "conv", "conv", "full_attention", "conv"]},
    ],
)
async def test_variants(changes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    variant = Tiny(lfm2(**changes), tmp_path_factory.mktemp("variant"), seed=3)
    assert_follows(await run(variant, max_batched_tokens=64), variant)


async def test_generate_itself(tiny: Tiny) -> None:
    """transformers' generate keeps a convolution cache of its own; the same through it, for some prompts."""
    import torch

    outputs = await run(tiny)
    for output in (outputs[0], outputs[5], outputs[13]):
        prompt = torch.tensor([output.prompt_token_ids])
        mask = torch.ones_like(prompt)
        wanted = tiny.model.generate(
            prompt, attention_mask=mask, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0
        )
        assert output.outputs[0].token_ids == wanted[0, prompt.shape[1] :].tolist()


async def test_bits_do_not_depend_on_chunks_or_batch(tiny: Tiny) -> None:
    async def bits(**changes: Any) -> list[list[float]]:
        outputs = await run(tiny, kernels="native", prefix_caching=False, **changes)
        return [[told.logprob for told in output.outputs[0].logprobs or []] for output in outputs]

    assert await bits(max_batched_tokens=7) == await bits(max_batched_tokens=512) == await bits(max_num_seqs=1)


# ---- prefix hits


async def test_the_same_prompt_hits_its_last_checkpoint(tiny: Tiny) -> None:
    async with AsyncEngine(tiny.config(page_tokens=PAGE, pool_of=(512, 16))) as engine:
        cold = await run_all(engine, prompts(LENGTHS), GREEDY)
        hot = await run_all(engine, prompts(LENGTHS), GREEDY)
    assert [output.num_cached_tokens for output in cold] == [0] * len(LENGTHS)
    assert [output.num_cached_tokens for output in hot] == [(length - 1) // PAGE * PAGE for length in LENGTHS]
    assert_follows(cold + hot, tiny)


async def test_a_conversation_goes_on_at_the_exact_end(tiny: Tiny) -> None:
    """The last token sampled was never computed; all before it are found, page edge or not."""
    async with AsyncEngine(tiny.config(page_tokens=PAGE)) as engine:
        for prompt in prompts((5, 22, 23, 40), seed=4):
            first = await last(engine, prompt, GREEDY)
            turn = prompt + first.outputs[0].token_ids
            second = await last(engine, [*turn, 7, 8, 9], GREEDY)
            assert second.num_cached_tokens == len(turn) - 1
            third = await last(engine, [*turn, 7, 8, 9, *second.outputs[0].token_ids, 11], GREEDY)
            assert third.num_cached_tokens == len(turn) + 3 + TOKENS - 1
            assert_follows([first, second, third], tiny)


async def test_a_shared_beginning_hits_from_the_third_request_on(tiny: Tiny) -> None:
    """The second finds attention pages but no state, computes all, and leaves a checkpoint at the junction."""
    shared, *ends = prompts((70, 30, 41, 9, 1), seed=5)
    async with AsyncEngine(tiny.config(page_tokens=PAGE, max_batched_tokens=64)) as engine:
        outputs = [await last(engine, shared + end, GREEDY) for end in ends]
        assert [output.num_cached_tokens for output in outputs] == [0, 0, 64, 64]
        assert_follows(outputs, tiny)
        late = await run_all(engine, [shared + end for end in prompts((3, 4, 50), seed=6)], GREEDY)
        assert [output.num_cached_tokens for output in late] == [64] * 3
        assert_follows(late, tiny)


async def test_another_salt_never_hits(tiny: Tiny) -> None:
    (prompt,) = prompts((60,), seed=7)
    async with AsyncEngine(tiny.config(page_tokens=PAGE)) as engine:
        outputs = [await last(engine, prompt, GREEDY, cache_salt=salt) for salt in ("a", "b", "a")]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 48]
    assert_follows(outputs, tiny)


async def test_choices_of_one_prompt_compute_it_once(tiny: Tiny) -> None:
    (prompt,) = prompts((150,), seed=8)
    params = SamplingParams(temperature=0.9, seed=11, n=6, max_tokens=20, ignore_eos=True)
    async with AsyncEngine(tiny.config(page_tokens=PAGE, max_batched_tokens=32)) as engine:
        together = await last(engine, prompt, params)
        stats = engine.stats()
        assert stats.prefix_hits == 5 * 144
        again = await last(engine, prompt, params)
    assert [choice.token_ids for choice in together.outputs] == [choice.token_ids for choice in again.outputs]
    assert len({tuple(choice.token_ids) for choice in together.outputs}) > 1
    async with AsyncEngine(tiny.config(page_tokens=PAGE, prefix_caching=False, max_num_seqs=1)) as engine:
        alone = await last(engine, prompt, params)
    assert [choice.token_ids for choice in alone.outputs] == [choice.token_ids for choice in together.outputs]


# ---- pressure


@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_tiny_pool_with_preemption(tiny: Tiny, depth: int) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True, logprobs=1)
    async with AsyncEngine(
        tiny.config(page_tokens=PAGE, pool_of=(270, 2), max_model_len=270, depth=depth, max_batched_tokens=64)
    ) as engine:
        outputs = await run_all(engine, prompts(LENGTHS), sampling)
        assert engine.stats().preemptions > 5
        assert engine.stats().kv_moved_bytes > 0  # 4 states to a large page
    assert_follows(outputs, tiny)


async def test_shared_beginnings_under_pressure(tiny: Tiny) -> None:
    shared = prompts((64,), seed=9)[0]
    asked = [shared[: 16 * (i % 5)] + end for i, end in enumerate(prompts(range(3, 23), seed=10))]
    async with AsyncEngine(tiny.config(page_tokens=PAGE, pool_of=(200, 2), max_model_len=200)) as engine:
        outputs = await run_all(engine, asked, GREEDY)
        outputs += await run_all(engine, asked, GREEDY)
        assert engine.stats().prefix_hits > 0
    assert_follows(outputs, tiny)


class EagerLookup:
    """Drafts what followed the last token before, whatever that may cost."""

    rows_max = 64

    def waits(self, rows: Sequence[DraftRow], others: int) -> bool:
        return True

    def propose(self, rows: Sequence[DraftRow], others: int, room: int) -> list[Int32s]:
        made = []
        for row in rows:
            ends = (row.ids[:-1] == row.ids[-1]).nonzero()[0]
            made.append(row.ids[ends[-1] + 1 :][: min(4, row.most, room)] if len(ends) else row.ids[:0])
            room -= len(made[-1])
        return made

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Nothing to learn."""


async def test_drafts(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected drafts go back to the state before them, and what was accepted is computed again."""
    monkeypatch.setattr(build, "make_drafter", lambda *_, **__: EagerLookup())
    sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=1)
    async with AsyncEngine(tiny.config(page_tokens=PAGE)) as engine:
        outputs = await run_all(engine, prompts(LENGTHS), sampling)
        stats = engine.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert_follows(outputs, tiny)
