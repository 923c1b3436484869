"""For the end-to-end tests: SmolLM2 from the model store, its transformers twin, tiny random families, a browser."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from aengine import AsyncEngine, EngineConfig, RequestOutput, SamplingParams
from aengine.config import CacheConfig, DeviceConfig, ModelConfigArgs, SchedulerConfig, home
from aengine.engine import build_cpu
from aengine.models.loader import load_config, open_checkpoint
from aengine.models.store import ModelFiles, resolve
from tests.e2e.chromium import Page, new_tab, running_browser

BASE = EngineConfig(
    model=ModelConfigArgs(model="smollm2-135m", dtype="float32", max_model_len=2048),
    scheduler=SchedulerConfig(max_num_seqs=32, max_batched_tokens=512),
    cache=CacheConfig(kv_bytes=600 * 2**20),
    device=DeviceConfig(threads=1),  # several test processes share the cores; threads change no bit
)


def config(**changes: Any) -> EngineConfig:
    """BASE with settings changed by leaf name."""
    out = BASE
    for branch in ("model", "scheduler", "cache", "device"):
        node = getattr(out, branch)
        mine = {name: value for name, value in changes.items() if name in node.__dataclass_fields__}
        out = replace(out, **{branch: replace(node, **mine)})
    return out


async def last(engine: AsyncEngine, prompt: Any, sampling: SamplingParams, **kw: Any) -> RequestOutput:
    outputs = [output async for output in engine.generate(prompt, sampling, **kw)]
    return outputs[-1]


async def run_all(
    engine: AsyncEngine, prompts: Sequence[Any], sampling: SamplingParams | Sequence[SamplingParams]
) -> list[RequestOutput]:
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    return list(await asyncio.gather(*(last(engine, p, s) for p, s in zip(prompts, each, strict=True))))


class Reference:
    """transformers' own run of SmolLM2 in fp32, loaded when it is first asked.

    Its own GGUF reader takes a quarter of a minute, so the weights come from ours here, bit for bit the same; the
    golden answers (tests/golden) were made with its own.
    """

    def __init__(self, files: ModelFiles) -> None:
        self._files = files

    @cached_property
    def model(self) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=49_152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
            tie_word_embeddings=True,
        )
        checkpoint = open_checkpoint(self._files, load_config(self._files))
        with torch.device("meta"):
            names = [name for name, _ in LlamaForCausalLM(config).named_parameters()]
        weights = {name: checkpoint.tensor(name, torch.float32) for name in names}
        return LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32).eval()

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[len(ids), vocab]"""
        with torch.inference_mode():
            logits: torch.Tensor = self.model(torch.tensor([list(ids)])).logits[0]
        return logits


@pytest.fixture(scope="module")
def shared_weights() -> Iterator[None]:
    """A module's engines that hold a model in the same way get the same kernels and weights: loading them takes 3 s of
    processor time, and is the same each time. Steps only read them, and a step that did not would spoil later ones."""
    loaded: dict[object, tuple[Any, int]] = {}
    load = build_cpu.load_for_cpu

    def once(config: EngineConfig, files: ModelFiles, ledger: Any) -> Any:
        device = replace(config.device, capture=True)  # for steps alone
        held_as = (files.path, config.model.dtype, config.model.quantize, device)
        if held_as not in loaded:
            loaded[held_as] = load(config, files, ledger), torch.get_num_threads()
        made, threads = loaded[held_as]
        torch.set_num_threads(threads)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_cpu, "load_for_cpu", once)
        yield


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference(resolve("smollm2-135m", home=home(), progress=None))


@pytest.fixture(scope="package")
def port() -> Iterator[int]:
    with running_browser() as port:
        yield port


@pytest.fixture
async def tab(port: int) -> AsyncIterator[Page]:
    async with new_tab(port) as page:
        yield page
        assert page.faults == []


@pytest.fixture
def shots(tmp_path: Path) -> Path:
    """Screenshots go where a developer asked for them, else they are thrown away."""
    return Path(os.environ.get("SCREENSHOTS", tmp_path))
