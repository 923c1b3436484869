"""Ids of a step, some of which only the device knows.

Owns: filling them in.
Does not know: slots' lives, plans.
Invariants: nothing waits for the device; an unusable id becomes 0 and is told, so that its row alone fails.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aengine.kernels.triton.device.rows import relay_ids_kernel

_BLOCK = 256


def fill_ids(ids: Tensor, sources: Tensor, relay: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """ids int32 [T] from the host; sources int32 [T]: -1, or the slot whose last token in relay int32 [slots] is meant.

    -> (ids int32 [T] within the vocabulary, unusable bool [T])
    """
    out, unusable = torch.empty_like(ids), torch.empty(ids.shape, dtype=torch.bool, device=ids.device)
    if len(ids):
        relay_ids_kernel[(-(-len(ids) // _BLOCK),)](ids, sources, relay, out, unusable, len(ids), vocab, BLOCK=_BLOCK)
    return out, unusable
