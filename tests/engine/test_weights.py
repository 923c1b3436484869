"""What the settings make of a model's weights, and how much memory the ledger counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from aengine.config import DeviceConfig, EngineConfig, ModelConfigArgs, home
from aengine.engine.build_cpu import load_for_cpu
from aengine.engine.ledger import Ledger
from aengine.engine.weights import hold_of, model_bytes
from aengine.errors import ConfigError
from aengine.kernels.native import NativeOps, load_native_ops
from aengine.kernels.reference import ReferenceOps
from aengine.models.store import resolve


@pytest.fixture(scope="module")
def native() -> NativeOps:
    made = load_native_ops(home() / "native", 1)
    assert isinstance(made, NativeOps), made
    return made


@pytest.mark.parametrize(
    ("dtype", "quantize", "on_native", "on_reference"),
    [
        ("auto", "auto", "stored", "plain"),
        ("float32", "auto", "plain", "plain"),
        ("bfloat16", "auto", "plain", "plain"),
        ("auto", "none", "plain", "plain"),
        ("float32", "int8", "int8", "int8"),
        ("auto", "int4", "int4", "int4"),
    ],
)
def test_a_dtype_that_is_given_means_exact_numbers(native, dtype, quantize, on_native, on_reference):
    config = EngineConfig(model=ModelConfigArgs(dtype=dtype, quantize=quantize))
    assert hold_of(config, native) == on_native
    assert hold_of(config, ReferenceOps()) == on_reference


def test_an_unknown_kind_of_integers_is_refused():
    with pytest.raises(ConfigError, match="quantize is 'int3', not one of auto, none, int8, int4"):
        ModelConfigArgs(quantize="int3")  # type: ignore[arg-type]


@pytest.mark.parametrize(("quantize", "kind"), [("none", "weights: float32"), ("int4", "4-bit groups of 32")])
def test_the_report_says_once_what_weights_are_held_as(quantize: str, kind: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True)).float().save_pretrained(tmp_path)
    config = EngineConfig(
        model=ModelConfigArgs(model=str(tmp_path), quantize=quantize), device=DeviceConfig(kernels="reference")
    )
    ledger = Ledger(lambda *_: None, None)
    threads = torch.get_num_threads()
    try:
        ops, model = load_for_cpu(config, resolve(str(tmp_path), home=tmp_path), ledger)
    finally:
        torch.set_num_threads(threads)
    assert isinstance(ops, ReferenceOps)
    assert [line for line in ledger.lines if kind in line] == ledger.lines
    linears = 96 * 64 + 2 * (64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 96)  # the tied embedding once
    rope = 2 * 64 * 8
    assert model_bytes(model) == 4 * (linears + 5 * 64 + rope)
