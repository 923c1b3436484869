"""Page groups of mixed attention layouts, their sizing, and the table people see of them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Llama4ForCausalLM, Llama4TextConfig

from aengine.config import CacheConfig, EngineConfig, ModelConfigArgs, SchedulerConfig
from aengine.engine.build import describe_pages
from aengine.engine.page_groups import kv_dtype, kv_groups
from aengine.engine.sizing import bytes_for, in_flight_tokens, size_pool
from aengine.errors import ConfigError
from aengine.kernels.ops import AttentionSpec
from aengine.kernels.reference import ReferenceOps
from aengine.memory import Chunk, Full, Window
from aengine.models.loader import load_model, outline
from aengine.models.store import resolve

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
}


def spec(layer: int, group: int, window: int = 0, chunk: int = 0) -> AttentionSpec:
    return AttentionSpec(layer, group, 4, 2, 8, 0.5, window=window, chunk=chunk)


def test_each_kind_of_layer_gets_its_lifetime() -> None:
    groups = kv_groups([spec(0, 1, window=20), spec(1, 0), spec(2, 1, window=20), spec(3, 2, chunk=24)], "float32", 8)
    assert [group.lifetime for group in groups] == [Full(), Window(20), Chunk(24)]
    assert [[layer.name for layer in group.layers] for group in groups] == [
        ["layer1"],
        ["layer0", "layer2"],
        ["layer3"],
    ]
    assert groups[1].payload_bytes == 2 * groups[0].payload_bytes


def test_int8_pages_hold_scales_beside_keys_and_values() -> None:
    group = kv_groups([spec(0, 0), spec(1, 0)], "int8", 16)[0]
    assert [(part.name, part.shape, part.dtype) for part in group.layers[1].parts] == [
        ("k", (2, 8), "int8"),
        ("v", (2, 8), "int8"),
        ("k_scale", (2,), "float32"),
        ("v_scale", (2,), "float32"),
    ]
    assert group.payload_bytes == 2 * 2 * (16 * 2 * 8 + 16 * 2 * 4)


def test_the_element_type_of_pages_is_the_computed_one_unless_asked() -> None:
    model: Any = SimpleNamespace(dtype=torch.bfloat16, attention=(spec(0, 0), replace(spec(1, 1), cross=True)))
    assert kv_dtype(EngineConfig(), model) == "bfloat16"
    assert kv_dtype(EngineConfig(cache=CacheConfig(kv_dtype="float32")), model) == "float32"
    with pytest.raises(ConfigError, match="1 of 2 layers"):
        kv_dtype(EngineConfig(cache=CacheConfig(kv_dtype="int8")), model)
    model.attention = model.attention[:1]
    assert kv_dtype(EngineConfig(cache=CacheConfig(kv_dtype="int8")), model) == "int8"


def test_windows_bound_what_a_context_needs() -> None:
    """Two full and four window layers: at 4,096 tokens the windows cost 128 tokens and what is in flight."""
    groups = kv_groups([spec(i, int(i > 1), window=128 * (i > 1)) for i in range(6)], "float32", 16)
    scheduler = SchedulerConfig(max_num_seqs=1, max_batched_tokens=64, depth=1)
    assert in_flight_tokens(scheduler) == 128
    layer_token = 2 * 2 * 8 * 4
    assert bytes_for(groups, 4096) == 6 * 4096 * layer_token
    pages = math.ceil((127 + 128 - 2) / 16) + 1 + 1
    assert bytes_for(groups, 4096, 128) <= (2 * 4096 + 4 * 16 * pages) * layer_token
    bounded = bytes_for(groups, 4096, 128)
    made, context = size_pool(
        groups,
        CacheConfig(kv_bytes=int(1.1 * bounded)),
        scheduler,
        model_context=4096,
        max_model_len=4096,
        free=2**30,
    )
    assert context == 4096
    assert made.arena_bytes < bytes_for(groups, 4096) / 2
    with pytest.raises(ConfigError, match="4096 tokens needs"):
        size_pool(
            groups,
            CacheConfig(kv_bytes=int(0.9 * bounded)),
            scheduler,
            model_context=4096,
            max_model_len=4096,
            free=2**30,
        )


def models() -> dict[str, torch.nn.Module]:
    gemma = Gemma3TextConfig(**SIZES, sliding_window=128)
    llama4 = Llama4TextConfig(**SIZES, attention_chunk_size=256, intermediate_size_mlp=40, num_local_experts=2)
    return {"window(128)": Gemma3ForCausalLM(gemma), "chunk(256)": Llama4ForCausalLM(llama4)}


@pytest.mark.parametrize("label", ["window(128)", "chunk(256)"])
def test_the_table_is_had_without_loading_weights(label: str, tmp_path: Path) -> None:
    models()[label].save_pretrained(tmp_path / "model")
    config = EngineConfig(
        model=ModelConfigArgs(model=str(tmp_path / "model"), max_model_len=1024), cache=CacheConfig(kv_bytes=2**22)
    )
    lines = describe_pages(config)
    assert any(line.startswith("full") and " full " in line for line in lines)
    assert any(label in line for line in lines)
    assert lines[-1] == "context 1024 tokens"
    files = resolve(str(tmp_path / "model"), home=tmp_path)
    drawn, loaded = outline(files, torch.float32), load_model(files, ReferenceOps(), torch.float32)
    assert drawn.attention == loaded.attention
    assert (drawn.vocab_size, drawn.max_context, drawn.dtype) == (97, 4096, torch.float32)


def test_a_model_that_is_not_here_has_no_table_and_is_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AENGINE_HOME", str(tmp_path))
    assert describe_pages(EngineConfig(model=ModelConfigArgs(model="gemma3-270m"))) == ()
    assert list(tmp_path.iterdir()) == []
