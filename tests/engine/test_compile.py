"""Choices of start-up that exclude each other or take another path: `compile`, fp8 pages on the CPU."""

from __future__ import annotations

from functools import partial

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import aengine.runner.compiled as compiled
from aengine import AsyncEngine, SamplingParams
from aengine.config import DeviceConfig
from aengine.errors import ConfigError
from tests.e2e.conftest import run_all
from tests.e2e.tiny import SIZES, Tiny, assert_follows, prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    made = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=2, tie_word_embeddings=True))
    return Tiny(made, tmp_path_factory.mktemp("llama"))


async def test_a_compiled_engine_on_the_cpu_says_what_the_reference_says(tiny, monkeypatch):
    monkeypatch.setattr(compiled, "compile_forward", partial(compiled.compile_forward, backend="eager"))
    async with AsyncEngine(tiny.config(compile=True, max_batched_tokens=32)) as engine:
        assert_follows(await run_all(engine, prompts([1, 5, 40]), GREEDY), tiny)
        lines = engine.report.lines
    assert "compile is on: plain torch takes the place of native kernels, whose steps are faster" in lines
    assert any(line.startswith("forward compiled by torch.compile (eager)") for line in lines)


def test_native_kernels_and_compile_exclude_each_other():
    with pytest.raises(ConfigError, match="compile and kernels native exclude each other"):
        DeviceConfig(compile=True, kernels="native")
    assert DeviceConfig(compile=True, kernels="reference").compile


async def test_fp8_pages_are_for_plain_torch_on_the_cpu(tiny):
    with pytest.raises(ConfigError, match="kv_dtype fp8 is not for native"):
        async with AsyncEngine(tiny.config(kv_dtype="fp8", kernels="native")):
            pass
    async with AsyncEngine(tiny.config(kv_dtype="fp8", kernels="reference")) as engine:
        outputs = await run_all(engine, prompts([5, 40]), GREEDY)
        assert any("KV float8_e4m3fn" in line for line in engine.report.lines)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [6, 6]
