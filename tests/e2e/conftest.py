"""Real models for the end-to-end tests: SmolLM2 from the model store, its transformers twin, tiny random families."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aengine import AsyncEngine, EngineConfig, RequestOutput, SamplingParams
from aengine.config import CacheConfig, ModelConfigArgs, SchedulerConfig, home
from aengine.models.store import resolve

BASE = EngineConfig(
    model=ModelConfigArgs(model="smollm2-135m", dtype="float32", max_model_len=2048),
    scheduler=SchedulerConfig(max_num_seqs=32, max_batched_tokens=512),
    cache=CacheConfig(kv_bytes=600 * 2**20),
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


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return resolve("smollm2-135m", home=home(), progress=None).path


class Reference:
    """transformers' own run of the same weights, in fp32."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[len(ids), vocab]"""
        with torch.inference_mode():
            return self.model(torch.tensor([list(ids)])).logits[0]


@pytest.fixture(scope="session")
def reference(smollm2: Path) -> Reference:
    return Reference(smollm2)
