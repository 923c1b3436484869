"""Choosing tokens without the host: everything is enqueued, nothing is looked at.

Owns: the order of operations of `runner.sampler` on device tensors, fault codes in place of messages.
Does not know: models, plans, KV, when results reach the host.
Invariants: which rows take which path is decided by host columns alone; logits are never read by the host. A position's
token depends on its own logits, its slot's setup and its absolute position only. Of equal scores the lowest id wins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.errors import ALL_RULED_OUT
from aengine.runner.logprobs import logprob_tensors
from aengine.runner.masks import Masks, disallowed
from aengine.runner.noise import LEAST_TEMPERATURE, TokenNoise
from aengine.runner.slots import OFF, SlotTable
from aengine.runner.support import Cuts, min_p_floors
from aengine.runner.upload import Upload
from aengine.types import Int32s, Int64s, SlotSetup

# Codes as kernels that choose tokens tell them; 1 is the engine's own.
SOUND, NO_TOKEN, NAN, INFINITE, MASKED, RULED_OUT = 0, 1, 4, 5, 6, 9
MESSAGES = {
    NAN: "the model's logits hold NaN",
    INFINITE: "the model's logits hold infinity",
    MASKED: "all tokens are masked: the model's logits are minus infinity everywhere",
    RULED_OUT: ALL_RULED_OUT,
}
_LEAST = float(np.finfo(np.float32).min)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Of N positions: tokens int64 [N] (0 where faulty), faults int32 [N]; `logprobs`: (positions, tensors as of
    `Logprobs`), those with equally many alternatives together."""

    tokens: Tensor
    faults: Tensor
    logprobs: tuple[tuple[Int64s, tuple[Tensor, Tensor, Tensor]], ...]


class Chooser(Protocol):
    """Chooses tokens by logits that rules have shaped. Temperature 0: the best one."""

    def setup(self, setup: SlotSetup) -> None:
        """A request moves into a slot; the slot table knows it already."""
        ...

    def choose(self, logits: Tensor, slots: Int32s, positions: Int64s) -> tuple[Tensor, Tensor]:
        """-> (tokens int64 [N], faults int32 [N]: SOUND, NAN, INFINITE or MASKED). May use the logits up."""
        ...


MakeChooser = Callable[[int, torch.device, Upload], Chooser]


class DeviceSampler:
    """Sampling state of `slots` slots. Called with the compute stream current, in step order.

    `chooser(slots, device, upload)` makes what chooses tokens; None: plain torch.
    """

    def __init__(
        self,
        slots: int,
        vocab_size: int,
        max_model_len: int,
        device: torch.device,
        upload: Upload,
        chooser: MakeChooser | None = None,
    ) -> None:
        self.slots = SlotTable(slots, vocab_size, max_model_len, device, upload)
        self._upload = upload
        self._chooser: Chooser
        if chooser is None:
            self._chooser = TorchChooser(self.slots, vocab_size, device, upload)
        else:
            self._chooser = chooser(slots, device, upload)

    def setup(self, setup: SlotSetup) -> None:
        """A request moves into a slot."""
        self.slots.setup(setup)
        self._chooser.setup(setup)

    def draw(self, logits: Tensor, slots: Int32s, positions: Int64s, masks: Masks | None = None) -> Drawn:
        """logits fp32 [N, V] (used up), slots [N], positions [N] of the sampled tokens; `masks` of some of them."""
        wanted = np.flatnonzero(self.slots.logprobs[slots] != OFF)
        raw = take_rows(logits, wanted, self._upload) if wanted.size else None
        by_rule = self.slots.ruled(slots, positions)
        shaped = by_rule.copy()
        if masks is not None:
            shaped[masks.rows] = True
        ruled = np.flatnonzero(shaped)
        before = faults_of(logits.index_select(0, self._upload(ruled)).amax(-1)) if ruled.size else None
        if masks is not None and len(masks.rows):
            self._apply_masks(logits, masks)
        self._apply_rules(logits, slots, positions, np.flatnonzero(by_rule))
        tokens, faults = self._chooser.choose(logits, slots, positions)
        if before is not None:
            faults = self._with_rules(faults, ruled, before)
        tokens = torch.where(faults > SOUND, 0, tokens)
        for row, slot in enumerate(slots.tolist()):
            rules = self.slots.rules[slot]
            if rules is not None:
                rules.append(tokens[row], int(positions[row]))
        logprobs = () if raw is None else self._logprobs(raw, wanted, slots, tokens)
        return Drawn(tokens, faults, logprobs)

    def _apply_masks(self, logits: Tensor, masks: Masks) -> None:
        rows = self._upload(masks.rows)
        gone = disallowed(self._upload(masks.bits), logits.shape[1])
        logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill(gone, float("-inf")))

    def _apply_rules(self, logits: Tensor, slots: Int32s, positions: Int64s, ruled: NDArray[np.int64]) -> None:
        """Shape the logits of ruled rows in place."""
        for row in ruled.tolist():
            rules = self.slots.rules[slots[row]]
            assert rules is not None, f"slot {slots[row]} is ruled but has no rules"
            rules.apply(logits[row], int(positions[row]))

    def _with_rules(self, faults: Tensor, ruled: NDArray[np.int64], before: Tensor) -> Tensor:
        """`before`: the faults of `ruled` rows before their logits were shaped, which masks may hide."""
        at = self._upload(ruled)
        after = faults.index_select(0, at)
        told = torch.where(before > SOUND, before, torch.where(after == MASKED, RULED_OUT, after))
        return faults.index_copy(0, at, told)

    def score(self, logits: Tensor, targets: Int32s, slot: int) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of prompt tokens [N] by logits fp32 [N, V], as the request in `slot` wants them."""
        wanted = self._upload(targets.astype(np.int64))
        k = min(max(0, int(self.slots.prompt_logprobs[slot])), logits.shape[1])
        return logprob_tensors(logits, wanted, k)

    def _logprobs(
        self, raw: Tensor, wanted: NDArray[np.int64], slots: Int32s, tokens: Tensor
    ) -> tuple[tuple[Int64s, tuple[Tensor, Tensor, Tensor]], ...]:
        counts = np.minimum(self.slots.logprobs[slots[wanted]], raw.shape[1])
        made = []
        for k in np.unique(counts).tolist():
            group = np.flatnonzero(counts == k)
            chosen = take_rows(tokens, wanted[group], self._upload)
            made.append((wanted[group], logprob_tensors(take_rows(raw, group, self._upload), chosen, k)))
        return tuple(made)


class TorchChooser:
    """`Chooser` in plain torch: a pass over the vocabulary for every operation."""

    def __init__(self, slots: SlotTable, vocab_size: int, device: torch.device, upload: Upload) -> None:
        self._slots, self._upload = slots, upload
        self._noise = TokenNoise(vocab_size, device)

    def setup(self, setup: SlotSetup) -> None:
        """Nothing beside the slot table."""

    def choose(self, logits: Tensor, slots: Int32s, positions: Int64s) -> tuple[Tensor, Tensor]:
        tokens = logits.argmax(-1)
        values = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
        faults = faults_of(values)
        rows = np.flatnonzero(self._slots.temperature[slots] > 0.0)
        if not rows.size:
            return tokens, faults
        drawn = slots[rows]
        keys = self._slots.keys(drawn, positions[rows])
        scale = np.maximum(self._slots.temperature[drawn].astype(np.float32), np.float32(LEAST_TEMPERATURE))
        columns = self._upload(np.stack((scale.view(np.int32), keys.k0.view(np.int32), keys.k1.view(np.int32))))
        at = None if len(rows) == len(slots) else self._upload(rows)
        z = logits if at is None else logits.index_select(0, at)
        best = values if at is None else values.index_select(0, at)
        z = (z - best.unsqueeze(1)).div_(columns[0].view(torch.float32).unsqueeze(1))
        filtered = np.flatnonzero(self._slots.filtered[drawn])
        if filtered.size:
            self._filter(z, filtered, self._slots.cuts(drawn[filtered]))
        chosen = z.add_(self._noise.gumbel_rows(columns[1], columns[2])).argmax(-1)
        return (chosen if at is None else tokens.index_copy(0, at, chosen)), faults

    def _filter(self, z: Tensor, rows: NDArray[np.int64], cuts: Cuts) -> None:
        """Mask what top-k, top-p and min-p leave out, in place."""
        part = take_rows(z, rows, self._upload)
        part.masked_fill_(part < device_thresholds(part, cuts, self._upload).unsqueeze(1), float("-inf"))
        if len(rows) == len(z):
            z.copy_(part)
        else:
            z.index_copy_(0, self._upload(rows), part)


def take_rows(x: Tensor, rows: NDArray[np.int64], upload: Upload) -> Tensor:
    """A copy of the rows."""
    return x.clone() if len(rows) == len(x) else x.index_select(0, upload(rows))


def device_thresholds(z: Tensor, cuts: Cuts, upload: Upload) -> Tensor:
    """As `support.thresholds`, by one sort: z fp32 [N, V], each row's maximum 0 -> fp32 [N]."""
    vocab = z.shape[1]
    top_k = np.where((cuts.top_k <= 0) | (cuts.top_k >= vocab), vocab, cuts.top_k)
    columns = upload(np.stack((top_k.astype(np.float64), cuts.top_p, min_p_floors(cuts.min_p).astype(np.float64))))
    falling = z.sort(-1, descending=True).values
    kth = falling.gather(1, (columns[0].long() - 1).unsqueeze(1)).squeeze(1)
    floor = torch.maximum(columns[2].float(), torch.where(columns[0] < vocab, kth, _LEAST))
    if (cuts.top_p >= 1.0).all():
        return floor
    inside = falling >= floor.unsqueeze(1)
    mass = torch.where(inside, falling.double().exp(), 0.0).cumsum(-1)
    short = (mass < columns[1].unsqueeze(1) * mass[:, -1:]).sum(-1)  # entries before the first that holds the mass
    last = falling.gather(1, short.clamp_(max=vocab - 1).unsqueeze(1)).squeeze(1)
    return torch.where(columns[1] < 1.0, torch.maximum(floor, last), floor)


def faults_of(values: Tensor) -> Tensor:
    """int32 [N] from each row's greatest logit."""
    codes = torch.where(values.isnan(), NAN, torch.where(values > 0, INFINITE, MASKED))
    return torch.where(values.isfinite(), SOUND, codes).int()
