"""The public engine: submit prompts, iterate outputs, from one asyncio program.

Owns: the life of an engine as its users see it (load, run, drain, close); prompts that are being read.
Does not know: HTTP; how a step is computed; what runs meanwhile (`running`); who may come in (`admission`).
Invariants: when the core loop dies, `health` says so and every call raises EngineDead; leaving a `generate` loop early
aborts its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from aengine.config import EngineConfig
from aengine.engine.ahead import map_torch
from aengine.engine.facts import EngineStats, Health, ModelInfo, StartupReport
from aengine.engine.gather import Gathered
from aengine.engine.images import take_images
from aengine.engine.loading import load
from aengine.engine.outlet import Outlet
from aengine.engine.output import Choice
from aengine.engine.prompt_ids import checked_ids
from aengine.engine.prompts import Prompt, PromptTokens, read_prompt
from aengine.engine.running import Running
from aengine.engine.stream import RequestStream
from aengine.errors import EngineDead, InvalidRequest, NotReady
from aengine.metrics import Metrics
from aengine.timeline import KEPT_S, chrome_trace
from aengine.types import HttpFigures, Int32s, MediaInput, RequestOutput, SamplingParams, Submission

if TYPE_CHECKING:
    from aengine.engine.build import Parts
    from aengine.engine.text import TextProcessor


class AsyncEngine:
    """One model on one device.

    >>> async with AsyncEngine(EngineConfig()) as engine:
    ...     async for out in engine.generate("Hello", SamplingParams(max_tokens=8)):
    ...         print(out.outputs[0].text)

    While it starts, and from a worker thread, `on_phase(name, seconds)` is called when a phase ends, and
    `on_progress(what, done, total)` while something long goes on (a download in bytes, weights in layers).
    `outlet` takes all outputs in place of the engine's own output task; prompts then come by `submit_rows`.
    `own_process`: nothing else of this process uses torch, so that what only compilers need of it is not imported;
    its libraries are mapped from here on.
    """

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
        if own_process:
            map_torch()
        self.phase = "created"
        self.report = StartupReport()
        self._on_phase = on_phase
        self._on_progress = on_progress
        self._parts: Parts | None = None
        self._running: Running | None = None  # from start on
        self._tracing = asyncio.Lock()
        self._closing = asyncio.Lock()
        self._http: Callable[[], HttpFigures] = HttpFigures
        self._death: str | None = None
        self._encoding: dict[str, bool] = {}  # requests on their way to `submit` -> whether aborted meanwhile

    # ---- life

    async def start(self) -> None:
        """Load the model and start the loop. Raises ModelNotFound, ModelLoadError or ConfigError."""
        if self.phase != "created":
            raise RuntimeError(f"an engine starts once; this one is {self.phase}")
        self.phase = "loading"
        try:
            parts = await asyncio.to_thread(
                load, self.config, self._phase_ended, self._progressed, own_process=self._own_process
            )
        except BaseException:
            self.phase = "failed" if self.phase != "closed" else "closed"
            raise
        if self.phase == "closed":
            parts.close()
            raise NotReady("the engine was closed while it was loading")
        parts.metrics.bind_http(self._http)
        running = Running(self.config, parts, self._outlet, self._died)
        self._parts, self._running, self.report = parts, running, parts.report
        running.settle(own_process=self._own_process)
        self.phase = "ready"

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

    def _died(self, death: str) -> None:
        self._death = death
        self.phase = "dead"

    async def close(self, *, drain_s: float = 0.0) -> None:
        """Refuse new requests, let open ones end for up to `drain_s` seconds, then stop. May be called again."""
        if self._running is None or self.phase == "closed":  # not started, still loading, failed to load, or closed
            self.phase = "closed"
            return
        if self.phase != "dead":
            self.phase = "draining"
            await self._running.drain(drain_s)
        async with self._closing:
            if self.phase != "closed":  # by another call meanwhile
                await self._running.close()
                self.phase = "closed"

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
        if self._outlet is not None:
            raise RuntimeError("the outputs of this engine go to an outlet: use submit_rows")
        running = self._ready()
        admission, output = running.admission, running.output
        assert output is not None
        ids = checked_ids(prompt_ids, self.model.max_model_len)
        entrant = admission.admit(Submission(request_id, ids, sampling, priority, cache_salt, adapter, tuple(images)))
        requests, text = entrant.requests, self.text
        stream = RequestStream(request_id, ids.tolist(), len(requests), lambda: self.abort(request_id))
        if sampling.prompt_logprobs is not None:
            stream.prompt_logprobs = [None]
        for index, request in enumerate(requests):
            detokenizer = (
                text.detokenizer(skip_special_tokens=sampling.skip_special_tokens) if sampling.detokenize else None
            )
            output.register(Choice(request.handle, index, stream, request.sampling, detokenizer))
        stream.on_finished(admission.enter(entrant, stream))
        return stream

    def submit_rows(self, submission: Submission) -> tuple[tuple[int, ...], Callable[[], None]]:
        """As `submit`, for an engine with an outlet: (the handles of the choices; what to call when all have finished).

        Their outputs come to the outlet after this has returned."""
        admission = self._ready().admission
        entrant = admission.admit(submission)
        return tuple(entrant.handles), admission.enter(entrant)

    def abort_rows(self, handles: Iterable[int]) -> None:
        """End choices of `submit_rows` early; those that have finished already do not mind."""
        if self._running is not None:
            self._running.admission.abort_rows(handles)

    async def prepare(self, sampling: SamplingParams) -> None:
        """Compile the grammar of a request, in a thread, so that `submit` finds it; call it right before. Raises
        InvalidGrammar or GrammarTooComplex."""
        if sampling.grammar is not None:
            await self._loaded().grammars.prepare(sampling.grammar)

    def abort(self, request_id: str) -> bool:
        """End a request early; its stream finishes with ABORT. False when no such request is open."""
        if request_id in self._encoding:
            self._encoding[request_id] = True
            return True
        return self._running is not None and self._running.admission.abort(request_id)

    def _ready(self) -> Running:
        if self._death is not None:
            raise EngineDead(f"the engine died: {self._death}")
        if self.phase != "ready":
            raise NotReady(f"the engine is {self.phase}", retry_after_s=2)
        assert self._running is not None
        return self._running

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
        self._ready().core.scheduler.cache.reset()

    # ---- views

    async def trace(self, seconds: float = KEPT_S) -> bytes:
        """The last `seconds` (30 at most) as Chrome's trace event JSON. Made in a thread, one at a time."""
        timeline = self._started().timeline
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

    def _started(self) -> Running:
        if self._running is None:
            raise NotReady(f"the engine is {self.phase}", retry_after_s=2)
        return self._running

    def stats(self) -> EngineStats:
        return self._started().stats()

    def health(self) -> Health:
        if self._death is not None:
            return Health(False, "dead", self._death)
        if self.phase != "ready" or self._running is None:
            return Health(False, self.phase, f"the engine is {self.phase}")
        standstill = self._running.vitals.standstill()
        return Health(standstill is None, self.phase, standstill)
