"""What one request does to its logits before a token is chosen: masks, bias, bad words, penalties.

Owns: the per-slot rules made from SamplingParams and TokenRules, and the tokens a slot has seen.
Does not know: batches, temperature, noise, other slots.
Invariants: `apply` changes only the row it is given. History is indexed by absolute position, so writing a token twice,
or one that no later step reads, does no harm. Token ids outside the vocabulary are ignored.

Order: allowed ids, bias, bad words, stop tokens before min_tokens; then repetition, frequency, presence. Presence and
frequency count the output, repetition counts prompt and output.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from aengine.types import SlotSetup

_MASKED = float("-inf")


class SlotRules:
    """Rules of the request in one slot. All tensors are on `device`."""

    def __init__(self, setup: SlotSetup, vocab_size: int, max_model_len: int, device: torch.device) -> None:
        self._sampling = setup.sampling
        self._prompt_tokens = setup.prompt_tokens
        self._vocab_size = vocab_size
        self._device = device
        allowed = setup.sampling.allowed_token_ids
        self._allowed = None if allowed is None else self._ids(allowed)
        self._biased, self._bias = self._make_bias(setup)
        self._stop_ids = self._ids(setup.rules.stop_ids)
        self._bad_tokens = self._ids(word[0] for word in setup.rules.bad_words if len(word) == 1)
        self._bad_words = [self._word(word) for word in setup.rules.bad_words if len(word) > 1 and self._inside(word)]
        self._history = self._make_history(setup, max_model_len)

    def _inside(self, ids: Iterable[int]) -> bool:
        return all(0 <= token < self._vocab_size for token in ids)

    def _ids(self, tokens: Iterable[int]) -> Tensor:
        inside = sorted({token for token in tokens if 0 <= token < self._vocab_size})
        return torch.tensor(inside, dtype=torch.int64, device=self._device)

    def _word(self, word: tuple[int, ...]) -> tuple[Tensor, int]:
        return torch.tensor(word[:-1], dtype=torch.int32, device=self._device), word[-1]

    def _make_bias(self, setup: SlotSetup) -> tuple[Tensor, Tensor]:
        bias = setup.sampling.logit_bias or {}
        ids = self._ids(bias)
        values = [float(bias[token]) for token in ids.tolist()]
        return ids, torch.tensor(values, dtype=torch.float32, device=self._device)

    def _make_history(self, setup: SlotSetup, max_model_len: int) -> Tensor | None:
        """int32 [max_model_len + 1], by position; the one more is for a zombie row at the context's end."""
        if not setup.sampling.needs_history:
            return None
        history = torch.zeros(max_model_len + 1, dtype=torch.int32, device=self._device)
        known = torch.from_numpy(setup.history_ids.copy()).to(self._device)
        history[: len(known)] = known
        return history

    def apply(self, row: Tensor, position: int) -> None:
        """Change the raw logits fp32 [V] of the token that will stand at absolute `position`, in place."""
        if self._allowed is not None:
            kept = row[self._allowed]
            row.fill_(_MASKED)[self._allowed] = kept
        row[self._biased] += self._bias
        self._mask_bad_words(row, position)
        if position - self._prompt_tokens < self._sampling.min_tokens:
            row[self._stop_ids] = _MASKED
        if self._history is not None:
            self._penalise(row, self._history[:position])

    def _mask_bad_words(self, row: Tensor, position: int) -> None:
        row[self._bad_tokens] = _MASKED
        if self._history is None:
            return
        for before, last in self._bad_words:
            start = position - len(before)
            if start >= 0 and torch.equal(self._history[start:position], before):
                row[last] = _MASKED

    def _penalise(self, row: Tensor, seen: Tensor) -> None:
        params = self._sampling
        if params.repetition_penalty != 1.0:
            ids = seen[seen < self._vocab_size]  # image placeholders lie above
            logits = row[ids]
            factor = params.repetition_penalty
            row[ids] = torch.where(logits > 0, logits / factor, logits * factor)  # a repeated id writes one value
        if params.frequency_penalty or params.presence_penalty:
            ids, counts = torch.unique(seen[self._prompt_tokens :], return_counts=True)
            row[ids] = row[ids] - params.frequency_penalty * counts - params.presence_penalty

    def append(self, token: int, position: int) -> None:
        """Note the token sampled for absolute `position`."""
        if self._history is not None and position < len(self._history):
            self._history[position] = token
