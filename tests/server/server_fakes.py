"""An engine without a model, for tests of the server.

Owns: FakeEngine with a byte tokenizer (id = byte, then BOS and EOS), scripted replies, records of what was submitted.
Does not know: HTTP.
Invariants: it implements the protocols of aengine.server.facade and nothing more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from aengine.errors import ContextLengthExceeded
from aengine.metrics import Metrics
from aengine.types import FinishReason, MediaInput, OutputDelta, TokenLogprob

BOS, EOS = 256, 257
VOCAB = 258


@dataclass
class FakeModel:
    names: tuple[str, ...] = ("fake-model", "fake-alias")
    max_model_len: int = 4096
    vocab_size: int = VOCAB
    eos_ids: tuple[int, ...] = (EOS,)
    has_chat_template: bool = True
    chat_stops: tuple[str, ...] = ()
    takes_images: bool = False
    created: int = 1_700_000_000


@dataclass
class FakeHealth:
    ok: bool
    phase: str
    reason: str | None = None


class FakeText:
    """Bytes as tokens; a chat is rendered as `<role>content` lines."""

    chat_template = "{{ messages }}{{ tools }}"
    has_response_template = False

    def response_stream(self, prompt, tools):
        return None

    def __init__(self):
        self.calls = []

    async def encode(self, text, *, add_special_tokens=True):
        await asyncio.sleep(0)
        return [BOS] * add_special_tokens + list(text.encode())

    async def encode_batch(self, texts, *, add_special_tokens=True):
        return [await self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    async def decode(self, ids, *, skip_special_tokens=False):
        return b"".join(self.token_bytes(i) for i in ids if i < 256 or not skip_special_tokens).decode(errors="replace")

    async def render_chat(self, messages, **call):
        self.calls.append((messages, call))
        lines = "".join(f"<{m['role']}>{m['content']}\n" for m in messages)
        return lines + "<assistant>" * call["add_generation_prompt"]

    async def encode_chat(self, messages, **call):
        return await self.encode(await self.render_chat(messages, **call), add_special_tokens=False)

    def token_text(self, id):
        return self.token_bytes(id).decode(errors="replace")

    def token_bytes(self, id):
        return {BOS: b"<s>", EOS: b"</s>"}.get(id) or bytes([id])


def logprob(token, k):
    """A made-up entry: the chosen token is second best unless k is 0."""
    others = ((token + 1) % VOCAB, -0.25), (token, -1.5), ((token + 2) % VOCAB, float("-inf"))
    return TokenLogprob(token, -1.5, 2, others[:k])


class FakeStream:
    def __init__(self, engine, request_id, prompt_ids, sampling):
        self.engine = engine
        self.request_id = request_id
        self.prompt_ids = list(prompt_ids)
        self.sampling = sampling
        self.cached_tokens = engine.cached_tokens
        self.completion_tokens = 0
        self.closed = False
        k = sampling.prompt_logprobs
        self.prompt_logprobs = None if k is None else [None] + [logprob(t, k) for t in self.prompt_ids[1:]]
        self._wake = asyncio.Event()
        self._deltas = deque(self._script())

    def _script(self):
        reply, limit = self.engine.reply, self.sampling.max_tokens
        for j in range(max(len(reply), 1)):
            for i in range(self.sampling.n):
                yield from self._piece(i, j, limit)

    def _piece(self, index, j, limit):
        before = sum(len(piece.encode()) for piece in self.engine.reply[:j])
        piece = self.engine.reply[j] if self.engine.reply else ""
        tokens = tuple(piece.encode())
        if limit is not None and before >= limit:
            return
        cut = limit is not None and before + len(tokens) >= limit
        last = j == max(len(self.engine.reply), 1) - 1
        if cut:
            tokens = tokens[: limit - before]
            text = bytes(tokens).decode(errors="ignore")
            yield self._delta(index, text, tokens, FinishReason.LENGTH)
            return
        yield self._delta(index, piece, tokens)
        if last:
            yield self._delta(index, "", (EOS,), self.engine.finish, error=self.engine.error)

    def _delta(self, index, text, tokens, finish=None, error=None):
        k = self.sampling.logprobs
        entries = None if k is None else tuple(logprob(token, k) for token in tokens)
        return OutputDelta(index, text, tokens, entries, finish, None, error)

    def __aiter__(self):
        return self

    async def __anext__(self):
        await self._pause()
        if self.engine.raises is not None and self.completion_tokens:
            raise self.engine.raises
        if not self._deltas:
            self.engine.open.discard(self.request_id)
            raise StopAsyncIteration
        delta = self._deltas.popleft()
        self.completion_tokens += len(delta.token_ids)
        if not self._deltas:
            self.engine.open.discard(self.request_id)
        return delta

    async def _pause(self):
        """Waits while the engine holds its streams."""
        await asyncio.sleep(self.engine.step_s)
        if self.engine.gate is not None:
            await self.engine.gate.acquire()
        while self.completion_tokens >= self.engine.hold_from and Path(self.engine.hold_while).exists():
            await asyncio.sleep(0.005)
        if self.engine.hold_after is not None and self.completion_tokens >= self.engine.hold_after:
            await self._wake.wait()

    def tap(self, take):
        """An offer that need not be used."""

    def abort(self):
        self.engine.abort(self.request_id)

    async def aclose(self):
        self.closed = True
        if self._deltas:
            self.abort()


@dataclass
class FakeEngine:
    """`reply`: the pieces each choice answers with. `hold_after`: tokens after which every stream waits for ever.

    `gate`: each delta waits for one of its permits. `hold_while`, `load_while`: streams (from token `hold_from` on) and
    the start go on once no file has that name any more: another process says when.
    """

    reply: list[str] = field(default_factory=lambda: ["Hel", "lo", "!"])
    finish: FinishReason = FinishReason.STOP
    error: str | None = None
    raises: Exception | None = None
    refuses: list[Exception | None] = field(default_factory=list)
    gate: asyncio.Semaphore | None = None
    hold_while: str = ""
    hold_from: float = inf
    load_while: str = ""
    step_s: float = 0.0
    hold_after: int | None = None
    load_s: float = 0.0
    load_error: Exception | None = None
    grammar_error: Exception | None = None
    cached_tokens: int = 3
    phase: str = "ready"
    model: FakeModel = field(default_factory=FakeModel)
    text: FakeText = field(default_factory=FakeText)
    metrics: Metrics = field(default_factory=lambda: Metrics("fake"))
    open: set = field(default_factory=set)
    aborted: list = field(default_factory=list)
    streams: list = field(default_factory=list)
    submitted: list = field(default_factory=list)
    resets: int = 0

    async def start(self):
        self.phase = "loading model"
        await asyncio.sleep(self.load_s)
        while self.load_while and Path(self.load_while).exists():
            await asyncio.sleep(0.005)
        if self.load_error is not None:
            raise self.load_error
        self.phase = "ready"

    async def close(self, *, drain_s=0.0):
        self.phase = "draining"
        for _ in range(int(drain_s / 0.01)):
            if not self.open:
                break
            await asyncio.sleep(0.01)
        self.phase = "closed"

    async def read_images(self, sources):
        return [MediaInput(source.encode(), 4, {}) for source in sources]

    async def prepare(self, sampling):
        error = self.grammar_error if sampling.grammar is not None else None
        if error is not None:
            raise error

    def submit(self, prompt_ids, sampling, *, request_id, priority=0, cache_salt="", adapter="", images=()):
        error = self.refuses.pop(0) if self.refuses else None
        if error is not None:
            raise error
        total = len(prompt_ids) + (sampling.max_tokens or 1)
        if total > self.model.max_model_len:
            message = f"{total} tokens are needed; the context is {self.model.max_model_len} tokens"
            raise ContextLengthExceeded(message, param="prompt")
        stream = FakeStream(self, request_id, prompt_ids, sampling)
        self.open.add(request_id)
        self.streams.append(stream)
        submitted = {"sampling": sampling, "priority": priority, "cache_salt": cache_salt}
        self.submitted.append(submitted | ({"images": images} if images else {}))
        return stream

    def abort(self, request_id):
        if request_id not in self.open:
            return False
        self.open.discard(request_id)
        self.aborted.append(request_id)
        return True

    def health(self):
        return FakeHealth(self.phase == "ready", self.phase, "it broke" if self.phase == "dead" else None)

    async def trace(self, seconds):
        return b'{"traceEvents":[],"seconds":%g}' % seconds

    async def reset_prefix_cache(self):
        self.resets += 1

    def bind_http(self, told):
        self.metrics.bind_http(told)

    async def metrics_text(self):
        return self.metrics.render()
