"""`aengine batch`: answer a file of requests.

Owns: the command's flags, the worker tasks that ask and write, retries, the progress bar and the summary.
Does not know: the files' format (batch_file.py), how answers come about.
Invariants: an answer is in the output as soon as it is there; a run that was interrupted goes on where it ended when
the same command is given again; requests pass the same checks as any that come over HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from aengine.cli.batch_file import (
    BatchAnswer,
    BatchRequest,
    answer_line,
    answer_of,
    answered,
    read_requests,
    unanswered,
)
from aengine.cli.options import Parser, UsageError, add_settings, config_of, print_config
from aengine.config import AengineConfig, ServerConfig
from aengine.errors import NotReady

if TYPE_CHECKING:
    import aiohttp

RETRIES = 5  # of a request that the server was too busy for, or did not answer
FAULT_RETRIES = 1  # of a request that the server failed at: its own fault, and likely again
RETRY_S = 1.0  # before the first; doubles, unless the server says when
REMOTE_CONCURRENCY = 64
TIMEOUT_S = 3600.0


def parser() -> Parser:
    made = Parser(
        "batch",
        "Answer a file of requests in OpenAI's batch format with a model in this process, or with a running server\n"
        "(--url). Given again, the same command goes on where an interrupted run ended.",
        epilog='a line in:  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}\n'
        'a line out: {"id": …, "custom_id": "a", "response": {"status_code": 200, "body": {…}}, "error": null}\n'
        "Exit code 1: some requests failed; their lines say why.",
    )
    made.add_argument("input", metavar="INPUT", help="file of requests, one JSON object a line")
    made.add_argument("-o", "--output", metavar="FILE", help="file of answers (default: INPUT with .out.jsonl)")
    made.add_argument("--url", help="base URL of a running server, instead of a model in this process")
    made.add_argument("--api-key", metavar="TEXT", help="bearer token for --url")
    made.add_argument("--concurrency", type=int, metavar="N", help="requests at a time (default: twice the slots)")
    made.add_argument("--no-progress", action="store_true", help="no progress bar")
    add_settings(made, server=False, model_flag=True)
    return made


def run(args: argparse.Namespace) -> int:
    config = config_of(args)
    if args.print_config:
        return print_config(config)
    if args.concurrency is not None and args.concurrency < 1:
        raise UsageError(f"--concurrency is {args.concurrency}, not at least 1")
    source = Path(args.input)
    target = Path(args.output) if args.output else source.with_name(f"{source.stem}.out.jsonl")
    if source.absolute() == target.absolute():
        raise UsageError(f"{source} is both input and output")
    requests = read_requests(source)
    kept = answered(target)
    done = {request.custom_id: kept[request.custom_id] for request in requests if request.custom_id in kept}
    left = [request for request in requests if request.custom_id not in done]
    slots = config.engine.scheduler.max_num_seqs
    at_once = args.concurrency or (REMOTE_CONCURRENCY if args.url else 2 * slots)
    batch = Batch(left, total=len(requests), progress=not args.no_progress)
    if left:
        with target.open("ab") as file:
            asyncio.run(_answer_all(batch, file, args, config, min(at_once, len(left))))
    failed = batch.failed + sum(answer.error is not None for answer in done.values())
    print(
        f"{len(requests)} requests: {len(requests) - failed} answered, {failed} failed"
        + (f" ({len(done)} of them in an earlier run)" if done else "")
        + f"; answers in {target}"
        + (f", beside {others} to other requests" if (others := len(kept) - len(done)) else ""),
        file=sys.stderr,
    )
    return 1 if failed else 0


async def _answer_all(
    batch: Batch, file: BinaryIO, args: argparse.Namespace, config: AengineConfig, at_once: int
) -> None:
    remote = _remote(args.url, args.api_key) if args.url else _in_process(config)
    async with remote as session:
        await batch.run(session, file, at_once)


@dataclass
class Batch:
    """The requests that are left, asked by a few tasks."""

    left: Sequence[BatchRequest]
    total: int
    progress: bool
    failed: int = 0
    _next: int = field(default=0, init=False)

    async def run(self, session: aiohttp.ClientSession, file: BinaryIO, at_once: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), disable=not self.progress, transient=True) as bar:
            task = bar.add_task("requests", total=self.total, completed=self.total - len(self.left))

            async def work() -> None:
                while self._next < len(self.left):
                    request = self.left[self._next]
                    self._next += 1
                    answer = await _ask(session, request)
                    file.write(answer_line(answer))
                    file.flush()
                    self.failed += answer.error is not None
                    bar.advance(task)

            async with asyncio.TaskGroup() as group:
                for _ in range(at_once):
                    group.create_task(work())


async def _ask(session: aiohttp.ClientSession, request: BatchRequest) -> BatchAnswer:
    """The server's answer; a busy or silent server is asked again, one that failed once more."""
    wait_s = RETRY_S
    faults = 0
    for left in reversed(range(RETRIES + 1)):
        answer, told_s = await _ask_once(session, request)
        faults += answer.fault
        if answer.final or faults > FAULT_RETRIES or not left:
            break
        await asyncio.sleep(told_s or wait_s)
        wait_s *= 2
    return answer


async def _ask_once(session: aiohttp.ClientSession, request: BatchRequest) -> tuple[BatchAnswer, float]:
    """-> (answer, seconds the server asks to wait; 0: it does not say)."""
    import aiohttp

    try:
        async with session.post(request.url.lstrip("/"), json=request.body) as response:
            raw = await response.read()
            wait = response.headers.get("Retry-After", "")
            name = response.headers.get("x-request-id", "")
            return answer_of(request, response.status, name, _decoded(raw)), float(wait) if wait.isdecimal() else 0.0
    except (aiohttp.ClientError, TimeoutError) as error:
        return unanswered(request, f"{error or type(error).__name__}"), 0.0


def _decoded(raw: bytes) -> object:
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return raw[:10_000].decode(errors="replace")


# ---- who answers


@contextlib.asynccontextmanager
async def _remote(url: str, api_key: str | None) -> AsyncIterator[aiohttp.ClientSession]:
    import aiohttp

    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url} is not an http:// or https:// URL")
    base = url.rstrip("/").removesuffix("/v1") + "/"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(base, headers=headers, connector=connector, timeout=timeout) as session:
        try:
            async with session.get("health") as response:
                if response.status != 200:
                    raise NotReady(f"{base}health answers {response.status}")
        except aiohttp.ClientConnectorError as error:
            raise NotReady(f"{base} does not answer; aengine serve starts a server, no --url needs none") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise NotReady(f"{base} does not answer: {error or type(error).__name__}") from error
        yield session


@contextlib.asynccontextmanager
async def _in_process(config: AengineConfig) -> AsyncIterator[aiohttp.ClientSession]:
    """The whole server on a socket that only this process knows."""
    import aiohttp
    from aiohttp import web

    from aengine import AsyncEngine
    from aengine.server import create_app

    async with AsyncEngine(config.engine) as engine:
        for line in engine.report.lines:
            print(line, file=sys.stderr)
        runner = web.AppRunner(create_app(engine, ServerConfig()), handler_cancellation=True, access_log=None)
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/batch.sock"
            try:
                await runner.setup()
                await web.UnixSite(runner, path).start()
                connector = aiohttp.UnixConnector(path, limit=0)
                timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
                async with aiohttp.ClientSession("http://batch/", connector=connector, timeout=timeout) as session:
                    yield session
            finally:
                await runner.cleanup()
