"""Small host values on their way to a device.

Owns: `uploaded`.
Does not know: what the values are.
Invariants: no stream is waited for: on CUDA the copy leaves from pinned memory.
"""

from __future__ import annotations

import torch
from torch import Tensor


def uploaded(values: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`; itself where that is the host."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
