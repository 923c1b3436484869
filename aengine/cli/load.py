"""A load generator for an OpenAI-compatible server.

Owns: prompts of exact length, arrival times, the HTTP streams and what each one measured.
Does not know: how results are shown.
Invariants: a closed loop keeps `concurrency` requests open while any are left; in an open loop arrival times do not
depend on the server (that is its point: a slow server meets a queue); a failed request is counted, never retried.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aengine.errors import AengineError

if TYPE_CHECKING:
    import aiohttp

WORDS = (
    *("river", "window", "copper", "seven", "garden", "quiet", "engine", "paper", "morning", "circle", "stone"),
    *("bright", "market", "letter", "winter", "simple", "orange", "music", "travel", "number", "forest", "silver"),
)
POOL_WORDS = 4096
REQUEST_TIMEOUT_S = 600.0


class LoadError(AengineError):
    """The server cannot be measured: not reachable, not ready, or no model."""


@dataclass(frozen=True, slots=True)
class Load:
    """What to send. `rate` requests a second in an open loop (Poisson arrivals), or None: a closed loop of
    `concurrency` clients. With a rate, `concurrency` has no effect."""

    base_url: str
    requests: int = 32
    concurrency: int = 8
    rate: float | None = None
    prompt_tokens: int = 128
    max_tokens: int = 64
    seed: int = 0
    model: str | None = None
    api_key: str | None = None
    temperature: float = 0.0


@dataclass(slots=True)
class Sample:
    """One request. Times are seconds; `gaps_s` are the times between chunks that carried text or tokens."""

    started_s: float = 0.0
    ttft_s: float | None = None
    e2e_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None


async def run_load(load: Load) -> tuple[list[Sample], float]:
    """(samples in order of arrival, seconds from first request to last end). Raises LoadError."""
    import aiohttp

    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    connector = aiohttp.TCPConnector(limit=0)  # the load's shape is decided here, not by a pool of connections
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(load.base_url, headers=headers, connector=connector, timeout=timeout) as session:
        model = load.model or await _first_model(session)
        bodies = await _bodies(session, load, model)
        began_s = time.perf_counter()
        samples = await (_closed(session, bodies, load) if load.rate is None else _open(session, bodies, load))
        return samples, time.perf_counter() - began_s


# ---- what is sent


async def _first_model(session: aiohttp.ClientSession) -> str:
    answer = await _json(session, "GET", "v1/models")
    try:
        return str(answer["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise LoadError("the server lists no model under /v1/models") from error


async def _bodies(session: aiohttp.ClientSession, load: Load, model: str) -> list[dict[str, Any]]:
    """Prompts are random, so no two share a prefix; they are token ids where the server tokenizes, else words."""
    rng = random.Random(load.seed)
    pool = await _token_pool(session, model, rng)
    common = {
        "model": model,
        "max_tokens": load.max_tokens,
        "temperature": load.temperature,
        "ignore_eos": True,  # so that every answer has max_tokens tokens
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return [common | {"prompt": _prompt(pool, load.prompt_tokens, rng)} for _ in range(load.requests)]


def _prompt(pool: list[int] | None, tokens: int, rng: random.Random) -> list[int] | str:
    if pool is None:
        return " ".join(rng.choices(WORDS, k=tokens))
    return rng.choices(pool, k=tokens)


async def _token_pool(session: aiohttp.ClientSession, model: str, rng: random.Random) -> list[int] | None:
    """Ids of ordinary words in this model's vocabulary, or None when the server has no /tokenize."""
    text = " ".join(rng.choices(WORDS, k=POOL_WORDS))
    try:
        answer = await _json(session, "POST", "tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
    except LoadError:
        return None
    return [int(token) for token in answer.get("tokens", ())] or None


async def _json(
    session: aiohttp.ClientSession, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    import aiohttp

    try:
        async with session.request(method, path, json=body) as response:
            if response.status != 200:
                raise LoadError(f"{response.url} answers {response.status}: {(await response.text())[:200]}")
            answer: dict[str, Any] = await response.json()
            return answer
    except aiohttp.ClientConnectorError as error:
        raise LoadError(f"no server answers on {error.host}:{error.port}; aengine serve starts one") from error
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise LoadError(f"{method} {path} failed: {error}") from error


# ---- when it is sent


async def _closed(session: aiohttp.ClientSession, bodies: list[dict[str, Any]], load: Load) -> list[Sample]:
    samples = [Sample() for _ in bodies]
    left = iter(zip(bodies, samples, strict=True))

    async def client() -> None:
        for body, sample in left:
            await _request(session, body, sample)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(load.concurrency, len(bodies))):
            group.create_task(client())
    return samples


async def _open(session: aiohttp.ClientSession, bodies: list[dict[str, Any]], load: Load) -> list[Sample]:
    assert load.rate is not None
    samples = [Sample() for _ in bodies]
    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for body, sample, at_s in zip(bodies, samples, arrivals_s(len(bodies), load.rate, load.seed), strict=True):
            await asyncio.sleep(max(0.0, began_s + at_s - time.perf_counter()))
            group.create_task(_request(session, body, sample))
    return samples


def arrivals_s(n: int, rate: float, seed: int) -> list[float]:
    """Arrival times of a Poisson process of `rate` a second; the first at 0. The same seed gives the same times."""
    rng = random.Random(f"arrivals {seed}")
    times = [0.0]
    for _ in range(n - 1):
        times.append(times[-1] + rng.expovariate(rate))
    return times[:n]


# ---- one request


async def _request(session: aiohttp.ClientSession, body: dict[str, Any], sample: Sample) -> None:
    import aiohttp

    sample.started_s = time.perf_counter()
    try:
        async with session.post("v1/completions", json=body) as response:
            if response.status != 200:
                sample.error = f"HTTP {response.status}: {error_message(await response.text())}"
            else:
                await _read(response, sample)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    sample.e2e_s = time.perf_counter() - sample.started_s


async def _read(response: aiohttp.ClientResponse, sample: Sample) -> None:
    last_s = sample.started_s
    async for event in sse_events(response.content.iter_any()):
        now_s = time.perf_counter()
        if event.get("error"):
            sample.error = error_message(json.dumps(event))
            return
        usage = event.get("usage")
        if usage:
            sample.prompt_tokens = usage.get("prompt_tokens", 0)
            sample.completion_tokens = usage.get("completion_tokens", 0)
        if not any(choice.get("text") for choice in event.get("choices", ())):
            continue  # the usage chunk, or an end without text: no token came with it
        if sample.ttft_s is None:
            sample.ttft_s = now_s - sample.started_s
        else:
            sample.gaps_s.append(now_s - last_s)
        last_s = now_s


async def sse_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """JSON objects of a server-sent event stream up to [DONE]. Comments and fields other than data are passed over.

    Chunks may break anywhere. Raises ValueError for data that is not a JSON object.
    """
    data: list[bytes] = []
    async for line in _lines(chunks):
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            text = b"\n".join(data)
            data.clear()
            if text == b"[DONE]":
                return
            event = json.loads(text)
            if not isinstance(event, dict):
                raise ValueError(f"an event holds a {type(event).__name__}, not an object")
            yield event


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")


def error_message(text: str) -> str:
    """The message of an OpenAI error body, else the beginning of the text."""
    try:
        return str(json.loads(text)["error"]["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return text[:300]
