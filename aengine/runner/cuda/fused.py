"""Choosing tokens by one fused kernel for all rows, greedy and random, filtered or not.

Owns: the columns by slot that the kernel reads, and their upkeep.
Does not know: how the kernel chooses, rules, logits' origin.
Invariants: a column changes on the compute stream, at the setup of its slot, behind all steps of the slot's earlier
owner. The kernel's fault codes are those of `cuda.sampler`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aengine.runner.noise import seed_word
from aengine.runner.upload import Upload
from aengine.types import Int32s, Int64s, SlotSetup

SAMPLING = "aengine.kernels.triton.sampling"


class FusedChooser:
    """`Chooser` by the Triton backend's sampling; `library` stands in for it in tests."""

    def __init__(self, slots: int, device: torch.device, upload: Upload, library: Any = None) -> None:
        self._library = library or import_module(SAMPLING)
        self._columns = self._library.slot_parameters(slots, device)
        self._device, self._upload = device, upload

    def setup(self, setup: SlotSetup) -> None:
        columns, params, slot = self._columns, setup.sampling, setup.slot
        columns.temperature[slot].fill_(params.temperature)
        columns.top_k[slot].fill_(max(params.top_k, 0))
        columns.top_p[slot].fill_(params.top_p)
        columns.floor[slot].fill_(self._library.min_p_floor(params.min_p))
        columns.seed[slot].fill_(int(seed_word(setup.seed).view(np.int64)))

    def choose(self, logits: Tensor, slots: Int32s, positions: Int64s) -> tuple[Tensor, Tensor]:
        where = self._upload(np.stack((slots.astype(np.int32), positions.astype(np.int32))))
        faults = torch.empty(len(slots), dtype=torch.int32, device=self._device)
        tokens = self._library.sample(
            logits=logits, slots=where[0], positions=where[1], parameters=self._columns, faults=faults
        )
        return tokens.long(), faults
