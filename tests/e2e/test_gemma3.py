"""Gemma-3-270M, 15 window layers of 512 tokens and 3 full ones: greedy tokens equal transformers', below, at and far
beyond the window, whatever the chunks, the cache, the pool and the depth.

The reference is one forward of transformers over each prompt and the output: its argmax at a position is what generate
would choose there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from aengine import AsyncEngine, RequestOutput, SamplingParams
from aengine.config import home
from aengine.memory import PoolStats, Window
from aengine.models.loader import load_config, load_tokenizer, open_checkpoint
from aengine.models.store import ModelFiles, resolve
from tests.e2e.conftest import config, last, run_all

pytestmark = pytest.mark.usefixtures("shared_weights")

TIE = 1e-4
KEPT = 48  # last positions of a run that the reference's answers are kept for: a second turn covers the first's answer
LENGTHS = (100, 511, 512, 513, 1100)  # the last is more than twice the window
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
TEXT = (
    "The lighthouse keeper wrote down what he saw from the gallery: the ships that passed by day, their flags and "
    "their cargo; the fires along the coast by night; the weather, the tides, the birds. In year {year} he counted {n} "
    "sails, lost {m} lamps to the storm of the {day}th, and read page {page} of the long book about the sea. "
)


def published_config() -> Gemma3TextConfig:
    """The model's published configuration."""
    return Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        max_position_embeddings=32_768,
        sliding_window=512,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    )


def reference_model(files: ModelFiles) -> Gemma3ForCausalLM:
    """transformers' model with the weights of the GGUF file.

    Its own GGUF reader parses 262,144 vocabulary entries in Python, twice: half a minute. The tensors it makes are
    those of `open_checkpoint`, bit for bit, but for norms, which the file holds with one added.
    """
    checkpoint = open_checkpoint(files, load_config(files))
    with torch.device("meta"):
        model = Gemma3ForCausalLM(published_config())
    weights = {}
    for name, _ in model.named_parameters():
        value = checkpoint.tensor(name, torch.float32)
        weights[name] = value - 1.0 if "norm" in name else value
    config = model.config
    del model
    return Gemma3ForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32).eval()


class Golden:
    """What the reference says about sequences seen so far, so that runs that agree cost it one forward."""

    def __init__(self, model: Gemma3ForCausalLM) -> None:
        self.model = model
        self._runs: list[tuple[tuple[int, ...], int, torch.Tensor, torch.Tensor]] = []  # ids, first position, best two

    def best(self, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities [tokens, 2] and ids [tokens, 2] of the reference's two best."""
        ids, first = (*prompt, *tokens[:-1]), len(prompt) - 1
        for seen, start, values, best in self._runs:
            if start <= first and seen[: len(ids)] == ids:
                return values[first - start :], best[first - start :]
        keep = min(len(ids), max(len(tokens), KEPT))
        with torch.inference_mode():
            logits = self.model(torch.tensor([ids]), use_cache=False, logits_to_keep=keep).logits[0].float()
        top = torch.log_softmax(logits, -1).topk(2)
        self._runs.append((ids, len(ids) - keep, top.values, top.indices))
        return self.best(prompt, tokens)

    def check(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
            values, ids = self.best(prompt, tokens)
            for at, (token, told) in enumerate(zip(tokens, output.outputs[0].logprobs or [], strict=True)):
                gap = float(values[at, 0] - values[at, 1])
                where = f"prompt of {len(prompt)}, token {at}"
                assert token == int(ids[at, 0]) or gap < TIE, f"{where}: gap {gap:.2e}"
                assert abs(told.logprob - float(values[at, 0])) < 2e-3, f"{where}: log-probability"


@pytest.fixture(scope="session")
def gemma3() -> ModelFiles:
    return resolve("gemma3-270m", home=home(), progress=None)


@pytest.fixture(scope="session")
def golden(gemma3: ModelFiles) -> Golden:
    return Golden(reference_model(gemma3))


@pytest.fixture(scope="session")
def ids(gemma3: ModelFiles) -> list[int]:
    """4,000 tokens of text that does not repeat itself."""
    parts = [TEXT.format(year=1801 + i, n=7 * i + 3, m=i % 9, day=1 + i % 28, page=11 * i) for i in range(50)]
    tokens = load_tokenizer(gemma3).encode("".join(parts))
    assert len(tokens) >= 4000
    return tokens


def gemma(**changes: Any) -> Any:
    """Ten sequences of 1,600 tokens have room; a page of all full layers is 3 x 2 x 16 x 256 x 4 B = 96 KiB."""
    return config(**{"model": "gemma3-270m", "max_model_len": 1600, "kv_bytes": 300 * 2**20} | changes)


def prompts(ids: list[int]) -> list[list[int]]:
    """One for each length; they begin alike for the first token only."""
    return [[ids[0], *ids[1 + 400 * i : length + 400 * i]] for i, length in enumerate(LENGTHS)]


def window_stats(engine: AsyncEngine) -> tuple[Any, PoolStats]:
    pool = engine._loaded().scheduler.cache.pool
    index = next(i for i, group in enumerate(pool.plan.groups) if isinstance(group.spec.lifetime, Window))
    stats = pool.stats()
    return stats.groups[index], stats


async def test_prompts_around_and_beyond_the_window_then_a_hot_cache(golden: Golden, ids: list[int]) -> None:
    async with AsyncEngine(gemma(max_batched_tokens=512)) as engine:
        assert any("window(512)" in line for line in engine.report.pages)
        outputs = await run_all(engine, prompts(ids), GREEDY)
        again = await run_all(engine, prompts(ids), GREEDY)
    golden.check(outputs)
    golden.check(again)
    assert [output.num_cached_tokens for output in again] == [(length - 1) // 16 * 16 for length in LENGTHS]


async def test_chunks_of_64_at_depth_0_hold_the_window_alone(golden: Golden, ids: list[int]) -> None:
    """1,100 tokens in chunks of 64: the window group holds 512 tokens and one chunk, not 1,100; then at the edges."""
    held = []
    async with AsyncEngine(gemma(max_batched_tokens=64, depth=0)) as engine:
        async for output in engine.generate(prompts(ids)[-1], GREEDY):
            group, stats = window_stats(engine)
            if not output.finished:
                held.append((group.live, stats.groups[0].live))
        assert min(held)[0] >= 512 // 16
        assert max(window for window, _ in held) <= (511 + 64) // 16 + 2
        assert max(full for _, full in held) >= LENGTHS[-1] // 16
        edges = await run_all(engine, [prompts(ids)[1], prompts(ids)[3]], GREEDY)
        group, stats = window_stats(engine)
        assert group.live + group.fenced + stats.groups[0].live == 0
    golden.check([output, *edges])


async def test_hits_across_the_window_edge(golden: Golden, ids: list[int]) -> None:
    """A prefix of 700 tokens shared by three prompts, then a second turn: window pages are needed for the last 511
    tokens of a hit only, and are there although the first sequence has moved past them."""
    shared = ids[:700]
    async with AsyncEngine(gemma()) as engine:
        first = await last(engine, shared + ids[1200:1500], GREEDY)
        await last(engine, shared + ids[2000:2040], GREEDY)  # leaves pages at the junction, for the next
        other = await last(engine, shared + ids[2100:2150], GREEDY)
        turn = first.prompt_token_ids + first.outputs[0].token_ids
        second = await last(engine, turn + ids[3000:3030], GREEDY)
        salted = await last(engine, shared, SamplingParams(max_tokens=1), cache_salt="another tenant")
    golden.check([second, first, other])
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (len(turn) - 1) // 16 * 16
    assert other.num_cached_tokens == 700 // 16 * 16
    assert salted.num_cached_tokens == 0


async def test_a_tiny_pool_preempts_and_changes_nothing(golden: Golden, ids: list[int]) -> None:
    """Room for three prompts, but not for their answers: one has to go and come back."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
    three = [[ids[0], *ids[1 + 300 * i : 110 + 8 * i + 300 * i]] for i in range(3)]
    async with AsyncEngine(gemma(kv_bytes=14 * 2**20, max_model_len=160, max_batched_tokens=128)) as engine:
        outputs = await run_all(engine, three, params)
        assert engine.stats().preemptions > 0
    golden.check(outputs)
