"""Window and chunked attention beside full attention, through the whole engine, against transformers.

gpt-oss: window and full layers in turn, sinks, experts. Llama 4: chunked layers and, every fourth, a full one without
rope. Lengths stand at window, chunk and page edges and one to either side.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GptOssConfig, GptOssForCausalLM, Llama4ForCausalLM, Llama4TextConfig

from aengine import AsyncEngine, RequestOutput, SamplingParams
from aengine.engine.sizing import bytes_for
from aengine.memory import Chunk, PoolStats, Window
from tests.e2e.conftest import last, run_all
from tests.e2e.tiny import SIZES, Tiny, assert_follows, prompts

WINDOW, CHUNK = 20, 24
YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "original_max_position_embeddings": 128,
    "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
}  # fmt: skip
MIXED = SIZES | {"num_hidden_layers": 4, "num_local_experts": 4, "intermediate_size": 24}
LENGTHS = (1, 8, 9, 16, 19, 20, 21, 23, 24, 25, 40, 41, 48, 49, 73, 110)
GREEDY = SamplingParams(temperature=0.0, max_tokens=26, ignore_eos=True, logprobs=1)
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=1)


def gpt_oss(**changes: Any) -> GptOssForCausalLM:
    given = {"num_experts_per_tok": 2, "sliding_window": WINDOW, "rope_parameters": YARN}
    return GptOssForCausalLM(GptOssConfig(**MIXED | given | changes))


def llama4(**changes: Any) -> Llama4ForCausalLM:
    given = {"attention_chunk_size": CHUNK, "intermediate_size_mlp": 40, "interleave_moe_layer_step": 2}
    return Llama4ForCausalLM(Llama4TextConfig(**MIXED | given | {"floor_scale": 16} | changes))


MODELS = {
    "gpt-oss": gpt_oss,
    "llama4": llama4,
    "llama4-odd-chunks": lambda: llama4(attention_chunk_size=21, interleave_moe_layer_step=1, num_experts_per_tok=2),
}


@pytest.fixture(scope="module", params=MODELS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(MODELS[request.param](), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=["gpt-oss", "llama4"])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(MODELS[request.param](), tmp_path_factory.mktemp(request.param))


async def run(tiny: Tiny, lengths: tuple[int, ...] = LENGTHS, **changes: Any) -> list[RequestOutput]:
    async with AsyncEngine(tiny.config(**changes)) as engine:
        return await run_all(engine, prompts(lengths), GREEDY)


@pytest.mark.parametrize("budget", [7, 64, 512])
async def test_tokens_equal_transformers_whatever_the_chunks(tiny: Tiny, budget: int) -> None:
    assert_follows(await run(tiny, max_batched_tokens=budget, page_tokens=8), tiny)


@pytest.mark.parametrize("depth", [0, 2])
async def test_depth(tiny: Tiny, depth: int) -> None:
    assert_follows(await run(tiny, depth=depth, max_batched_tokens=32, page_tokens=4), tiny)


async def test_reference_kernels_and_pages_of_another_size(tiny: Tiny) -> None:
    assert_follows(await run(tiny, kernels="reference", page_tokens=16, max_batched_tokens=48), tiny)


async def test_hot_cache(tiny: Tiny) -> None:
    """The second pass finds each prompt up to its last page, at every edge; so does the pass after other prompts."""
    async with AsyncEngine(tiny.config(page_tokens=4, max_batched_tokens=48)) as engine:
        cold = await run_all(engine, prompts(LENGTHS), GREEDY)
        hot = await run_all(engine, prompts(LENGTHS), GREEDY)
    assert_follows(cold, tiny)
    assert_follows(hot, tiny)
    for output in hot:
        length = len(output.prompt_token_ids)
        assert output.num_cached_tokens == (length - 1) // 4 * 4


async def test_second_turns_go_on_from_the_first(plain: Tiny) -> None:
    """prompt + answer + more: the hit reaches to the last page that the first turn computed. Each length has a salt of
    its own, so that it finds nothing of the others."""
    async with AsyncEngine(plain.config(page_tokens=4, max_batched_tokens=48)) as engine:
        for length in (19, 20, 21, 23, 24, 25, 41, 48, 73, 100):
            salt = {"cache_salt": str(length)}
            first = await last(engine, prompts([length])[0], GREEDY, **salt)
            turn = first.prompt_token_ids + first.outputs[0].token_ids
            second = await last(engine, turn + prompts([9], seed=1)[0], GREEDY, **salt)
            beside = await last(engine, turn[: length - 2] + prompts([30], seed=2)[0], GREEDY, **salt)
            assert_follows([first, second, beside], plain)
            assert first.num_cached_tokens == 0, length
            assert second.num_cached_tokens == (len(turn) - 1) // 4 * 4, length
            assert beside.num_cached_tokens <= (length - 2) // 4 * 4, length


@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_a_tiny_pool_preempts_and_changes_nothing(tiny: Tiny, depth: int) -> None:
    lengths = (20, 19, 21, 24, 25, 10, 23, 49, 8)
    async with AsyncEngine(
        tiny.config(page_tokens=4, max_batched_tokens=24, depth=depth, max_model_len=120, pool_of=(120, 2.3))
    ) as engine:
        outputs = await run_all(engine, prompts(lengths), LONG)
        again = await run_all(engine, prompts(lengths), LONG)
        assert engine.stats().preemptions > 0
        slots = [group.slots for group in engine._loaded().scheduler.cache.pool.plan.groups]
        assert bool(engine.stats().kv_moved_bytes) == (max(slots) > 1)  # pages move where large pages hold several
    assert_follows(outputs, tiny)
    assert_follows(again, tiny)


def local_group(engine: AsyncEngine) -> tuple[int, Any]:
    """(index, lifetime) of the window or chunk group."""
    groups = engine._loaded().scheduler.cache.pool.plan.groups
    return next((i, g.spec.lifetime) for i, g in enumerate(groups) if isinstance(g.spec.lifetime, Window | Chunk))


def pool_stats(engine: AsyncEngine) -> PoolStats:
    return engine._loaded().scheduler.cache.stats().pool


async def test_a_long_sequence_holds_no_more_than_its_span(plain: Tiny) -> None:
    """While 400 tokens are prefilled and then decoded, the local group holds its span and what is in flight; the full
    group everything. Pages let go of are not lost: they are free or cached."""
    budget, page = 16, 4
    async with AsyncEngine(plain.config(page_tokens=page, max_batched_tokens=budget, depth=1)) as engine:
        index, lifetime = local_group(engine)
        bound = lifetime.peak_pages(400, page, 2 * budget)
        most = 0
        lows = []
        async for output in engine.generate(prompts([360])[0], SamplingParams(temperature=0.0, max_tokens=40)):
            stats = pool_stats(engine)
            held = stats.groups[index].live
            most = max(most, held)
            if not output.finished and stats.groups[1 - index].live:  # else the engine was done before this was read
                lows.append(held)
                assert held <= bound
                assert stats.groups[1 - index].live >= 360 // page
        assert 0 < most <= bound < 400 // page // 2
        assert min(lows) <= -(-lifetime.tokens // page) + 1
        engine._loaded().scheduler.cache.check()
        after = pool_stats(engine)
        assert sum(group.live + group.fenced for group in after.groups) == 0


async def test_chunk_borders_free_the_whole_chunk(tmp_path: Any) -> None:
    """At the first position of a chunk, the pages of the chunk before are gone: the low-water mark is one page."""
    tiny = Tiny(llama4(), tmp_path)
    async with AsyncEngine(tiny.config(page_tokens=4, depth=0, prefix_caching=False)) as engine:
        index, _ = local_group(engine)
        held = {}
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        async for output in engine.generate(prompts([40])[0], params):
            if not output.finished:
                known = 40 + len(output.outputs[0].token_ids)
                held[known] = pool_stats(engine).groups[index].live
        by_border = {known: pages for known, pages in held.items() if known % CHUNK == 5}
        assert by_border
        assert all(pages <= 2 for pages in by_border.values())
        assert max(held.values()) <= CHUNK // 4 + 1
        assert max(held.values()) >= CHUNK // 4


async def test_a_pool_too_small_without_windows_serves_with_them(plain: Tiny) -> None:
    """The sizer counts windows as what they hold: the same bytes would not fit a context of full layers."""
    tight = plain.config(page_tokens=4, max_batched_tokens=16, pool_of=(400, 1.05), max_model_len=400)
    async with AsyncEngine(tight) as engine:
        plan = engine._loaded().scheduler.cache.pool.plan
        assert bytes_for([group.spec for group in plan.groups], 400) > plan.arena_bytes
        output = await last(engine, prompts([360])[0], GREEDY)
        assert any("window(20)" in line or "chunk(24)" in line for line in engine.report.pages)
    assert_follows([output], plain)
