"""The choice of kernels on a CUDA device.

Owns: which backends are there, what `auto` means, one line that says what was chosen.
Does not know: models, memory, steps.
Invariants: a backend that was named is used or an error says why not; `auto` never chooses silently.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Literal

import torch

from aengine.errors import ConfigError
from aengine.kernels.flashinfer import FlashInferOps
from aengine.kernels.ops import Ops
from aengine.kernels.reference import ReferenceOps

Backend = Literal["auto", "flashinfer", "triton", "reference"]


def cuda_ops(backend: Backend, device: torch.device, why_not: Callable[[str], str] | None = None) -> tuple[Ops, str]:
    """(kernels, a line for the report). `why_not(package)`: why it cannot be imported; "" when it can."""
    asked = why_not or importable
    triton = asked("triton") if backend != "reference" else "not asked for"
    flashinfer = asked("flashinfer") if backend in ("auto", "flashinfer") else "not asked for"
    for name, reason in (("triton", triton), ("flashinfer", flashinfer)):
        if backend == name and reason:
            text = f"attention_backend is {name}, but it cannot be used: {reason} (pip install -e '.[cuda]')"
            raise ConfigError(text, param="attention_backend")
    if triton and flashinfer:
        if backend == "reference":
            return ReferenceOps(), "kernels: plain torch, as asked"
        reasons = f"no Triton ({triton}), no FlashInfer ({flashinfer})"
        return ReferenceOps(), f"kernels: plain torch, at a fraction of the speed: {reasons}"
    base = ReferenceOps() if triton else _triton_ops(device)
    others = f"plain torch ({triton})" if triton else "Triton"
    if flashinfer:
        return base, "kernels: Triton" + ("" if backend == "triton" else f"; no FlashInfer ({flashinfer})")
    return FlashInferOps(base, device), f"kernels: FlashInfer's attention, the others {others}"


def importable(package: str) -> str:
    """ "" or why not. Packages of kernels load libraries, so that more than ImportError may come of it."""
    try:
        import_module(package)
        if package == "triton":
            import_module("aengine.kernels.triton")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _triton_ops(device: torch.device) -> Ops:
    made: Ops = import_module("aengine.kernels.triton").TritonOps(device)
    return made
