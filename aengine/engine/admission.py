"""Who may come in, and who is in.

Owns: the checks that need to know who else is there (names in use, the waiting room, memory for images), handles, and
the open requests by name.
Does not know: whether the engine is ready, text, what becomes of outputs.
Invariants: a refused request leaves nothing behind; handles rise and are given once; an open request's name and images
count until it leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from aengine.config import SchedulerConfig
from aengine.engine.core import Core
from aengine.engine.intake import Intake
from aengine.engine.stream import RequestStream
from aengine.errors import AengineError, InvalidRequest, QueueFull, RequestTooLarge
from aengine.metrics import Metrics
from aengine.scheduler import Matcher
from aengine.types import Request, SamplingParams, Submission

if TYPE_CHECKING:
    from aengine.engine.grammars import Grammars

MAX_IMAGE_BYTES = 2 * 2**30  # preprocessed images of open requests: 140 of four tiles of 560 pixels (15 MB each)


class Entrant(NamedTuple):
    """A prompt that passed all checks: its choices, as many matchers, the bytes of its images."""

    requests: list[Request]
    matchers: Sequence[Matcher | None]
    image_bytes: int

    @property
    def handles(self) -> list[int]:
        return [request.handle for request in self.requests]


class Admission:
    """`admit` checks, `enter` lets in. All calls are synchronous, on the loop's thread."""

    def __init__(
        self, settings: SchedulerConfig, intake: Intake, core: Core, grammars: Grammars, metrics: Metrics
    ) -> None:
        self._settings = settings
        self._intake = intake
        self._core = core
        self._grammars = grammars
        self._metrics = metrics
        self._next_handle = 1
        self._image_bytes = 0
        self._open: dict[str, tuple[RequestStream | None, list[int]]] = {}  # no stream: its outputs leave by rows

    # ---- coming in

    def admit(self, submission: Submission) -> Entrant:
        """All checks of a prompt; nobody is in before `enter`. Raises as `AsyncEngine.submit` does."""
        request_id, adapter = submission.request_id, submission.adapter
        if request_id in self._open:
            raise InvalidRequest(f"request id {request_id[:100]!r} is in use", param="request_id")
        if adapter:
            raise InvalidRequest(f"adapter {adapter[:100]!r} is not loaded", param="model")
        requests = self._intake.requests(submission, self._next_handle)
        matchers = self._matchers(submission.sampling)
        self._check_room(len(requests))
        image_bytes = sum(image.n_bytes for image in submission.images)
        self._check_image_room(image_bytes)
        return Entrant(requests, matchers, image_bytes)

    def enter(self, entrant: Entrant, stream: RequestStream | None = None) -> Callable[[], None]:
        """Queue what `admit` has just let pass; returns what to call when all of its choices have finished."""
        request_id, image_bytes = entrant.requests[0].id, entrant.image_bytes
        self._next_handle += len(entrant.requests)
        self._image_bytes += image_bytes
        self._open[request_id] = (stream, entrant.handles)
        for request, matcher in zip(entrant.requests, entrant.matchers, strict=True):
            self._core.submit(request, matcher)
        return lambda: self._leave(request_id, image_bytes)

    def _leave(self, request_id: str, image_bytes: int) -> None:
        self._image_bytes -= image_bytes
        self._open.pop(request_id, None)

    def _matchers(self, sampling: SamplingParams) -> Sequence[Matcher | None]:
        if sampling.grammar is None:
            return [None] * sampling.n
        return self._grammars.matchers(sampling.grammar, sampling.n)

    def _check_room(self, n: int) -> None:
        settings, queued = self._settings, self._core.queued
        limit = settings.max_waiting
        if n > limit:
            raise InvalidRequest(f"n is {n}; the waiting room holds {limit}, so it could never be queued", param="n")
        slots = settings.max_num_seqs - self._core.scheduler.stats().running
        if queued + n > limit + slots:  # those that a free slot will take at once do not wait
            self._metrics.request_rejected("queue_full")
            raise QueueFull(
                f"{queued} requests are waiting; the waiting room holds {limit}", retry_after_s=self._retry_after_s()
            )

    def _check_image_room(self, more: int) -> None:
        if more > MAX_IMAGE_BYTES:
            raise RequestTooLarge(
                f"the images take {more:,} bytes once preprocessed, of at most {MAX_IMAGE_BYTES:,}", param="messages"
            )
        if self._image_bytes + more > MAX_IMAGE_BYTES:
            self._metrics.request_rejected("queue_full")
            raise QueueFull(
                f"images of open requests hold {self._image_bytes:,} bytes, {more:,} more would exceed "
                f"{MAX_IMAGE_BYTES:,}",
                retry_after_s=self._retry_after_s(),
            )

    def _retry_after_s(self) -> int:
        """Seconds until the queue has probably moved: one wave of rows, a second for each full set of slots."""
        return min(60, math.ceil(1 + self._core.queued / self._settings.max_num_seqs))

    # ---- those who are in

    def abort(self, request_id: str) -> bool:
        """End a request early. False when no such request is open."""
        entry = self._open.get(request_id)
        if entry is None:
            return False
        self.abort_rows(entry[1])
        return True

    def abort_rows(self, handles: Iterable[int]) -> None:
        """End choices early; those that have finished already do not mind."""
        for handle in handles:
            self._core.abort(handle)

    def name(self, handle: int | None) -> str:
        """A handle as people know it."""
        named = [name for name, (_, handles) in self._open.items() if handle in handles]
        return named[0] if named else f"handle {handle}"

    def forget_all(self) -> None:
        """Nobody is in any more: the engine is dead, and whoever listens has been told."""
        self._open.clear()

    def fail_all(self, error: AengineError) -> None:
        """End all streams that are still open."""
        for stream, _ in list(self._open.values()):
            if stream is not None:
                stream.fail(error)
        self._open.clear()
