"""An HTTP front for OpenVINO GenAI's continuous batching, which comes without a server: a peer for bench/peers.py.

Owns: /health, /v1/models, a streaming /v1/completions; one task that steps the pipeline and then hands tokens out.
Does not know: sampling (greedy only), chat, limits; it is a measuring aid, not a server for people.
Invariants: a step runs in a worker thread, so that the loop is as free as the pipeline lets it be; a client that leaves
ends its request.

    python bench/openvino_front.py FOLDER PORT [--cache-gb 2] [--max-num-seqs 64] [--max-batched-tokens 512]
        [--lookup 5]

`--lookup N`: up to N tokens a step are guessed from the text so far (the pipeline's prompt lookup) and checked.

Runs in an environment with openvino-genai, tokenizers and aiohttp; nothing of aengine is imported. FOLDER is an
OpenVINO export that has tokenizer.json beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from aiohttp import web
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

Tokens = asyncio.Queue[list[int]]


class Engine:
    def __init__(self, args: argparse.Namespace) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = args.cache_gb
        scheduler.max_num_seqs = args.max_num_seqs
        scheduler.max_num_batched_tokens = args.max_batched_tokens
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        self.tokenizer = Tokenizer.from_file(str(Path(args.folder) / "tokenizer.json"))
        self.lookup, self.ngram = args.lookup, args.lookup_ngram
        more = {"prompt_lookup": True} if args.lookup else {}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(args.folder, scheduler, "CPU", more)
        self.ids = itertools.count()
        self.handles: dict[int, tuple[Any, Tokens]] = {}
        self.waiting: list[tuple[int, list[int], Any, Tokens]] = []
        self.left: list[int] = []
        self.wake = asyncio.Event()

    def submit(self, prompt: list[int], max_tokens: int, ignore_eos: bool) -> tuple[int, Tokens]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = ignore_eos
        config.do_sample = False
        if self.lookup:
            config.num_assistant_tokens, config.max_ngram_size = self.lookup, self.ngram
        number, tokens = next(self.ids), Tokens()
        self.waiting.append((number, prompt, config, tokens))
        self.wake.set()
        return number, tokens

    def drop(self, number: int) -> None:
        self.left.append(number)
        self.wake.set()

    async def run(self) -> None:
        """Between steps: requests come and go; after a step: its tokens. An empty list ends a request's tokens."""
        while True:
            self.admit()
            if not self.handles:
                self.wake.clear()
                await self.wake.wait()
                continue
            await asyncio.to_thread(self.pipeline.step)
            for number, (handle, tokens) in list(self.handles.items()):
                while handle.can_read():
                    tokens.put_nowait([i for output in handle.read().values() for i in output.generated_ids])
                if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                    tokens.put_nowait([])
                    del self.handles[number]

    def admit(self) -> None:
        for number, prompt, config, tokens in self.waiting:
            tensor = openvino.Tensor(np.array([prompt], dtype=np.int64))
            self.handles[number] = (self.pipeline.add_request(number, tensor, config), tokens)
        self.waiting.clear()
        for number in self.left:
            handle, _ = self.handles.pop(number, (None, None))
            if handle is not None:
                handle.cancel()
        self.left.clear()

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["prompt"]
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        number, tokens = self.submit(prompt, body["max_tokens"], body.get("ignore_eos", False))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        stream, count = DecodeStream(skip_special_tokens=True), 0
        try:
            while some := await tokens.get():
                count += len(some)
                text = "".join(stream.step(self.tokenizer, token) or "" for token in some)
                await send(response, {"choices": [{"index": 0, "text": text, "finish_reason": None}]})
            usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
            await send(response, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": usage})
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.drop(number)
        return response


async def send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("port", type=int)
    parser.add_argument("--cache-gb", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-batched-tokens", type=int, default=512)
    parser.add_argument("--lookup", type=int, default=0, help="tokens guessed a step; 0: none")
    parser.add_argument("--lookup-ngram", type=int, default=3, help="tokens that must agree before a guess, at most")
    args = parser.parse_args()
    engine = Engine(args)

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "openvino", "object": "model"}]})

    app = web.Application(client_max_size=2**24)
    app.add_routes([web.get("/health", health), web.get("/v1/models", models)])
    app.add_routes([web.post("/v1/completions", engine.completions)])
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", args.port).start()
    await engine.run()


if __name__ == "__main__":
    asyncio.run(main())
