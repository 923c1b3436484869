"""From model files to a configuration, a loaded model, a tokenizer and a digest.

Owns: the choice between the Hugging Face and the GGUF form.
Does not know: how names are resolved (store), how any part reads its file.
Invariants: each function reads only what it needs; no function keeps files open after it returns, except that a loaded
GGUF map lives while tensors made from it are being built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from aengine.kernels.ops import Model, Ops
from aengine.kernels.quantised import Quantised
from aengine.kernels.reference import ReferenceOps
from aengine.models.blocks import Unpack
from aengine.models.checkpoint import (
    Checkpoint,
    GGUFCheckpoint,
    SafetensorsCheckpoint,
    files_digest,
    safetensors_files,
)
from aengine.models.config import ModelConfig
from aengine.models.facts import load_config
from aengine.models.gguf import open_gguf
from aengine.models.holding import HeldCheckpoint, Hold
from aengine.models.placing import PlacedCheckpoint, place
from aengine.models.registry import MODELS
from aengine.models.store import ModelFiles, Progress
from aengine.models.tokenizer import load_tokenizer

__all__ = [
    "ModelFiles",
    "load_config",
    "load_model",
    "load_tokenizer",
    "open_checkpoint",
    "outline",
    "weights_digest",
]


class _Shapes:
    """A checkpoint's tensors on the meta device: shapes without values, but for scalars and what rope tables are made
    of, which models turn into host numbers and tables at load."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def names(self) -> frozenset[str]:
        return self._checkpoint.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(name)

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        shape = self.shape(name)
        if name == "rope_freqs.weight" or math.prod(shape) == 1:
            return self._checkpoint.tensor(name, dtype)
        return torch.empty(shape, dtype=dtype, device="meta")

    def quantised(self, name: str) -> Quantised | None:
        return None

    def fitted(self, name: str, weight: torch.Tensor) -> Quantised | None:
        return None


def outline(files: ModelFiles, dtype: torch.dtype) -> Model:
    """The model without its weights, to ask what it would hold: it cannot run. Reads the files' directories only."""
    config = load_config(files)
    return MODELS[config.family].load(config, _Shapes(open_checkpoint(files, config)), ReferenceOps(), dtype)


def open_checkpoint(files: ModelFiles, config: ModelConfig, unpack: Unpack | None = None) -> Checkpoint:
    """The model's tensors by Hugging Face name. `unpack`: how a backend takes GGML blocks apart, if it does. Raises
    ModelLoadError when weight files are missing or malformed."""
    if files.kind == "gguf":
        return GGUFCheckpoint(open_gguf(files.path), config, unpack)
    plain = SafetensorsCheckpoint(files.path, safetensors_files(files.path))
    if config.quantised is None:
        return plain
    from aengine.models.packed_checkpoint import PackedCheckpoint
    from aengine.models.packings import packings_of

    return PackedCheckpoint(plain, packings_of(config.quantised))


def load_model(
    files: ModelFiles,
    ops: Ops,
    dtype: torch.dtype,
    progress: Progress | None = None,
    *,
    hold: Hold = "plain",
    device: torch.device | None = None,
    tell: Callable[[str], None] | None = None,
) -> Model:
    """Read all weights, plain ones in `dtype` (float32 or bfloat16), and prepare them for `ops`.

    `progress("load weights", layers done, layers)` after each layer; `tell` gets one line on what linears are held as.
    Peak memory: the weights plus one layer. `device`: where dense weights go, one by one as they are read.
    """
    config = load_config(files)
    opened = open_checkpoint(files, config, getattr(ops, "unpack_blocks", None))
    held = HeldCheckpoint(opened, hold, float8=bool(getattr(ops, "holds_float8", False)))
    source: Checkpoint = held if device is None else PlacedCheckpoint(held, device)
    with _one_thread():
        model = MODELS[config.family].load(config, source, ops, dtype, progress)
    if device is not None:
        place(model, device)
    if tell:
        tell(held.summary(str(dtype).removeprefix("torch.")))
    return model


@contextmanager
def _one_thread() -> Iterator[None]:
    """Loading is thousands of short ops bound by memory: two OpenMP threads save a third of 1.3 s on an idle machine,
    but on a busy one each op's barrier waits for the scheduler (10 s measured)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def weights_digest(files: ModelFiles) -> bytes:
    """32 bytes that name the weights by content: sampled bytes, sizes and configuration. Never paths or times."""
    if files.kind == "gguf":
        return files_digest(open_gguf(files.path).metadata_digest(), [files.path])
    return files_digest((files.path / "config.json").read_bytes(), safetensors_files(files.path))
