"""Shared means of the model tests: one dense forward of a whole sequence, tiny reference models, tiny GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from aengine.kernels.ops import LayerKV, Model, StepBatch
from aengine.kernels.reference import ReferenceOps
from aengine.models.store import ModelFiles

PAGE = 4

FullLogits = Callable[[Model, list[int]], torch.Tensor]


def _full_logits(model: Model, ids: list[int]) -> torch.Tensor:
    """Logits [T, V] of one sequence in one step, over pages 1 .. n (page 0 is the null page) of each group."""
    tokens, pages = len(ids), -(-len(ids) // PAGE) + 1
    kv = tuple(
        LayerKV(*(torch.zeros(pages, PAGE, spec.kv_heads, spec.head_dim, dtype=model.dtype) for _ in range(2)))
        for spec in model.attention
    )
    table = torch.arange(1, pages, dtype=torch.int32).unsqueeze(0)
    batch = StepBatch(
        ids=torch.tensor(ids, dtype=torch.int32),
        positions=torch.arange(tokens, dtype=torch.int32),
        row_offsets=torch.tensor([0, tokens], dtype=torch.int32),
        context=torch.tensor([tokens], dtype=torch.int32),
        tables=(table,) * (1 + max(spec.group for spec in model.attention)),
        kv=kv,
        max_context=tokens,
        host_counts=(tokens,),
        host_starts=(0,),
    )
    ops = ReferenceOps()
    with torch.inference_mode():
        return model.logits(ops, model.forward(ops, batch))


@pytest.fixture
def full_logits() -> FullLogits:
    return _full_logits


@pytest.fixture
def hf_files(tmp_path: Path) -> Callable[[Path], ModelFiles]:
    return lambda folder: ModelFiles("hf", folder, folder.name, tmp_path / "home")


@pytest.fixture
def gguf_files(tmp_path: Path) -> Callable[[Path], ModelFiles]:
    return lambda path: ModelFiles("gguf", path, path.stem, tmp_path / "home")


class GGUFBuilder:
    """Writes small GGUF files with the reference writer."""

    def __init__(self, path: Path, architecture: str = "llama") -> None:
        self.path = path
        self.writer = gguf.GGUFWriter(path, architecture)

    def hyper_parameters(self, config: Any) -> GGUFBuilder:
        """What a converter writes for a transformers configuration of the llama, qwen or gemma kind."""
        w = self.writer
        w.add_context_length(config.max_position_embeddings)
        w.add_embedding_length(config.hidden_size)
        w.add_block_count(config.num_hidden_layers)
        w.add_feed_forward_length(config.intermediate_size)
        w.add_head_count(config.num_attention_heads)
        w.add_head_count_kv(config.num_key_value_heads)
        w.add_key_length(config.head_dim)
        w.add_value_length(config.head_dim)
        w.add_layer_norm_rms_eps(config.rms_norm_eps)
        return self

    def tensor(self, name: str, value: torch.Tensor, kind: gguf.GGMLQuantizationType | None = None) -> GGUFBuilder:
        data = value.detach().float().numpy()
        if kind is None:
            self.writer.add_tensor(name, np.ascontiguousarray(data))
        else:
            self.writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        return self

    def write(self) -> Path:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path


@pytest.fixture
def gguf_builder(tmp_path: Path) -> Callable[..., GGUFBuilder]:
    return lambda name="model.gguf", architecture="llama": GGUFBuilder(tmp_path / name, architecture)
