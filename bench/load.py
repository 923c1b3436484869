"""Five workloads against an OpenAI-compatible server, and what one run of each measured.

Owns: the workloads, prompts of exact length, the requests in flight, the figures of one run.
Does not know: which program answers, who started it, how servers are compared.
Invariants: the same seed and run number give every server the same token ids, and no two runs share a prompt, so that
only W4's prefix can be found in a cache; a request that failed or stopped early is counted beside the figures; load
goes to this machine's loopback addresses only.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from aengine.cli.latency import percentile
from aengine.cli.load import error_message, sse_events

WORDS = (
    *(
        "river",
        "window",
        "copper",
        "seven",
        "garden",
        "quiet",
        "engine",
        "paper",
        "morning",
        "circle",
        "stone",
        "bright",
    ),
    *(
        "market",
        "letter",
        "winter",
        "simple",
        "orange",
        "music",
        "travel",
        "number",
        "forest",
        "silver",
        "table",
        "light",
    ),
    *("water", "house", "street", "pencil", "doctor", "field", "story", "voice", "glass", "horse", "island", "kitchen"),
    *("bridge", "summer", "planet", "village", "train", "shadow", "metal", "yellow", "mountain", "corner", "cotton"),
    *("bread", "animal", "ocean", "sugar", "castle", "signal", "cloud", "leather", "harbor", "path", "square", "wheel"),
)
LEAST_WORDS = 16
REQUEST_TIMEOUT_S = 900.0


class LoadError(Exception):
    """A server that cannot be measured, or a workload that cannot be made."""


# ---- what is sent


@dataclass(frozen=True, slots=True)
class Prompt:
    """The same prompt in both forms: `text` encodes to `ids`."""

    ids: tuple[int, ...] = ()
    text: str = ""

    def __add__(self, other: Prompt) -> Prompt:
        return Prompt(self.ids + other.ids, self.text + other.text)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Makes prompts of words that are one token each, so that a length in words is a length in tokens."""

    words: tuple[tuple[str, int], ...]
    salt: str = ""

    @classmethod
    def of(cls, encode: Callable[[str], list[int]]) -> Prompts:
        """`encode` without special tokens. LoadError when too few words are single tokens."""
        tokens = {f" {word}": encode(f" {word}") for word in WORDS}
        words = tuple((word, ids[0]) for word, ids in tokens.items() if len(ids) == 1)
        if len(words) < LEAST_WORDS:
            raise LoadError(f"{len(words)} of {len(WORDS)} words are one token in this vocabulary, not {LEAST_WORDS}")
        made = cls(words)
        sample = made.make(256, "check")
        if tuple(encode(sample.text)) != sample.ids:
            raise LoadError("words that are one token alone are not one token each in a sentence")
        return made

    def salted(self, salt: str) -> Prompts:
        return replace(self, salt=salt)

    def make(self, tokens: int, tag: str) -> Prompt:
        chosen = random.Random(f"{self.salt}/{tag}").choices(self.words, k=tokens)
        return Prompt(tuple(token for _, token in chosen), "".join(word for word, _ in chosen))


@dataclass(frozen=True, slots=True)
class Target:
    """A server and how it is spoken to. `prompts` "text" for servers that take no token ids; without `ignore_eos`
    answers may end early; `body` is merged into every request."""

    base_url: str
    model: str
    api: str = "completions"
    prompts: str = "ids"
    ignore_eos: bool = True
    body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        host = urlsplit(self.base_url).hostname or ""
        if host not in ("localhost", "::1") and not host.startswith("127."):
            raise LoadError(f"{self.base_url} is not a loopback address: load goes to this machine only")
        if self.api not in ("completions", "chat") or self.prompts not in ("ids", "text"):
            raise LoadError(f"api {self.api!r} with prompts {self.prompts!r}: completions or chat, ids or text")
        if self.api == "chat" and self.prompts == "ids":
            raise LoadError("a chat message is text: api=chat needs prompts=text")

    @property
    def url(self) -> str:
        return self.base_url.rstrip("/") + ("/v1/completions" if self.api == "completions" else "/v1/chat/completions")

    def request(self, prompt: Prompt, max_tokens: int) -> dict[str, Any]:
        if self.api == "chat":
            asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt.text}]}
        else:
            asked = {"prompt": list(prompt.ids) if self.prompts == "ids" else prompt.text}
        asked |= {"model": self.model, "max_tokens": max_tokens, "temperature": 0}
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            asked["ignore_eos"] = True
        return asked | self.body


# ---- one request


@dataclass(slots=True)
class Answer:
    """One request. `times_s` are the moments chunks with text came in; `tokens` is the server's own count."""

    asked_tokens: int
    sent_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.times_s)]


async def ask(
    session: aiohttp.ClientSession, target: Target, prompt: Prompt, max_tokens: int, answer: Answer | None = None
) -> Answer:
    """Send one request and read its stream; a failure is in `answer.error`. Who may cancel it brings `answer`."""
    answer = answer or Answer(max_tokens)
    answer.sent_s = time.perf_counter()
    try:
        async with session.post(target.url, json=target.request(prompt, max_tokens)) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {error_message(await response.text())}"
            else:
                await _read(response, answer)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    if answer.error is None and not answer.times_s:
        answer.error = "an answer without text"
    answer.tokens = answer.tokens or len(answer.times_s)  # no usage was sent: a chunk counts as a token
    return answer


async def _read(response: aiohttp.ClientResponse, answer: Answer) -> None:
    async for event in sse_events(response.content.iter_any()):
        if event.get("error"):
            answer.error = str(event["error"])[:300]
            return
        if any(_text(choice) for choice in event.get("choices") or ()):
            answer.times_s.append(time.perf_counter())
        usage = event.get("usage")
        if usage:
            answer.tokens = usage.get("completion_tokens") or 0
            answer.prompt_tokens = usage.get("prompt_tokens") or 0
            answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _text(choice: dict[str, Any]) -> str | None:
    return choice.get("text") or (choice.get("delta") or {}).get("content")


# ---- workloads


@dataclass(frozen=True, slots=True)
class Streams:
    """`streams` clients, each sending its next request when its last has ended, until `requests` are answered."""

    streams: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0

    async def run(self, session: aiohttp.ClientSession, target: Target, prompts: Prompts) -> dict[str, Any]:
        shared = prompts.make(self.shared_tokens, "shared")
        left = iter([shared + prompts.make(self.prompt_tokens, str(i)) for i in range(self.requests)])
        answers: list[Answer] = []

        async def client() -> None:
            for prompt in left:
                answers.append(await ask(session, target, prompt, self.output_tokens))

        began_s = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(min(self.streams, self.requests))))
        return figures(answers, time.perf_counter() - began_s)


@dataclass(frozen=True, slots=True)
class Beside:
    """`requests` long prompts, one every `every_s`, while `streams` short requests are always being answered.

    Figures of the steady streams are those between the first long arrival and the last long answer.
    """

    streams: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    long_tokens: int
    long_output_tokens: int = 16
    lead_s: float = 3.0
    every_s: float = 2.0

    async def run(self, session: aiohttp.ClientSession, target: Target, prompts: Prompts) -> dict[str, Any]:
        steady: list[Answer] = []

        async def stream(i: int) -> None:
            for turn in itertools.count():
                answer = Answer(self.output_tokens)
                steady.append(answer)  # kept when the stream is cancelled
                prompt = prompts.make(self.prompt_tokens, f"steady {i} {turn}")
                await ask(session, target, prompt, self.output_tokens, answer)
                if answer.error is not None:
                    return

        async def late(i: int) -> Answer:
            await asyncio.sleep(i * self.every_s)
            prompt = prompts.make(self.long_tokens, f"long {i}")
            return await ask(session, target, prompt, self.long_output_tokens)

        async with running(stream(i) for i in range(self.streams)):
            await asyncio.sleep(self.lead_s)
            began_s = time.perf_counter()
            longs = await asyncio.gather(*(late(i) for i in range(self.requests)))
            ended_s = time.perf_counter()
        return _beside(steady, longs, began_s, ended_s)


@contextlib.asynccontextmanager
async def running(coroutines: Any) -> Any:
    """Tasks that run beside the block and are cancelled behind it."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


Workload = Streams | Beside

WORKLOADS: dict[str, Workload] = {
    "W1": Streams(streams=1, requests=4, prompt_tokens=128, output_tokens=128),
    "W2": Streams(streams=16, requests=32, prompt_tokens=256, output_tokens=128),
    "W3": Streams(streams=64, requests=128, prompt_tokens=64, output_tokens=64),
    "W4": Streams(streams=16, requests=32, prompt_tokens=32, output_tokens=32, shared_tokens=1024),
    "W5": Beside(streams=8, requests=4, prompt_tokens=64, output_tokens=256, long_tokens=2048),
}
WARM_UP = Streams(streams=8, requests=8, prompt_tokens=64, output_tokens=16)


async def measure(workload: Workload, target: Target, prompts: Prompts) -> dict[str, Any]:
    """One run. Each request has a connection of its own, as clients who do not know each other have."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as session:
        return await workload.run(session, target, prompts)


# ---- figures


def figures(answers: Sequence[Answer], took_s: float) -> dict[str, Any]:
    """Rates and latencies of successful requests; `failed`, `short` and `errors` tell what is not in them."""
    good = [answer for answer in answers if answer.error is None]
    gaps_s = [gap for answer in good for gap in answer.gaps_s]
    per_token_s = [sum(a.gaps_s) / (a.tokens - 1) for a in good if a.tokens > 1 and len(a.times_s) > 1]
    return {
        "output_tokens_per_s": sum(answer.tokens for answer in good) / took_s,
        "ttft_p50_ms": _ms([answer.ttft_s for answer in good], 50),
        "ttft_p99_ms": _ms([answer.ttft_s for answer in good], 99),
        "itl_p50_ms": _ms(gaps_s, 50),
        "itl_p99_ms": _ms(gaps_s, 99),
        "itl_max_ms": _ms(gaps_s, 100),
        "tpot_mean_ms": 1e3 * statistics.fmean(per_token_s) if per_token_s else None,
        "took_s": took_s,
        "output_tokens": sum(answer.tokens for answer in good),
        "prompt_tokens": sum(answer.prompt_tokens for answer in good),
        "cached_tokens": sum(answer.cached_tokens for answer in good),
        **_faults(answers),
    }


def _beside(steady: Sequence[Answer], longs: Sequence[Answer], began_s: float, ended_s: float) -> dict[str, Any]:
    pairs = [pair for answer in steady for pair in itertools.pairwise(answer.times_s)]
    gaps_s = [after - before for before, after in pairs if after > began_s and before < ended_s]
    chunks = sum(began_s <= moment <= ended_s for answer in steady for moment in answer.times_s)
    good = [answer for answer in longs if answer.error is None]
    broken = [answer for answer in steady if answer.error is not None]
    return {
        "steady_chunks_per_s": chunks / (ended_s - began_s),
        "steady_itl_p50_ms": _ms(gaps_s, 50),
        "steady_itl_p99_ms": _ms(gaps_s, 99),
        "steady_itl_max_ms": _ms(gaps_s, 100),
        "long_ttft_p50_ms": _ms([answer.ttft_s for answer in good], 50),
        "long_ttft_p99_ms": _ms([answer.ttft_s for answer in good], 99),
        "took_s": ended_s - began_s,
        "prompt_tokens": sum(answer.prompt_tokens for answer in good),
        "cached_tokens": sum(answer.cached_tokens for answer in good),
        **_faults([*longs, *broken]),
    }


def _faults(answers: Sequence[Answer]) -> dict[str, Any]:
    return {
        "requests": len(answers),
        "failed": sum(answer.error is not None for answer in answers),
        "short": sum(answer.error is None and answer.tokens < answer.asked_tokens for answer in answers),
        "errors": sorted({answer.error for answer in answers if answer.error is not None})[:3],
    }


def _ms(seconds: Sequence[float], p: float) -> float | None:
    return 1e3 * percentile(seconds, p) if seconds else None
