"""Claim: from the commit's outputs to the bytes given to the socket a stream's token costs the event loop at most 5 us.

1,024 (--streams) chats and completions over HTTP, in the server's own application, on transports that count bytes and
drop them. Every step gives each stream one token of the model's vocabulary: detokenising, the stream, waking whoever
writes, the frame, the chunk around it, the transport's `write`. No device, scheduler or kernel of an operating system
is in the figure; what the socket's `send` adds is measured beside it, on a loopback connection.

CPU time of this process; the median of the steps, and the least. `detokenise` and `frame` are the parts that can be
called alone, on the same tokens. `slow readers`: the same with every transport full, so that deltas merge unsent.

    python bench/output_path.py [--streams 1024] [--steps 60] [--model smollm2-135m] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import statistics
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
from aiohttp import web
from report import Report, quiet_gc

from aengine.config import ServerConfig, home
from aengine.engine.output import Choice, OutputTask
from aengine.engine.stream import RequestStream
from aengine.engine.text import TextProcessor
from aengine.metrics import Metrics
from aengine.models.loader import load_tokenizer
from aengine.models.store import resolve
from aengine.models.tokenizer import Tokenizer
from aengine.server.app import create_app
from aengine.server.chat_frames import ChatFrames, ChunkOptions
from aengine.server.jobs import Job, JobHead
from aengine.timeline import Timeline
from aengine.types import OutputDelta, SamplingParams, StepOutputs

TARGET_US = 5.0
TEXT = "the quick brown fox, naïve café – 東京 and 42 other things; def f(x): return x ** 2\n"
WARM_STEPS = 8
COUNTED_STEPS = 8
ALL_THERE_S = 60.0  # for all requests to be submitted
LOOP_TURNS = 8  # beside those in which rows are handled; enough for tasks that must be woken
ENDPOINTS = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    "completion": ("/v1/completions", {"prompt": [300, 301]}),
    "completion with ids": ("/v1/completions", {"prompt": [300, 301], "return_token_ids": True}),
}


DROPPED: deque[bytes] = deque(maxlen=1)


class Sink(asyncio.Transport):
    """Takes bytes and drops them. Its `write` runs no Python, as that of a transport in C; some steps count instead."""

    __slots__ = ("protocol", "write")

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.protocol: Any = None
        self.write = DROPPED.append

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...


class Outlet:
    """The output half of an engine: what `submit` of a real one does for it, and nothing that makes tokens."""

    phase = "ready"

    def __init__(self, tokenizer: Tokenizer, expected: int) -> None:
        self.text = TextProcessor(tokenizer, max_context=8192)
        self.metrics = Metrics("bench")
        self.model = SimpleNamespace(
            names=("bench",), max_model_len=8192, vocab_size=60_000, eos_ids=(), has_chat_template=True
        )
        self.model.takes_images, self.model.chat_stops, self.model.created = False, (), 1
        self.queue: asyncio.Queue[StepOutputs] = asyncio.Queue()
        self.output = OutputTask(self.queue, lambda handle: None, self.metrics, Timeline())
        self.handles: list[int] = []
        self.all_there = asyncio.Event()
        self._expected = expected

    def bind_http(self, told: Any) -> None:
        self.metrics.bind_http(told)

    async def prepare(self, sampling: SamplingParams) -> None:
        """No request here has a grammar."""

    def submit(self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str, **_: Any) -> RequestStream:
        stream = RequestStream(request_id, list(prompt_ids), 1, lambda: None)
        detokenizer = self.text.tokenizer.stream(skip_special_tokens=sampling.skip_special_tokens)
        handle = len(self.handles) + 1
        self.output.register(Choice(handle, 0, stream, sampling, detokenizer))
        self.handles.append(handle)
        if len(self.handles) == self._expected:
            self.all_there.set()
        return stream


def make_steps(tokenizer: Tokenizer, streams: int, steps: int) -> list[list[int]]:
    """One token per stream and step: a text's own tokens, each stream somewhere else in it."""
    chance = random.Random(1)
    words = TEXT.split(" ")
    ids = tokenizer.encode(" ".join(chance.choice(words) for _ in range(4000)), add_special_tokens=False)
    return [[ids[(stream * 37 + step) % len(ids)] for stream in range(streams)] for step in range(steps)]


async def connect(outlet: Outlet, protocols: web.Server, endpoint: str, streams: int) -> list[Sink]:
    path, fields = ENDPOINTS[endpoint]
    body = json.dumps({"max_tokens": 4000, "stream": True, **fields}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\nContent-Type: application/json\r\n\r\n"
    )
    sinks = []
    for _ in range(streams):
        sink, protocol = Sink(), protocols()
        protocol.connection_made(sink)
        sink.protocol = protocol
        sinks.append(sink)
        protocol.data_received(head.encode() + body)
    async with asyncio.timeout(ALL_THERE_S):
        await outlet.all_there.wait()
    return sinks


class Load:
    """Streams of one endpoint, open."""

    def __init__(self, outlet: Outlet, steps: list[list[int]]) -> None:
        self._outlet = outlet
        self._handles = np.array(outlet.handles, np.int64)
        self._steps = [np.array(tokens, np.int32) for tokens in steps]
        self._number = 0
        self._run = asyncio.create_task(outlet.output.run())

    async def step(self) -> float:
        """One token for every stream; CPU microseconds a token, LOOP_TURNS idle turns of the loop included."""
        tokens = self._steps[self._number % len(self._steps)]
        self._number += 1
        outputs = StepOutputs(self._number, self._handles, tokens, {}, [], [], [])
        began_ns = time.process_time_ns()
        self._outlet.queue.put_nowait(outputs)
        for _ in range(LOOP_TURNS + len(tokens) // 128):
            await asyncio.sleep(0)
        return (time.process_time_ns() - began_ns) / 1e3 / len(tokens)

    async def steps(self, count: int) -> list[float]:
        with quiet_gc():
            return [await self.step() for _ in range(count)]

    async def close(self) -> None:
        self._run.cancel()
        await asyncio.gather(self._run, return_exceptions=True)


async def measure(tokenizer: Tokenizer, endpoint: str, streams: int, steps: int) -> dict[str, float]:
    outlet = Outlet(tokenizer, streams)
    app = create_app(outlet, ServerConfig())  # type: ignore[arg-type]
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    assert runner.server is not None
    sinks = await connect(outlet, runner.server, endpoint, streams)
    load = Load(outlet, make_steps(tokenizer, streams, steps + WARM_STEPS))
    await load.steps(WARM_STEPS)
    costs = await load.steps(steps)
    written: list[bytes] = []
    for sink in sinks:
        sink.write = written.append
    await load.steps(COUNTED_STEPS)
    for sink in sinks:
        sink.write = DROPPED.append
    for sink in sinks:
        sink.protocol.pause_writing()
    slow = await load.steps(max(steps // 4, 8))
    for sink in sinks:
        sink.protocol.resume_writing()
    await load.close()
    for sink in sinks:
        sink.protocol.connection_lost(None)
    await runner.cleanup()
    outlet.text.close()
    return {
        "median_us": statistics.median(costs),
        "least_us": min(costs),
        "writes": len(written) / (streams * COUNTED_STEPS),
        "bytes": sum(map(len, written)) / (streams * COUNTED_STEPS),
        "slow_readers_us": statistics.median(slow),
    }


def measure_parts(tokenizer: Tokenizer, streams: int, steps: int) -> dict[str, float]:
    """Detokenising and framing alone, and the kernel's part of a write."""
    rows = make_steps(tokenizer, streams, steps)
    texts = [tokenizer.stream() for _ in range(streams)]
    head = JobHead("chatcmpl-0123456789abcdef0123456789abcdef", 1, "bench", "fp_0123456789")
    frames = [
        ChatFrames(Job(head, [RequestStream("r", [1], 1, lambda: None)], 1), ChunkOptions(), SimpleNamespace())  # type: ignore[arg-type]
        for _ in range(streams)
    ]
    delta = OutputDelta(0, " token", (5,))
    detokenise, frame = [], []
    for row in rows:
        began_ns = time.process_time_ns()
        for text, token in zip(texts, row, strict=True):
            text.step(token)
        between_ns = time.process_time_ns()
        for each in frames:
            each.delta(delta)
        ended_ns = time.process_time_ns()
        detokenise.append((between_ns - began_ns) / 1e3 / streams)
        frame.append((ended_ns - between_ns) / 1e3 / streams)
    return {
        "detokenise_us": statistics.median(detokenise),
        "frame_us": statistics.median(frame),
        "send_us": send_us(len(frames[0].delta(delta)), 4000),
    }


def send_us(size: int, times: int) -> float:
    """CPU microseconds of one `send` of `size` bytes on a loopback connection whose other end is read in between."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        with near, far:
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            data, costs = bytes(size), []
            for _ in range(times // 100):
                began_ns = time.process_time_ns()
                for _ in range(100):
                    near.send(data)
                costs.append((time.process_time_ns() - began_ns) / 1e5)
                left = 100 * size
                while left:
                    left -= len(far.recv(1 << 20))
    return statistics.median(costs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--model", default="smollm2-135m", help="its tokenizer is used")
    parser.add_argument("--quick", action="store_true", help="few steps")
    args = parser.parse_args()
    if args.quick:
        args.steps = 12
    tokenizer = load_tokenizer(resolve(args.model, home=home()))
    config = {"streams": args.streams, "steps": args.steps, "tokenizer": args.model}
    report = Report("output_path", (__doc__ or "").split("\n", 1)[0].removeprefix("Claim: "), config)
    parts = report.figures["parts"] = measure_parts(tokenizer, args.streams, args.steps)
    print("  ".join(f"{name} {value:.2f}" for name, value in parts.items()))
    for endpoint in ENDPOINTS:
        row = asyncio.run(measure(tokenizer, endpoint, args.streams, args.steps))
        report.figures[endpoint.replace(" ", "_")] = row
        print(f"  {endpoint:20}" + "".join(f"  {name} {value:.2f}" for name, value in row.items()), flush=True)
        report.at_most(f"a token of a {endpoint}", row["median_us"], TARGET_US, "us")
    report.close()


if __name__ == "__main__":
    main()
