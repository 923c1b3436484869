"""What a model's weights are held as, and what they take.

Owns: the compute dtype, the choice of integer weights, the count of a model's bytes.
Does not know: files, devices' memory, kernels.
Invariants: a dtype that was asked for is never replaced; every tensor is counted once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass

import torch

from aengine.config import EngineConfig
from aengine.kernels.native.library import Block
from aengine.kernels.ops import Model, Ops
from aengine.kernels.reference import ReferenceOps
from aengine.models.holding import Hold


def dtype_of(config: EngineConfig, unasked: torch.dtype = torch.float32) -> torch.dtype:
    """On the CPU fp32 unless asked: bf16 arithmetic without hardware support is slower than fp32 and less exact."""
    named = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    return named.get(config.model.dtype, unasked)


def hold_of(config: EngineConfig, ops: Ops) -> Hold:
    """What linears are held as. A dtype that was asked for means exact arithmetic in it, so dense weights; plain torch
    computes with dense weights only, so integers would be kept for nothing."""
    wanted = config.model.quantize
    if wanted == "auto":
        return "stored" if config.model.dtype == "auto" and not isinstance(ops, ReferenceOps) else "plain"
    return "plain" if wanted == "none" else wanted


def model_bytes(model: Model) -> int:
    """Bytes of all weights a model holds, each once: tensors with memory, and packed blocks."""
    sizes: dict[int, int] = {}
    _weigh(list(vars(model).values()), sizes)
    return sum(sizes.values())


def _weigh(found: Iterable[object], sizes: dict[int, int]) -> None:
    for value in found:
        if isinstance(value, torch.Tensor):
            if value.device.type != "meta":  # the shape of a packed weight
                sizes[id(value)] = value.nbytes
        elif isinstance(value, Block):
            sizes[value.address] = value.size
        elif isinstance(value, list | tuple):
            _weigh(value, sizes)
        elif is_dataclass(value) and not isinstance(value, type):
            _weigh([getattr(value, leaf.name) for leaf in fields(value)], sizes)
