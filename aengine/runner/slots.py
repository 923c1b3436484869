"""Sampling state of all slots: plain columns for what every row needs, rules for the few that need more.

Owns: the columns, indexed by slot, and when a slot's rules are live.
Does not know: logits, plans, the order of steps (its owner calls it in stream order).
Invariants: a slot's whole state is replaced by each setup; nothing of the former request remains.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from aengine.runner.noise import Keys, make_keys, seed_word
from aengine.runner.rules import SlotRules
from aengine.runner.support import Cuts
from aengine.runner.upload import Upload
from aengine.types import Int32s, Int64s, SlotSetup

OFF = -1


class SlotTable:
    """Columns over `slots` slots. Reading one that was never set up gives greedy sampling."""

    def __init__(
        self, slots: int, vocab_size: int, max_model_len: int, device: torch.device, upload: Upload | None = None
    ) -> None:
        self._upload = upload
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._device = device
        self.temperature = np.zeros(slots, dtype=np.float64)
        self.logprobs = np.full(slots, OFF, dtype=np.int32)
        self.prompt_logprobs = np.full(slots, OFF, dtype=np.int32)
        self.filtered = np.zeros(slots, dtype=bool)
        self._top_k = np.zeros(slots, dtype=np.int64)
        self._top_p = np.ones(slots, dtype=np.float64)
        self._min_p = np.zeros(slots, dtype=np.float64)
        self._seed = np.zeros(slots, dtype=np.uint64)
        self._always = np.zeros(slots, dtype=bool)  # rules apply at every position
        self._until = np.zeros(slots, dtype=np.int64)  # rules apply below this position (min_tokens)
        self.rules: list[SlotRules | None] = [None] * slots

    def setup(self, setup: SlotSetup) -> None:
        """Replace the state of a slot by that of the request which moves in."""
        slot, params = setup.slot, setup.sampling
        self.temperature[slot] = params.temperature
        self.logprobs[slot] = OFF if params.logprobs is None else params.logprobs
        self.prompt_logprobs[slot] = OFF if params.prompt_logprobs is None else params.prompt_logprobs
        self._top_k[slot] = max(params.top_k, 0)
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self.filtered[slot] = 0 < params.top_k < self._vocab_size or params.top_p < 1.0 or params.min_p > 0.0
        self._seed[slot] = seed_word(setup.seed)
        self._always[slot] = _always_ruled(setup)
        self._until[slot] = setup.prompt_tokens + params.min_tokens if setup.rules.stop_ids else 0
        ruled = self._always[slot] or params.min_tokens > 0
        self.rules[slot] = (
            SlotRules(setup, self._vocab_size, self._max_model_len, self._device, self._upload) if ruled else None
        )

    def ruled(self, slots: Int32s, positions: Int64s) -> NDArray[np.bool_]:
        """Which rows have logits to be changed before the token at `positions` is chosen."""
        live: NDArray[np.bool_] = self._always[slots] | (positions < self._until[slots])
        return live

    def keys(self, slots: Int32s, positions: Int64s) -> Keys:
        return make_keys(self._seed[slots], positions)

    def cuts(self, slots: Int32s) -> Cuts:
        return Cuts(self._top_k[slots], self._top_p[slots], self._min_p[slots])


def _always_ruled(setup: SlotSetup) -> bool:
    params = setup.sampling
    shaped = params.allowed_token_ids is not None or bool(params.logit_bias) or bool(setup.rules.bad_words)
    return shaped or params.needs_history
