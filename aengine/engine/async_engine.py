"""The public engine: submit prompts, iterate outputs, from one asyncio program.

Owns: the life of an engine (load, run, drain, close) and of its tasks; request ids; the supervised core loop.
Does not know: HTTP; how a step is computed.
Invariants: every task it starts is awaited in `close`; when the core loop dies, every open stream ends with EngineDead
and `health` says so; leaving a `generate` loop early aborts its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import msgspec

from aengine.config import EngineConfig, home
from aengine.engine.core import Core
from aengine.engine.facts import EngineStats, Health, ModelInfo, StartupReport
from aengine.engine.gather import Gathered
from aengine.engine.images import take_images
from aengine.engine.intake import Intake
from aengine.engine.outlet import Outlet
from aengine.engine.output import Choice, OutputTask
from aengine.engine.process import collect_seldom, give_back_free_memory
from aengine.engine.prompts import Prompt, PromptTokens, read_prompt
from aengine.engine.stream import RequestStream
from aengine.engine.watchdog import LOOK_EVERY_S, GcPauses, LoopWatch, Stalls
from aengine.errors import EngineDead, InvalidRequest, NotReady, QueueFull, RequestTooLarge
from aengine.metrics import Metrics
from aengine.scheduler import Matcher
from aengine.timeline import KEPT_S, Timeline, chrome_trace
from aengine.types import HttpFigures, Int32s, MediaInput, Request, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from aengine.engine.build import Parts
    from aengine.engine.text import TextProcessor

log = logging.getLogger(__name__)

LAG_EVERY_S = 0.1
MAX_IMAGE_BYTES = 2 * 2**30  # preprocessed images of open requests: 140 of four tiles of 560 pixels (15 MB each)
STALL_S = 60.0  # no step has ended for so long while work waits: unhealthy


class AsyncEngine:
    """One model on one device.

    >>> async with AsyncEngine(EngineConfig()) as engine:
    ...     async for out in engine.generate("Hello", SamplingParams(max_tokens=8)):
    ...         print(out.outputs[0].text)

    While it starts, and from a worker thread, `on_phase(name, seconds)` is called when a phase ends, and
    `on_progress(what, done, total)` while something long goes on (a download in bytes, weights in layers).
    `outlet` takes all outputs in place of the engine's own output task; prompts then come by `submit_rows`.
    `own_process`: nothing else of this process uses torch, so that what only compilers need of it is not imported.
    """

    _frozen: ClassVar[int] = 0  # engines of this process whose objects the garbage collector skips

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        on_phase: Callable[[str, float], None] | None = None,
        on_progress: Callable[[str, int, int], None] | None = None,
        own_process: bool = False,
        outlet: Outlet | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self._outlet = outlet
        self._own_process = own_process
        self.phase = "created"
        self.report = StartupReport()
        self._on_phase = on_phase
        self._on_progress = on_progress
        self._parts: Parts | None = None
        self._core: Core | None = None
        self._output: OutputTask | None = None
        self._intake: Intake | None = None
        self._timeline: Timeline | None = None
        self._tracing = asyncio.Lock()
        self._http: Callable[[], HttpFigures] = HttpFigures
        self._tasks: list[asyncio.Task[None]] = []
        self._death: str | None = None
        self._next_handle = 1
        self._loop_watch: LoopWatch | None = None
        self._image_bytes = 0
        self._streams: dict[str, tuple[RequestStream | None, list[int]]] = {}  # no stream: its outputs leave by rows
        self._encoding: dict[str, bool] = {}  # requests on their way to `submit` -> whether aborted meanwhile

    # ---- life

    async def start(self) -> None:
        """Load the model and start the loop. Raises ModelNotFound, ModelLoadError or ConfigError."""
        if self.phase != "created":
            raise RuntimeError(f"an engine starts once; this one is {self.phase}")
        self.phase = "loading"
        try:
            parts = await asyncio.to_thread(self._build)
        except BaseException:
            self.phase = "failed" if self.phase != "closed" else "closed"
            raise
        if self.phase == "closed":
            parts.close()
            raise NotReady("the engine was closed while it was loading")
        runner = parts.make_runner(asyncio.get_running_loop())
        timeline = Timeline()
        core = Core(parts.scheduler, runner, self.config.scheduler, parts.metrics, timeline, parts.grammars.make_masks)
        self._parts, self._core, self.report = parts, core, parts.report
        if self._outlet is None:
            self._output = OutputTask(core.outputs, core.abort, parts.metrics, timeline, parts.spans)
            give_out = self._output.run
        else:
            give_out = partial(self._outlet.run, core.outputs)
        self._intake = Intake(self.config, parts.model, parts.text.tokenizer, parts.scheduler.cache)
        parts.metrics.bind(self.stats)
        parts.metrics.bind_http(self._http)
        parts.metrics.bind_times(timeline.clock.totals, lambda: timeline.device.idle_s(time.perf_counter()))
        self._timeline = timeline
        parts.text.on_fault = lambda: parts.metrics.fault("tokenizer")
        self._loop_watch = LoopWatch()
        self._runner = runner
        self._tasks = [
            asyncio.create_task(self._supervise(core.run), name="aengine-core"),
            asyncio.create_task(self._supervise(give_out), name="aengine-output"),
            asyncio.create_task(self._supervise(self._watch), name="aengine-watch"),
        ]
        if self._own_process:
            collect_seldom()
        else:  # in its own there is next to no garbage yet, and looking for it takes 0.1 s
            gc.collect()
        gc.freeze()  # what lives now lives on: full collections need not walk it (they took 50 ms and more)
        AsyncEngine._frozen += 1
        timeline.open()
        self.phase = "ready"

    def _build(self) -> Parts:
        """All that is slow, in a worker thread: importing torch alone takes seconds, and a server listens meanwhile.

        A model that does not exist is told before that; packaged ones do."""
        from aengine.models.packaged import PACKAGED
        from aengine.models.store import resolve

        if self.config.model.model not in PACKAGED:
            resolve(self.config.model.model, home=home(), progress=self._progressed)
        began_s = time.monotonic()
        collecting = gc.isenabled()
        gc.disable()  # nothing of what is imported and loaded is garbage; looking for it takes a tenth of the time
        try:
            if self._own_process:
                from aengine.engine.lean_torch import import_torch

                import_torch()
            from aengine.engine.build import build

            imports = ("imports", time.monotonic() - began_s)
            self._phase_ended(*imports)
            parts = build(self.config, self._phase_ended, self._progressed)
        finally:
            if collecting:
                gc.enable()
        give_back_free_memory()
        parts.report = msgspec.structs.replace(parts.report, phases=(imports, *parts.report.phases))
        return parts

    def _progressed(self, what: str, done: int, total: int) -> None:
        """Called from the loading thread while it fetches or loads; raising ends what it does."""
        if self.phase == "closed":
            raise NotReady("the engine was closed while it was loading")
        if self._on_progress is not None:
            self._on_progress(what, done, total)

    def _phase_ended(self, name: str, seconds: float) -> None:
        if self.phase.startswith("loading"):
            self.phase = f"loading ({name} done)"
        if self._on_phase is not None:
            self._on_phase(name, seconds)

    async def _watch(self) -> None:
        """How late the event loop wakes a sleeper: what every timer, socket and step result waits for. And once a
        second, whether steps and requests move."""
        assert self._timeline is not None
        pauses, stalls = GcPauses(), Stalls(self.metrics, self._name)
        look_s = 0.0
        try:
            while True:
                due_s = time.perf_counter() + LAG_EVERY_S
                await asyncio.sleep(LAG_EVERY_S)
                woken_s, now_s = time.perf_counter(), time.monotonic()
                self.metrics.loop_lag(max(0.0, woken_s - due_s))
                self._timeline.lag(due_s, woken_s)
                self._turned(pauses)
                if now_s >= look_s:
                    look_s = now_s + LOOK_EVERY_S
                    assert self._core is not None
                    stalls.look(now_s, self._core.progress, self._core.scheduler)
        finally:
            pauses.close()

    def _turned(self, pauses: GcPauses) -> None:
        assert self._loop_watch is not None
        self._loop_watch.beat()
        for _ in range(self._loop_watch.take_faults()):
            self.metrics.fault("loop_blocked")
        for seconds in pauses.take():
            self.metrics.gc_pause(seconds)

    async def _supervise(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """`work` is called here, so that a task cancelled before its first turn leaves no coroutine behind."""
        try:
            await work()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("the engine died")
            self._death = f"{type(error).__name__}: {error}"
            self.phase = "dead"
            self._taker().fail_all(f"the engine died: {self._death}")
            self._streams.clear()

    async def close(self, *, drain_s: float = 0.0) -> None:
        """Refuse new requests, let open ones end for up to `drain_s` seconds, then stop. May be called twice."""
        if self._core is None or self.phase == "closed":  # not started, still loading, failed to load, or closed
            self.phase = "closed"
            return
        if self.phase != "dead":
            self.phase = "draining"
            await self._drain(drain_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._loop_watch is not None:
            await asyncio.to_thread(self._loop_watch.close)
        await self._core.drain_device()
        await self._runner.close()
        self._loaded().close()
        if self._timeline is not None:
            self._timeline.close()
        for stream, _ in list(self._streams.values()):
            if stream is not None:
                stream.fail(NotReady("the engine was shut down before the request ended"))
        self._streams.clear()
        if (spans := self._loaded().spans) is not None:
            await asyncio.to_thread(spans.close)
        AsyncEngine._frozen -= 1
        if not AsyncEngine._frozen:  # another engine of this process may still count on it
            gc.unfreeze()
        self.phase = "closed"

    async def _drain(self, drain_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self._taker().all_done()

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # ---- requests

    def submit(
        self,
        prompt_ids: Sequence[int] | Int32s,
        sampling: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str = "",
        images: Sequence[MediaInput] = (),
    ) -> RequestStream:
        """Queue a prompt; returns its stream at once. `images`: one for each placeholder in the prompt, in their order,
        from `read_images`. A `sampling.grammar` must have been prepared.

        Raises InvalidRequest (also for a request id in use), ContextLengthExceeded, RequestTooLarge, QueueFull,
        NotReady or EngineDead.
        """
        output = self._output
        if output is None:
            raise RuntimeError("the outputs of this engine go to an outlet: use submit_rows")
        requests, matchers, image_bytes = self._admit(
            prompt_ids, sampling, request_id, priority, cache_salt, adapter, images
        )
        handles = [request.handle for request in requests]
        stream = RequestStream(
            request_id, requests[0].prompt_ids.tolist(), len(requests), lambda: self._abort(request_id)
        )
        if sampling.prompt_logprobs is not None:
            stream.prompt_logprobs = [None]
        self._streams[request_id] = (stream, handles)
        text = self.text
        for index, request in enumerate(requests):
            detokenizer = (
                text.detokenizer(skip_special_tokens=sampling.skip_special_tokens) if sampling.detokenize else None
            )
            output.register(Choice(request.handle, index, stream, request.sampling, detokenizer))
        stream.on_finished(lambda: self._forget(request_id, image_bytes))
        self._queue(requests, matchers)
        return stream

    def submit_rows(
        self,
        prompt_ids: Sequence[int] | Int32s,
        sampling: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str = "",
        images: Sequence[MediaInput] = (),
    ) -> tuple[tuple[int, ...], Callable[[], None]]:
        """As `submit`, for an engine with an outlet: (the handles of the choices; what to call when all have finished).

        Their outputs come to the outlet after this has returned."""
        requests, matchers, image_bytes = self._admit(
            prompt_ids, sampling, request_id, priority, cache_salt, adapter, images
        )
        handles = [request.handle for request in requests]
        self._streams[request_id] = (None, handles)
        self._queue(requests, matchers)
        return tuple(handles), lambda: self._forget(request_id, image_bytes)

    def abort_rows(self, handles: Iterable[int]) -> None:
        """End choices of `submit_rows` early; those that have finished already do not mind."""
        if self._core is not None:
            for handle in handles:
                self._core.abort(handle)

    def _admit(
        self,
        prompt_ids: Sequence[int] | Int32s,
        sampling: SamplingParams,
        request_id: str,
        priority: int,
        cache_salt: str,
        adapter: str,
        images: Sequence[MediaInput],
    ) -> tuple[list[Request], Sequence[Matcher | None], int]:
        """All checks of a prompt -> (its requests, their matchers, bytes of its images)."""
        _, intake = self._ready()
        if request_id in self._streams:
            raise InvalidRequest(f"request id {request_id[:100]!r} is in use", param="request_id")
        if adapter:
            raise InvalidRequest(f"adapter {adapter[:100]!r} is not loaded", param="model")
        requests = intake.requests(
            prompt_ids,
            sampling,
            request_id=request_id,
            first_handle=self._next_handle,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
            images=images,
        )
        matchers = self._matchers(sampling)
        self._check_room(len(requests))
        image_bytes = sum(image.n_bytes for image in images)
        self._check_image_room(image_bytes)
        self._image_bytes += image_bytes
        self._next_handle += len(requests)
        return requests, matchers, image_bytes

    def _queue(self, requests: Sequence[Request], matchers: Sequence[Matcher | None]) -> None:
        assert self._core is not None
        for request, matcher in zip(requests, matchers, strict=True):
            self._core.submit(request, matcher)

    async def prepare(self, sampling: SamplingParams) -> None:
        """Compile the grammar of a request, in a thread, so that `submit` finds it; call it right before. Raises
        InvalidGrammar or GrammarTooComplex."""
        if sampling.grammar is not None:
            await self._loaded().grammars.prepare(sampling.grammar)

    def _matchers(self, sampling: SamplingParams) -> Sequence[Matcher | None]:
        if sampling.grammar is None:
            return [None] * sampling.n
        return self._loaded().grammars.matchers(sampling.grammar, sampling.n)

    def abort(self, request_id: str) -> bool:
        """End a request early; its stream finishes with ABORT. False when no such request is open."""
        return self._abort(request_id)

    def _abort(self, request_id: str) -> bool:
        if request_id in self._encoding:
            self._encoding[request_id] = True
            return True
        entry = self._streams.get(request_id)
        if entry is None or self._core is None:
            return False
        for handle in entry[1]:
            self._core.abort(handle)
        return True

    def _taker(self) -> Outlet | OutputTask:
        """Whoever takes the outputs."""
        taker = self._outlet or self._output
        assert taker is not None
        return taker

    def _ready(self) -> tuple[Core, Intake]:
        if self._death is not None:
            raise EngineDead(f"the engine died: {self._death}")
        if self.phase != "ready":
            raise NotReady(f"the engine is {self.phase}", retry_after_s=2)
        assert self._core is not None
        assert self._intake is not None
        return self._core, self._intake

    def _forget(self, request_id: str, image_bytes: int) -> None:
        self._image_bytes -= image_bytes
        self._streams.pop(request_id, None)

    def _check_image_room(self, more: int) -> None:
        if more > MAX_IMAGE_BYTES:
            raise RequestTooLarge(
                f"the images take {more:,} bytes once preprocessed, of at most {MAX_IMAGE_BYTES:,}", param="messages"
            )
        if self._image_bytes + more > MAX_IMAGE_BYTES:
            assert self._parts is not None
            self._parts.metrics.request_rejected("queue_full")
            raise QueueFull(
                f"images of open requests hold {self._image_bytes:,} bytes, {more:,} more would exceed "
                f"{MAX_IMAGE_BYTES:,}",
                retry_after_s=self._retry_after_s(),
            )

    def _check_room(self, n: int) -> None:
        assert self._core is not None
        settings, queued = self.config.scheduler, self._core.queued
        limit = settings.max_waiting
        if n > limit:
            raise InvalidRequest(f"n is {n}; the waiting room holds {limit}, so it could never be queued", param="n")
        slots = settings.max_num_seqs - self._core.scheduler.stats().running
        if queued + n > limit + slots:  # those that a free slot will take at once do not wait
            assert self._parts is not None
            self._parts.metrics.request_rejected("queue_full")
            raise QueueFull(
                f"{queued} requests are waiting; the waiting room holds {limit}", retry_after_s=self._retry_after_s()
            )

    def _retry_after_s(self) -> int:
        """Seconds until the queue has probably moved: one wave of rows, a second for each full set of slots."""
        assert self._core is not None
        return min(60, math.ceil(1 + self._core.queued / self.config.scheduler.max_num_seqs))

    # ---- Python API

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Generate from a text, token ids, or chat messages; yields the growing RequestOutput, the last one finished.

        With images: {"prompt": text, "images": [..]}, {"prompt_token_ids": ids, "images": [..]} or {"messages": [..]},
        where message parts bring their images or stand for the next of "images". An image is a PIL image, an array
        uint8 [H, W] or [H, W, 1, 3 or 4], encoded bytes, a data: URL or, in "images" only, a path; its place in a text
        is the model's own image token.

        Raises as `submit` does; a request that fails inside the engine raises StepFailed or EngineDead. Leaving the
        loop (break, cancellation) aborts the request.
        """
        sampling = sampling or SamplingParams()
        name = f"req-{uuid.uuid4().hex}" if request_id is None else request_id
        read, aborted = await self._read(name, prompt, sampling)
        stream = self.submit(
            read.ids,
            sampling,
            request_id=name,
            priority=priority,
            cache_salt=cache_salt or "",
            images=read.images,
        )
        if aborted:
            stream.abort()
        gathered = Gathered(stream, read.text, sampling.n, logprobs=sampling.logprobs is not None)
        try:
            async for delta in stream:
                yield gathered.add(delta)
        finally:
            await stream.aclose()

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """As `generate`, for chat messages rendered with the model's template. Content parts of type image_url,
        input_image or image bring images (data: URLs, or any form `generate` takes except a path)."""
        self._ready()
        marked, sources = take_images(messages)
        images = await self.read_images(sources)
        ids = await self.text.encode_chat(
            marked,
            tools=tools,
            chat_template=chat_template,
            kwargs=chat_template_kwargs,
        )
        prompt: Prompt = {"prompt_token_ids": ids, "images": images} if images else ids
        outputs = self.generate(prompt, sampling, request_id=request_id, priority=priority, cache_salt=cache_salt)
        async with contextlib.aclosing(cast(Any, outputs)):
            async for output in outputs:
                yield output

    async def read_images(self, sources: Sequence[Any], *, files: bool = False) -> list[MediaInput]:
        """Decode and preprocess images, in worker threads. `files`: a source may also be a path. Raises
        InvalidRequest."""
        return await self._loaded().images.read(sources, files=files)

    async def _read(self, request_id: str, prompt: Prompt, sampling: SamplingParams) -> tuple[PromptTokens, bool]:
        """(the prompt's tokens, whether the request was aborted while they were made); its grammar is prepared."""
        self._ready()
        if request_id in self._encoding:
            raise InvalidRequest(f"request id {request_id[:100]!r} is in use", param="request_id")
        self._encoding[request_id] = False
        try:
            read = await read_prompt(prompt, self.text, self._loaded().images)
            await self.prepare(sampling)
        finally:
            aborted = self._encoding.pop(request_id)
        return read, aborted

    async def reset_prefix_cache(self) -> None:
        """Drop every cached page no running request uses."""
        self._ready()
        assert self._parts is not None
        self._parts.scheduler.cache.reset()

    # ---- views

    async def trace(self, seconds: float = KEPT_S) -> bytes:
        """The last `seconds` (30 at most) as Chrome's trace event JSON. Made in a thread, one at a time."""
        self._loaded()
        timeline = self._timeline
        assert timeline is not None
        async with self._tracing:
            return await asyncio.to_thread(lambda: chrome_trace(*timeline.last(seconds)))

    @property
    def text(self) -> TextProcessor:
        return self._loaded().text

    @property
    def model(self) -> ModelInfo:
        return self._loaded().model

    @property
    def metrics(self) -> Metrics:
        return self._loaded().metrics

    def bind_http(self, told: Callable[[], HttpFigures]) -> None:
        """Before `start`: where the figures of this process's server come from, if it has one."""
        self._http = told

    async def metrics_text(self) -> bytes:
        """Prometheus text."""
        return self.metrics.render()

    def _loaded(self) -> Parts:
        if self._parts is None:
            raise NotReady(f"the engine is {self.phase}", retry_after_s=2)
        return self._parts

    def stats(self) -> EngineStats:
        parts = self._loaded()
        assert self._core is not None
        dead = self._death is not None  # nothing runs any more, whatever the scheduler last said
        scheduler, cache = parts.scheduler.stats(), parts.scheduler.cache.stats()
        return EngineStats(
            running=0 if dead else scheduler.running,
            waiting=0 if dead else self._core.queued,
            in_flight=scheduler.in_flight,
            preemptions=scheduler.preemptions,
            zombie_rows=scheduler.zombie_rows,
            steps=self._core.progress.steps,
            steps_overlapped=self._core.progress.steps_overlapped,
            drafted_tokens=scheduler.drafted_tokens,
            accepted_tokens=scheduler.accepted_tokens,
            kv_usage=cache.usage,
            kv_waste=cache.pool.waste(),
            kv_stranded_bytes=max(group.stranded_bytes for group in cache.pool.groups),
            kv_moved_bytes=cache.pool.moved_bytes,
            prefix_queries=cache.query_tokens,
            prefix_hits=cache.hit_tokens,
            device_s=self._core.progress.device_s,
            open_streams=self._taker().open_choices,
            media_items=scheduler.media_items,
            media_computed=scheduler.media_computed,
        )

    def health(self) -> Health:
        if self._death is not None:
            return Health(False, "dead", self._death)
        if self.phase != "ready" or self._core is None:
            return Health(False, self.phase, f"the engine is {self.phase}")
        if self._loop_watch is not None and self._loop_watch.blocked:
            return Health(False, self.phase, f"the event loop has not turned for {self._loop_watch.silent_s:.1f} s")
        progress, scheduler = self._core.progress, self._core.scheduler
        still_s = time.monotonic() - progress.at_s
        if scheduler.has_unfinished and still_s > STALL_S:
            stuck = f"no progress for {still_s:.0f} s, waiting for {progress.waiting_for}"
            return Health(False, self.phase, f"{stuck}; oldest request: {self._name(scheduler.oldest())}")
        return Health(True, self.phase)

    def _name(self, handle: int | None) -> str:
        named = [name for name, (_, handles) in self._streams.items() if handle in handles]
        return named[0] if named else f"handle {handle}"
