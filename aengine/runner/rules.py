"""What one request does to its logits before a token is chosen: masks, bias, bad words, penalties.

Owns: the per-slot rules made from SamplingParams and TokenRules, and the tokens a slot has seen.
Does not know: batches, temperature, noise, other slots.
Invariants: `apply` changes only the row it is given. History is indexed by absolute position, so writing a token twice,
or one that no later step reads, does no harm. Token ids outside the vocabulary are ignored. Nothing here waits for the
device: what is done does not depend on values that lie there.

Order: allowed ids, bias, bad words, stop tokens before min_tokens; then repetition, frequency, presence. Presence and
frequency count the output, repetition counts prompt and output.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from aengine.runner.upload import Upload, plain_upload
from aengine.types import SlotSetup

_MASKED = float("-inf")


class SlotRules:
    """Rules of the request in one slot. All tensors are on `device`."""

    def __init__(
        self,
        setup: SlotSetup,
        vocab_size: int,
        max_model_len: int,
        device: torch.device,
        upload: Upload | None = None,
    ) -> None:
        self._upload = upload or plain_upload(device)
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
        self._counts = None  # by token, one more for what lies above the vocabulary
        if self._history is not None:
            self._counts = torch.zeros(vocab_size + 1, dtype=torch.int32, device=device)

    def _inside(self, ids: Iterable[int]) -> bool:
        return all(0 <= token < self._vocab_size for token in ids)

    def _ids(self, tokens: Iterable[int]) -> Tensor:
        inside = sorted({token for token in tokens if 0 <= token < self._vocab_size})
        return self._upload(np.array(inside, dtype=np.int64))

    def _word(self, word: tuple[int, ...]) -> tuple[Tensor, int]:
        return self._upload(np.array(word[:-1], dtype=np.int32)), word[-1]

    def _make_bias(self, setup: SlotSetup) -> tuple[Tensor, Tensor]:
        bias = setup.sampling.logit_bias or {}
        inside = sorted(token for token in bias if 0 <= token < self._vocab_size)
        values = np.array([bias[token] for token in inside], dtype=np.float32)
        return self._ids(inside), self._upload(values)

    def _make_history(self, setup: SlotSetup, max_model_len: int) -> Tensor | None:
        """int32 [max_model_len + 1], by position; the one more is for a zombie row at the context's end."""
        if not setup.sampling.needs_history:
            return None
        history = torch.zeros(max_model_len + 1, dtype=torch.int32, device=self._device)
        history[: len(setup.history_ids)] = self._upload(setup.history_ids.copy())
        return history

    def apply(self, row: Tensor, position: int) -> None:
        """Change the raw logits fp32 [V] of the token that will stand at absolute `position`, in place."""
        if self._allowed is not None:
            kept = row[self._allowed]
            row.fill_(_MASKED).index_copy_(0, self._allowed, kept)
        row[self._biased] += self._bias
        self._mask_bad_words(row, position)
        if position - self._prompt_tokens < self._sampling.min_tokens:
            row.index_fill_(0, self._stop_ids, _MASKED)
        if self._history is not None:
            self._penalise(row, self._history[:position])

    def _mask_bad_words(self, row: Tensor, position: int) -> None:
        row.index_fill_(0, self._bad_tokens, _MASKED)
        if self._history is None:
            return
        for before, last in self._bad_words:
            start = position - len(before)
            if start >= 0:
                said = (self._history[start:position] == before).all()
                row[last] = torch.where(said, _MASKED, row[last])

    def _penalise(self, row: Tensor, seen: Tensor) -> None:
        params = self._sampling
        if params.repetition_penalty != 1.0:
            ids, counts = self._count(seen)
            logits, factor = row.index_select(0, ids), params.repetition_penalty
            penalised = torch.where(logits > 0, logits / factor, logits * factor)
            row.index_copy_(0, ids, torch.where(counts > 0, penalised, logits))
        if params.frequency_penalty or params.presence_penalty:
            ids, counts = self._count(seen[self._prompt_tokens :])
            logits = row.index_select(0, ids)
            penalised = logits - params.frequency_penalty * counts - params.presence_penalty
            row.index_copy_(0, ids, torch.where(counts > 0, penalised, logits))

    def _count(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """(ids, how often each stands in `seen`) of the same length as `seen`: a repeated id is there as often, so that
        whoever writes by them writes one value. Image placeholders lie above the vocabulary and count as V; in `ids`
        they stand as the last token, with that one's count."""
        assert self._counts is not None
        at = seen.long().clamp_(max=self._vocab_size)
        self._counts.index_fill_(0, at, 0).scatter_add_(0, at, torch.ones_like(seen))
        ids = at.clamp_(max=self._vocab_size - 1)
        return ids, self._counts.index_select(0, ids)

    def append(self, token: int | Tensor, position: int) -> None:
        """Note the token sampled for absolute `position`."""
        if self._history is not None and position < len(self._history):
            self._history[position : position + 1].fill_(token)
