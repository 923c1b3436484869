"""Grammar masks on their way to the logits.

Owns: which of some positions have a mask, and masks as booleans.
Does not know: grammars, slots, how tokens are chosen.
Invariants: tokens above the last bit of a mask are not allowed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aengine.types import Choices, Int32s, Int64s


@dataclass(frozen=True, slots=True)
class Masks:
    """Of some positions: `rows` int64 [n] are those with a mask, `bits` int32 [n, W] the masks (see `Choices`)."""

    rows: Int64s
    bits: Int32s


def masks_of(choices: Choices, deferred: Int64s) -> Masks:
    """For positions that are the rows `deferred` of a plan, in order."""
    return Masks(np.searchsorted(deferred, choices.rows), choices.masks)


def disallowed(bits: Tensor, vocab: int) -> Tensor:
    """bits int32 [n, W] -> bool [n, vocab], where they lie."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    wide = (bits.unsqueeze(-1).bitwise_right_shift(places) & 1 == 0).flatten(1)[:, :vocab]
    missing = vocab - wide.shape[1]
    return torch.nn.functional.pad(wide, (0, missing), value=True) if missing > 0 else wide
