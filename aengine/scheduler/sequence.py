"""One request on its way through the scheduler, and the waiting room it starts in.

Owns: `Sequence`, the mutable state of a request outside the columns, and `WaitingRoom`, ordered by priority then age.
Does not know: budgets, pages.
Invariants: a sequence is in exactly one place: waiting (slot -1), running (slot >= 0) or finished.
"""

from __future__ import annotations

import bisect

import numpy as np

from aengine.prefix_cache import Lease
from aengine.scheduler.matcher import Matcher
from aengine.types import Int32s, Request


class Sequence:
    """`ids` int32 [known] are the tokens to (re)compute when it is admitted: prompt plus output so far."""

    __slots__ = (
        "aborted",
        "admitted",
        "finished",
        "ids",
        "key",
        "lease",
        "matcher",
        "prompt_logprobs_done",
        "request",
        "slot",
        "takes_over",
    )

    def __init__(self, request: Request, matcher: Matcher | None = None) -> None:
        self.request = request
        self.matcher = matcher  # has seen the output so far
        sampling = request.sampling  # what it wants may need each token to be sampled, also those that are forced
        self.takes_over = (
            sampling.logprobs is None and not sampling.needs_history and sampling.allowed_token_ids is None
        )
        self.key = (request.priority, request.handle)
        self.ids: Int32s = np.asarray(request.prompt_ids, np.int32)
        self.slot = -1
        self.lease: Lease | None = None
        self.aborted = False
        self.finished = False
        self.admitted = False
        self.prompt_logprobs_done = 0  # prompt positions whose log-probabilities were delivered

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        wanted = self.request.sampling.prompt_logprobs is not None
        return wanted and self.prompt_logprobs_done < self.prompt_tokens - 1

    @property
    def hit_limit(self) -> int | None:
        """Prompt positions whose log-probabilities are still wanted have to be computed."""
        return self.prompt_logprobs_done if self.wants_prompt_logprobs else None

    def __repr__(self) -> str:
        place = f"slot {self.slot}" if self.slot >= 0 else "finished" if self.finished else "waiting"
        return f"Sequence({self.request.handle}, {place})"


class WaitingRoom:
    """Sequences by (priority, age), smallest first. Insertion is O(n) moves of pointers, which a bisect makes cheap."""

    def __init__(self) -> None:
        self._queue: list[Sequence] = []  # largest key first, so that the head leaves from the end

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, sequence: Sequence) -> None:
        bisect.insort(self._queue, sequence, key=_falling)

    def head(self) -> Sequence | None:
        return self._queue[-1] if self._queue else None

    def pop(self) -> Sequence:
        return self._queue.pop()

    def remove(self, sequence: Sequence) -> None:
        self._queue.remove(sequence)


def _falling(sequence: Sequence) -> tuple[int, int]:
    priority, handle = sequence.key
    return -priority, -handle
