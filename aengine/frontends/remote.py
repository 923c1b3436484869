"""The engine as a front-end has it: the façade over a pipe.

Owns: this process's tokenizer, streams and counters; requests on their way to the engine.
Does not know: HTTP, scheduling, devices.
Invariants: the façade's: synchronous calls return at once. A refusal by the engine is raised by the stream before its
first delta. When the pipe ends, every open stream ends with EngineDead.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aengine.config import EngineConfig, home
from aengine.engine.facts import Health, ModelInfo
from aengine.engine.output import Choice, OutputTask
from aengine.engine.prompt_ids import checked_ids
from aengine.engine.stream import RequestStream
from aengine.engine.text import TextProcessor, read_template
from aengine.engine.watchdog import LoopWatch
from aengine.errors import AengineError, EngineDead, InvalidRequest, NotReady, QueueFull
from aengine.frontends.wire import (
    Abort,
    Accepted,
    Answer,
    Ask,
    Count,
    Counted,
    Outputs,
    Pipe,
    Refused,
    State,
    Stop,
    Submit,
    ToEngine,
    ToFrontend,
    Up,
)
from aengine.metrics import Metrics
from aengine.models.store import ModelFiles, present
from aengine.models.tokenizer import Tokenizer, load_tokenizer
from aengine.timeline import Timeline
from aengine.types import Grammar, HttpFigures, Int32s, MediaInput, SamplingParams, StepOutputs, Submission

log = logging.getLogger("aengine.frontends")

BACKLOG = 64  # messages with outputs that wait for the output task; behind them nothing is read
LAG_EVERY_S = 0.1
TELL_EVERY_S = 1.0


@dataclass(slots=True)
class Pending:
    """A request: `handles` once the engine has accepted it."""

    stream: RequestStream
    choices: list[Choice]
    handles: tuple[int, ...] = ()
    aborted: bool = False


class RemoteEngine:
    """`stopping` is set when the engine process says so, or is gone."""

    def __init__(self, config: EngineConfig, pipe: Pipe, stopping: asyncio.Event) -> None:
        self._config = config
        self._pipe = pipe
        self._stopping = stopping
        self._state = State("loading", False, "the engine is loading")
        self._model: ModelInfo | None = None
        self._text: TextProcessor | None = None
        self._ended = ""  # "draining", "closed" or "dead": what this process knows better than the engine
        self._changed = asyncio.Event()
        self._metrics = Metrics()
        self._queue: asyncio.Queue[StepOutputs] = asyncio.Queue(BACKLOG)
        self._output = OutputTask(self._queue, self._abort_one, self._metrics, Timeline())
        self._next = 1
        self._requests: dict[int, Pending] = {}
        self._numbers: dict[str, int] = {}  # by request id
        self._idle = asyncio.Event()
        self._idle.set()
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    # ---- life

    def listen(self) -> None:
        """Begin to hear from the engine process."""
        self._tasks = [
            asyncio.create_task(self._supervise(work), name=f"frontend-{work.__name__}")
            for work in (self._receive, self._output.run, self._tell)
        ]

    async def _supervise(self, work: Callable[[], object]) -> None:
        try:
            await work()  # type: ignore[misc]
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("this front-end failed")
            self._die("the front-end failed on an internal fault")

    async def start(self) -> None:
        """Read the tokenizer beside the engine's own loading, then wait until all are ready. Once only."""
        if self._text is not None:
            return
        files = await asyncio.to_thread(self._present)
        tokenizer = await asyncio.to_thread(load_tokenizer, files) if files is not None else None
        while self._model is None:
            await self._change()
        if tokenizer is None:  # the engine had to fetch the model
            tokenizer = await asyncio.to_thread(self._load_tokenizer)
        template = read_template(self._config.model.chat_template)
        self._text = TextProcessor(tokenizer, max_context=self._model.max_model_len, chat_template=template)
        gc.collect()
        gc.freeze()
        self._send(Up())
        while self.phase != "ready":
            await self._change()

    def _present(self) -> ModelFiles | None:
        return present(self._config.model.model, home=home())

    def _load_tokenizer(self) -> Tokenizer:
        files = self._present()
        if files is None:
            raise NotReady(f"the files of {self._config.model.model} are gone")
        return load_tokenizer(files)

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def close(self, *, drain_s: float = 0.0) -> None:
        self._ended = self._ended or "draining"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self._idle.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_all(NotReady("the server was shut down before the request ended"))
        self._send(Counted(0, self._metrics.counts()))
        await self._pipe.close()
        if self._text is not None:
            self._text.close()
        self._ended = "closed"

    def _die(self, reason: str) -> None:
        self._ended = self._ended or "dead"
        self._state = State("dead", False, reason)
        self._fail_all(EngineDead(reason))
        self._stopping.set()

    def _fail_all(self, error: AengineError) -> None:
        for pending in list(self._requests.values()):
            if not pending.stream.finished:
                pending.stream.fail(error)
        self._output.fail_all(error.message)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(error)
        self._asked.clear()

    def _abort_one(self, handle: int) -> None:
        self._send(Abort((handle,)))

    def _send(self, message: ToEngine) -> None:
        self._pipe.send(message)

    async def _tell(self) -> None:
        """Counters once a second, which also says that this process lives; and how late its loop wakes. What was
        counted after the last message is lost with a process that is killed; one that leaves tells it in `close`."""
        told_s, watch = 0.0, LoopWatch()
        try:
            while True:
                due_s = time.monotonic() + LAG_EVERY_S
                await asyncio.sleep(LAG_EVERY_S)
                now_s = time.monotonic()
                self._metrics.loop_lag(max(0.0, now_s - due_s))
                watch.beat()
                for _ in range(watch.take_faults()):
                    self._metrics.fault("loop_blocked")
                if now_s - told_s >= TELL_EVERY_S:
                    told_s = now_s
                    self._send(Counted(0, self._metrics.counts()))
        finally:
            watch.close()

    # ---- what the engine process says

    async def _receive(self) -> None:
        while (message := await self._pipe.receive()) is not None:
            if isinstance(message, Outputs):
                await self._queue.put(message.outputs)
            else:
                self._take(message)
        self._die("the engine process is gone")

    def _take(self, message: ToFrontend) -> None:
        match message:
            case Accepted():
                self._accepted(message)
            case Refused():
                pending = self._requests.get(message.number)
                if pending is not None:
                    pending.stream.fail(message.fault.error())
            case Answer():
                self._answered(message)
            case Count():
                self._send(Counted(message.number, self._metrics.counts()))
            case State():
                self._set_state(message)
            case Stop():
                self._stopping.set()

    def _accepted(self, message: Accepted) -> None:
        pending = self._requests.get(message.number)
        if pending is None:
            self._send(Abort(message.handles))
            return
        pending.handles = message.handles
        for choice, handle in zip(pending.choices, message.handles, strict=True):
            choice.handle = handle
            self._output.register(choice)
        if pending.aborted:
            self._send(Abort(message.handles))

    def _answered(self, message: Answer) -> None:
        future = self._asked.pop(message.number, None)
        if future is None or future.done():
            return
        if message.fault is not None:
            future.set_exception(message.fault.error())
        else:
            future.set_result(message)

    def _set_state(self, state: State) -> None:
        self._state = state
        self._model = state.model or self._model
        self._changed.set()
        if state.phase == "dead":
            self._fail_all(EngineDead(state.reason or "the engine died"))

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
        """As AsyncEngine.submit; what the engine refuses is raised by the stream."""
        text = self.text
        self._check_ready()
        if request_id in self._numbers:
            raise InvalidRequest(f"request id {request_id[:100]!r} is in use", param="request_id")
        if self._pipe.crowded:
            self._metrics.request_rejected("queue_full")
            raise QueueFull("the engine process does not keep up with new requests", retry_after_s=1)
        ids = checked_ids(prompt_ids, self.model.max_model_len)
        submission = Submission(request_id, ids, sampling, priority, cache_salt, adapter, tuple(images))
        number = self._number()
        stream = RequestStream(request_id, ids.tolist(), sampling.n, lambda: self._abort(number))
        if sampling.prompt_logprobs is not None:
            stream.prompt_logprobs = [None]
        skip = sampling.skip_special_tokens
        choices = [
            Choice(
                0, index, stream, sampling, text.detokenizer(skip_special_tokens=skip) if sampling.detokenize else None
            )
            for index in range(sampling.n)
        ]
        self._requests[number] = Pending(stream, choices)
        self._numbers[request_id] = number
        self._idle.clear()
        stream.on_finished(lambda: self._forget(number, request_id))
        self._send(Submit(number, submission))
        return stream

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _forget(self, number: int, request_id: str) -> None:
        self._requests.pop(number, None)
        self._numbers.pop(request_id, None)
        if not self._requests:
            self._idle.set()

    def abort(self, request_id: str) -> bool:
        number = self._numbers.get(request_id)
        return number is not None and self._abort(number)

    def _abort(self, number: int) -> bool:
        pending = self._requests.get(number)
        if pending is None:
            return False
        pending.aborted = True
        if pending.handles:
            self._send(Abort(pending.handles))
        return True

    async def _ask(
        self, what: str, *, grammar: Grammar | None = None, sources: tuple[str, ...] = (), seconds: float = 0.0
    ) -> Answer:
        if self._ended in ("closed", "dead"):
            raise EngineDead("the engine process is gone")
        number = self._number()
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        self._send(Ask(number, what, grammar, sources, seconds))
        try:
            return await future
        finally:
            self._asked.pop(number, None)

    async def prepare(self, sampling: SamplingParams) -> None:
        if sampling.grammar is not None:
            await self._ask("prepare", grammar=sampling.grammar)

    async def read_images(self, sources: Sequence[str]) -> Sequence[MediaInput]:
        """Decoded in the engine process, which keeps the pixels: what does it imports torch."""
        return (await self._ask("images", sources=tuple(sources))).images if sources else ()

    async def reset_prefix_cache(self) -> None:
        self._check_ready()
        await self._ask("reset_prefix_cache")

    async def trace(self, seconds: float) -> bytes:
        """Of the engine process."""
        return (await self._ask("trace", seconds=seconds)).body

    def bind_http(self, told: Callable[[], HttpFigures]) -> None:
        self._metrics.bind_http(told)

    async def metrics_text(self) -> bytes:
        return (await self._ask("metrics")).body

    # ---- views

    @property
    def phase(self) -> str:
        if self._ended:
            return self._ended
        if self._state.phase == "ready" and self._text is None:
            return "loading tokenizer"
        return self._state.phase

    @property
    def model(self) -> ModelInfo:
        if self._model is None:
            raise NotReady(f"the engine is {self.phase}", retry_after_s=2)
        return self._model

    @property
    def text(self) -> TextProcessor:
        if self._text is None:
            raise NotReady(f"the engine is {self.phase}", retry_after_s=2)
        return self._text

    def health(self) -> Health:
        phase = self.phase
        if phase != self._state.phase:
            return Health(False, phase, f"the engine is {phase}")
        return Health(self._state.ok, phase, self._state.reason)

    def _check_ready(self) -> None:
        if self._state.phase == "dead" or self._ended == "dead":
            raise EngineDead(self._state.reason or "the engine died")
        if self.phase != "ready":
            raise NotReady(f"the engine is {self.phase}", retry_after_s=2)
