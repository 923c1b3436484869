"""Choosing tokens by FlashInfer's sampling kernels, where no request depends on which tokens come.

Owns: which rows FlashInfer draws, its calls.
Does not know: rules, logits' origin, how the other rows are chosen.
Invariants: never chosen unasked. A request that brings a seed, is greedy or uses min-p is left to the other chooser, so
its tokens stay a function of seed and position. FlashInfer numbers its random streams by the row's place in the batch:
seeds and positions are handed to it, but tokens of unseeded requests differ between batches all the same.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aengine.runner.cuda.sampler import Chooser, faults_of, take_rows
from aengine.runner.noise import LEAST_TEMPERATURE, seed_word
from aengine.runner.upload import Upload
from aengine.types import Int32s, Int64s, SlotSetup

_NO_TOP_K = 2**30  # more than any vocabulary


class FlashInferChooser:
    """`Chooser` over `other`, which takes the rows that FlashInfer must not draw; `library` stands in for the package
    in tests."""

    def __init__(self, slots: int, other: Chooser, upload: Upload, library: Any = None) -> None:
        self._other, self._upload = other, upload
        self._library = library or import_module("flashinfer.sampling")
        self._drawn = np.zeros(slots, dtype=bool)
        self._temperature = np.zeros(slots, dtype=np.float32)
        self._top_k = np.full(slots, _NO_TOP_K, dtype=np.int32)
        self._top_p = np.ones(slots, dtype=np.float32)
        self._seed = np.zeros(slots, dtype=np.int64)

    def setup(self, setup: SlotSetup) -> None:
        self._other.setup(setup)
        params, slot = setup.sampling, setup.slot
        self._drawn[slot] = params.seed is None and params.temperature > 0.0 and params.min_p <= 0.0
        self._temperature[slot] = max(params.temperature, LEAST_TEMPERATURE)
        self._top_k[slot] = params.top_k if params.top_k > 0 else _NO_TOP_K
        self._top_p[slot] = params.top_p
        self._seed[slot] = seed_word(setup.seed).view(np.int64)

    def choose(self, logits: Tensor, slots: Int32s, positions: Int64s) -> tuple[Tensor, Tensor]:
        mine = np.flatnonzero(self._drawn[slots])
        if not mine.size:
            return self._other.choose(logits, slots, positions)
        if len(mine) == len(slots):
            return self._draw(logits, slots, positions)
        others = np.flatnonzero(~self._drawn[slots])
        parts = []
        for rows, choose in ((mine, self._draw), (others, self._other.choose)):
            parts.append(choose(take_rows(logits, rows, self._upload), slots[rows], positions[rows]))
        order = self._upload(np.argsort(np.concatenate((mine, others))))
        tokens, faults = (torch.cat(both).index_select(0, order) for both in zip(*parts, strict=True))
        return tokens, faults

    def _draw(self, logits: Tensor, slots: Int32s, positions: Int64s) -> tuple[Tensor, Tensor]:
        best = logits.amax(-1)
        faults = faults_of(best)
        floats = self._upload(np.stack((self._temperature[slots], self._top_p[slots])))
        words = self._upload(np.stack((self._seed[slots], positions.astype(np.int64))))
        z = (logits - best.unsqueeze(1)).div_(floats[0].unsqueeze(1))
        keys = {"deterministic": True, "seed": words[0], "offset": words[1]}
        if (self._top_k[slots] >= logits.shape[1]).all() and (self._top_p[slots] >= 1.0).all():
            tokens = self._library.sampling_from_logits(logits=z, **keys)
        else:
            top_k = self._upload(np.minimum(self._top_k[slots], logits.shape[1]).astype(np.int32))
            tokens = self._library.top_k_top_p_sampling_from_logits(
                logits=z, top_k=top_k, top_p=floats[1], filter_apply_order="top_k_first", **keys
            )
        return tokens.long(), faults
