"""Draft tokens: guesses of a sequence's next tokens, verified by the model in one step.

Owns: the `Drafter` protocol and `PromptLookup`, which guesses by finding the last few tokens earlier in the sequence.
Does not know: slots, pages, devices.
Invariants: drafting never changes a request's tokens: noise is keyed by position, so a draft is accepted exactly when
it equals what would have been sampled.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from aengine.types import Int32s


class Drafter(Protocol):
    def propose(self, ids: Int32s, limit: int) -> Int32s:
        """At most `limit` draft tokens int32 [m] to follow `ids` int32 [known]; empty when there is no good guess."""
        ...


class PromptLookup:
    """Prompt lookup decoding (Saxena, 2023): continue as the sequence did after the same n-gram before.

    Looks for the most recent earlier occurrence of the last `ngram` tokens within `window_tokens`, and proposes what
    followed it.
    """

    def __init__(self, draft_tokens: int, ngram: int = 3, window_tokens: int = 4096) -> None:
        self._draft_tokens = draft_tokens
        self._ngram = ngram
        self._window_tokens = window_tokens

    def propose(self, ids: Int32s, limit: int) -> Int32s:
        recent = ids[-self._window_tokens :]
        n = self._ngram
        if len(recent) <= n or limit <= 0:
            return recent[:0]
        windows = np.lib.stride_tricks.sliding_window_view(recent[:-1], n)
        matches = np.flatnonzero((windows == recent[-n:]).all(axis=1))
        if not len(matches):
            return recent[:0]
        after = int(matches[-1]) + n
        return recent[after : after + min(self._draft_tokens, limit)]
