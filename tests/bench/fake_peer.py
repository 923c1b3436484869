"""A server that speaks as much of the OpenAI API as bench/load.py asks for, in few lines and with planted faults.

    python fake_peer.py PORT [--token-s X]

A token takes `token_s`. While a prompt of more than 1,000 ids is read (50 tokens' time) nobody gets a token, as in an
engine without chunks. A prompt that begins with 13 is refused; one that begins with 14 breaks off with an error event.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

from aiohttp import web

REFUSED, BROKEN = 13, 14
LONG, LONG_READ = 1000, 50


class Peer:
    def __init__(self, token_s: float = 0.001) -> None:
        self.token_s = token_s
        self.free = asyncio.Event()
        self.free.set()
        self.bodies: list[dict[str, Any]] = []
        self.open = self.most_open = self.left = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**24)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.answer)
        app.router.add_post("/v1/chat/completions", self.answer)
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        prompt = body.get("prompt") or body["messages"][0]["content"]
        if prompt[0] == REFUSED:
            return web.json_response({"error": {"message": "unlucky"}}, status=400)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self.stream(response, body, prompt)
        except ConnectionResetError:
            self.left += 1
        finally:
            self.open -= 1
        return response

    async def stream(self, response: web.StreamResponse, body: dict[str, Any], prompt: Any) -> None:
        if len(prompt) > LONG:
            self.free.clear()
            await asyncio.sleep(LONG_READ * self.token_s)
            self.free.set()
        tokens = body["max_tokens"] if body.get("ignore_eos") else body["max_tokens"] // 2
        for _ in range(tokens):
            await asyncio.sleep(self.token_s)
            await self.free.wait()
            choice = {"delta": {"content": " x"}} if "messages" in body else {"text": " x"}
            await self.send(response, {"choices": [choice]})
        if prompt[0] == BROKEN:
            await self.send(response, {"error": {"message": "out of luck"}})
        usage = {"prompt_tokens": len(prompt), "completion_tokens": tokens, "prompt_tokens_details": None}
        await self.send(response, {"choices": [{"text": "", "finish_reason": "length"}], "usage": usage})
        await response.write(b"data: [DONE]\n\n")

    async def send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


async def start(peer: Peer, port: int = 0) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(peer.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--token-s", type=float, default=0.001)
    args = parser.parse_args()
    await start(Peer(args.token_s), args.port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
