"""The choice of kernels on a CUDA device.

Owns: which backends are there, what `auto` means, one line that says what was chosen.
Does not know: models, memory, steps.
Invariants: a backend that was named is used or an error says why not; `auto` never chooses silently.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Literal

import torch

from aengine.errors import ConfigError
from aengine.kernels.flashinfer import FlashInferOps
from aengine.kernels.ops import Ops
from aengine.kernels.reference import ReferenceOps

Backend = Literal["auto", "flashinfer", "triton", "reference"]


def cuda_ops(backend: Backend, device: torch.device, found: Callable[[str], bool] | None = None) -> tuple[Ops, str]:
    """(kernels, a line for the report). `found(package)`: whether it can be imported."""
    has = found or _has
    triton, flashinfer = has("triton"), has("flashinfer")
    for name, there in (("triton", triton), ("flashinfer", flashinfer)):
        if backend == name and not there:
            text = f"attention_backend is {name}, but the package {name} is not installed (pip install aengine[cuda])"
            raise ConfigError(text, param="attention_backend")
    if backend == "reference" or (backend == "auto" and not triton and not flashinfer):
        why = (
            "as asked"
            if backend == "reference"
            else "neither Triton nor FlashInfer is installed: at a fraction of the speed"
        )
        return ReferenceOps(), f"kernels: plain torch, {why}"
    base = _triton_ops(device) if triton else ReferenceOps()
    if backend == "triton" or not flashinfer:
        return base, "kernels: Triton" + ("" if backend == "triton" else " (FlashInfer is not installed)")
    return FlashInferOps(base, device), f"kernels: FlashInfer attention, the others {base.name}"


def _has(package: str) -> bool:
    if package == "triton" and find_spec("aengine.kernels.triton") is None:
        return False
    return find_spec(package) is not None


def _triton_ops(device: torch.device) -> Ops:
    made: Ops = import_module("aengine.kernels.triton").TritonOps(device)
    return made
