"""Weights by name, read lazily from whatever file holds them.

Owns: the Checkpoint interface; its safetensors and GGUF forms; the mapping of GGUF tensor names and row orders to
Hugging Face's; the digest of a model's weights.
Does not know: what the tensors are for, devices, backends.
Invariants: files are memory-mapped; `tensor` returns new memory of its own, so a loaded model does not depend on the
files. Names and shapes are Hugging Face's. The digest depends on content only, never on paths or times.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aengine.errors import ModelLoadError
from aengine.kernels.quantised import Quantised
from aengine.models.blocks import Unpack, quantised
from aengine.models.config import ModelConfig, read_json
from aengine.models.gguf import GGUFFile, TensorInfo
from aengine.models.quants import dequantise

INDEX = "model.safetensors.index.json"
SAMPLES, SAMPLE_BYTES = 256, 4096  # per file: 1 MiB read whatever the size
DIGEST_SCHEMA = b"aengine weights 1"


class Checkpoint(Protocol):
    """Tensors under Hugging Face names."""

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """A new contiguous tensor. Raises ModelLoadError when the checkpoint has none of this name."""
        ...

    def quantised(self, name: str) -> Quantised | None:
        """The matrix as integers that give `tensor` exactly; None: it is stored plain, or is to be held plain."""
        ...

    def fitted(self, name: str, weight: Tensor) -> Quantised | None:
        """`weight` [out, in], a part of the tensor `name`, as integers; None: it is to be held plain."""
        ...


def missing(where: Path, name: str, names: Iterable[str]) -> ModelLoadError:
    """The error for a tensor that is not there; shows names alike, which usually tell what went wrong."""
    tail = name.rsplit(".", 2)[-2:]
    alike = sorted(other for other in names if other.endswith(".".join(tail)))[:3]
    hint = f"; it has {', '.join(alike)}" if alike else ""
    return ModelLoadError(f"{where}: has no tensor {name!r}{hint}")


class SafetensorsCheckpoint:
    """One file, or the shards of an index."""

    def __init__(self, folder: Path, files: Sequence[Path]) -> None:
        self._folder = folder
        self._handles = [_open_safetensors(path) for path in files]
        self._where = {name: handle for handle in self._handles for name in handle.keys()}  # noqa: SIM118

    def names(self) -> frozenset[str]:
        return frozenset(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle(name).get_slice(name).get_shape())

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        value: Tensor = self._handle(name).get_tensor(name)
        if not value.is_floating_point():
            raise ModelLoadError(f"{self._folder}: tensor {name!r} is {value.dtype}, not a floating point type")
        return value.to(dtype, copy=True, memory_format=torch.contiguous_format)

    def quantised(self, name: str) -> Quantised | None:
        return None

    def fitted(self, name: str, weight: Tensor) -> Quantised | None:
        return None

    def has(self, name: str) -> bool:
        return name in self._where

    def stored(self, name: str) -> Tensor:
        """The tensor as it lies in the file, of any type."""
        value: Tensor = self._handle(name).get_tensor(name)
        return value

    def stored_shape(self, name: str) -> tuple[int, ...]:
        return self.shape(name)

    def stored_type(self, name: str) -> str:
        """The file's own name of the element type: I8, F8_E4M3, F16 .."""
        return str(self._handle(name).get_slice(name).get_dtype())

    def _handle(self, name: str) -> Any:
        if name not in self._where:
            raise missing(self._folder, name, self._where)
        return self._where[name]


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path}: cannot be read as safetensors: {error}") from error


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files of a folder, in name order. Raises ModelLoadError when some or all are missing."""
    index = folder / INDEX
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise ModelLoadError(f"{index}: has no weight_map")
        names = sorted(set(map(str, weight_map.values())))
        for name in names:
            if (
                Path(name).name != name or name in ("", "..") or "\0" in name
            ):  # a stranger's index must not open files elsewhere
                raise ModelLoadError(f"{index}: shard {name[:100]!r} is not the name of a file beside it")
        files = [folder / name for name in names]
        absent = [path.name for path in files if not path.exists()]
        if absent:
            raise ModelLoadError(f"{folder}: {len(absent)} of {len(files)} shards are missing: {', '.join(absent[:5])}")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = sorted(path.name for path in folder.glob("*.bin"))[:3]
        hint = f" (found {', '.join(others)}: convert to safetensors first)" if others else ""
        raise ModelLoadError(f"{folder}: has no .safetensors file{hint}")
    return files


_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_GGUF_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Gemma norms both before and after each half of a layer, so the same Hugging Face name means another tensor.
_GGUF_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


class GGUFCheckpoint:
    """A GGUF file seen through Hugging Face's names and row order. `unpack`: see `blocks.quantised`."""

    def __init__(self, file: GGUFFile, config: ModelConfig, unpack: Unpack | None = None) -> None:
        self._file, self._config, self._unpack = file, config, unpack
        layer = _GGUF_LAYER | (_GGUF_GEMMA if config.family == "gemma3" else {})
        self._back = {gguf: hf for hf, gguf in layer.items()}
        self._layer = layer

    def names(self) -> frozenset[str]:
        top = {gguf: hf for hf, gguf in _GGUF_TOP.items()}
        return frozenset(top.get(name) or self._hf_layer_name(name) for name in self._file.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info(name).shape

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        info = self._info(name)
        value = dequantise(torch.from_numpy(self._file.raw(info.name)), info.type, info.shape, dtype)
        heads = self._interleaved_heads(name)
        return rows_to_halves(value, heads) if heads else value

    def quantised(self, name: str) -> Quantised | None:
        info = self._info(name)
        part = quantised(torch.from_numpy(self._file.raw(info.name)), info.type, info.shape, self._unpack)
        heads = self._interleaved_heads(name)
        return part.with_rows(partial(rows_to_halves, heads=heads)) if part is not None and heads else part

    def fitted(self, name: str, weight: Tensor) -> Quantised | None:
        return None

    def _info(self, name: str) -> TensorInfo:
        info = self._file.tensors.get(self._gguf_name(name))
        if info is None:
            raise missing(self._file.path, name, self.names())
        return info

    def _gguf_name(self, name: str) -> str:
        match = _LAYER.fullmatch(name)
        if match:
            return f"blk.{match[1]}.{self._layer.get(match[2], match[2])}.{match[3]}"
        return _GGUF_TOP.get(name, name)

    def _hf_layer_name(self, name: str) -> str:
        parts = name.split(".")
        if len(parts) != 4 or parts[0] != "blk":
            return name
        return f"model.layers.{parts[1]}.{self._back.get(parts[2], parts[2])}.{parts[3]}"

    def _interleaved_heads(self, name: str) -> int:
        """How many heads' rows are stored for interleaved rotation; 0 when the rows are as they should be."""
        if self._config.family != "llama":
            return 0
        if ".self_attn.q_proj." in name:
            return self._config.heads
        return self._config.kv_heads if ".self_attn.k_proj." in name else 0


def rows_to_halves(value: Tensor, heads: int) -> Tensor:
    """Undo the row order of GGUF's "llama" architecture: rows (0, d/2, 1, d/2 + 1, ..) of a head -> (0, 1, .., d - 1).

    value [heads * d, ...] -> new tensor of the same shape.
    """
    pairs = value.reshape(heads, -1, 2, *value.shape[1:])
    return pairs.transpose(1, 2).reshape(value.shape)


def files_digest(head: bytes, files: Sequence[Path]) -> bytes:
    """SHA-256 over `head` (configuration) and of each file, in order, its size and evenly spaced samples.

    Reads about 1 MiB a file: cheap for any size, and any training step, quantisation or conversion changes it.
    """
    digest = hashlib.sha256(DIGEST_SCHEMA)
    _update(digest, head)
    for path in files:
        size = path.stat().st_size
        _update(digest, size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for index in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * index // (SAMPLES - 1))
                _update(digest, file.read(SAMPLE_BYTES))
    return digest.digest()


def _update(digest: hashlib._Hash, value: bytes) -> None:
    digest.update(len(value).to_bytes(8, "little"))
    digest.update(value)
