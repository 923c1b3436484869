"""How host values become tensors of the device.

Owns: the `Upload` type and its plain form.
Does not know: pinned memory, streams.
Invariants: an upload is a new tensor, or an alias of host memory where host and device are one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

Upload = Callable[[NDArray[Any]], Tensor]


def plain_upload(device: torch.device) -> Upload:
    """By a copy that the host waits for."""
    return lambda values: torch.from_numpy(values).to(device)
