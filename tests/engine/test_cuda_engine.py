"""A whole engine on the fake CUDA device: start-up, the core loop, the waiter's thread, streams of tokens."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import aengine.engine.build_cuda as build_cuda
from aengine import AsyncEngine, SamplingParams
from aengine.errors import ConfigError
from aengine.models.placing import place
from tests.e2e.conftest import config, run_all
from tests.e2e.test_recurrent import lfm2
from tests.e2e.tiny import SIZES, Tiny, assert_follows, prompts
from tests.runner.cuda.fake import FakeCuda
from tests.runner.cuda.steady import SteadyOps


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    made = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=2, tie_word_embeddings=True))
    return Tiny(made, tmp_path_factory.mktemp("llama"))


@pytest.fixture
def devices(monkeypatch):
    """The fake devices that engines were started on."""
    made = []

    def device():
        made.append(FakeCuda(len(made), eager=0.3))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(build_cuda, "TorchCuda", device)
    monkeypatch.setattr(build_cuda, "cuda_ops", lambda backend, device: (SteadyOps(), "kernels: steady"))
    return made


@pytest.mark.parametrize(("depth", "capture"), [(0, False), (1, True)])
async def test_an_engine_on_the_fake_device_says_what_the_reference_says(tiny, devices, depth, capture):
    settings = {"max_model_len": 64, "max_num_seqs": 4, "kv_bytes": 2**18, "device": "auto", "dtype": "float32"}
    settings["attention_backend"] = "reference"  # sampling in plain torch: a fused kernel needs a real device
    asked = [
        SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True),
    ]
    made = config(model=str(tiny.folder), depth=depth, capture=capture, max_batched_tokens=32, **settings)
    async with AsyncEngine(made) as engine:
        outputs = await asyncio.wait_for(run_all(engine, prompts([5, 20, 40]), asked), 60)
        lines = engine.report.lines
        assert engine.stats().device_s > 0
        assert (engine.stats().steps_overlapped > 0) == (depth > 0)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [6, 9, 3]
    assert_follows(outputs, tiny)
    assert "kernels: steady" in lines
    assert any("CUDA graphs of up to 4 rows" in line for line in lines) == capture
    assert (devices[0].counts["replay"] > 0) == capture


async def test_states_are_replayed_as_graphs_and_activations_are_measured(devices, tmp_path):
    """Padding rows write page 0 of the states, which stays zero."""
    tiny = Tiny(lfm2(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"]), tmp_path)
    made = config(
        model=str(tiny.folder), dtype="float32", device="cuda", attention_backend="reference", max_model_len=64,
        max_num_seqs=6, kv_bytes=2**18, max_batched_tokens=32,
    )  # fmt: skip
    sampling = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (9, 4, 12)]
    async with AsyncEngine(made) as engine:
        assert_follows(await asyncio.wait_for(run_all(engine, prompts([5, 20, 40]), sampling), 60), tiny)
        sizes = dict(engine.report.ledger)
    assert devices[0].counts["replay"] > 0
    assert sizes["activations"] > devices[0].peak_bytes


async def test_fp8_pages_need_a_device_that_reads_them(tiny, devices, monkeypatch):
    monkeypatch.setattr(FakeCuda, "version", (8, 0))
    made = config(model=str(tiny.folder), device="cuda", kv_dtype="fp8")
    with pytest.raises(ConfigError, match=r"kv_dtype fp8 needs compute capability 8\.9; this device has 8\.0"):
        async with AsyncEngine(made):
            pass


async def test_a_device_that_is_too_small_is_refused_with_the_numbers(tiny, devices):
    made = config(model=str(tiny.folder), device="cuda", gpu_memory_percent=1.0)
    with pytest.raises(ConfigError, match=r"gpu_memory_percent 1\.0 of 2,147,483,648 bytes leaves .* steps alone need"):
        async with AsyncEngine(made):
            pass


def test_cuda_without_a_device_is_refused(tiny):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")

    async def start():
        async with AsyncEngine(config(model=str(tiny.folder), device="cuda")):
            pass

    with pytest.raises(ConfigError, match="torch finds no CUDA device"):
        asyncio.run(start())


def test_placing_moves_every_tensor_and_keeps_what_is_there(tiny):
    from aengine.kernels.reference import ReferenceOps
    from aengine.models.loader import load_model
    from aengine.models.store import resolve

    model = load_model(resolve(str(tiny.folder), home=tiny.folder), ReferenceOps(), torch.float32)
    layers = model._layers
    place(model, torch.device("cpu"))
    assert model._layers is layers
    place(model, torch.device("meta"))
    assert model._layers[1].qkv.weight.is_meta
    assert model._rope.cos.is_meta
    assert model._head.weight.is_meta
