"""A server that shows the chat page and answers from a script: for what no model says on demand."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from aengine.server.page import add_page


@dataclass
class Reply:
    """`deltas`: the stream's pieces, each a `delta` object, plain content, or bytes that are sent as they are. `hold`:
    the last one never comes; `cut`: the stream ends before it."""

    deltas: list[Any]
    finish: str = "stop"
    step_s: float = 0.0
    hold: bool = False
    cut: bool = False


@dataclass
class Refusal:
    status: int
    message: str
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Script:
    """`answers` are given in turn, the last one again and again. `bodies`: what was asked; `paths`: all that was."""

    answers: list[Reply | Refusal] = field(default_factory=lambda: [Reply(["Yes."])])
    phase: str = "ready"
    key: str = ""
    modalities: tuple[str, ...] = ("text",)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)
    url: str = ""

    def refused(self, request: web.Request) -> web.Response | None:
        self.hosts.add(request.host)
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return error(Refusal(401, "missing or wrong API key"))
        if self.phase != "ready":
            headers = {"x-aengine-phase": self.phase, "Retry-After": "60"}
            return error(Refusal(503, f"the server is not ready yet (phase: {self.phase})", headers))
        return None

    async def health(self, request: web.Request) -> web.Response:
        headers = {"x-aengine-phase": self.phase}
        return web.json_response({}, status=200 if self.phase == "ready" else 503, headers=headers)

    async def models(self, request: web.Request) -> web.Response:
        cards = [{"id": name, "input_modalities": self.modalities} for name in ("small-model", "other-model")]
        return self.refused(request) or web.json_response({"data": cards})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        if refusal := self.refused(request):
            return refusal
        self.bodies.append(await request.json())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return error(answer) if isinstance(answer, Refusal) else await stream(request, answer)


def error(refusal: Refusal) -> web.Response:
    body = {"error": {"message": refusal.message, "type": "x", "param": None, "code": None}}
    return web.json_response(body, status=refusal.status, headers=refusal.headers)


async def stream(request: web.Request, reply: Reply) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    made = 0

    async def send(delta: dict[str, Any], finish: str | None = None) -> None:
        usage = {
            "prompt_tokens": 21,
            "completion_tokens": made,
            "prompt_tokens_details": {"cached_tokens": 16},
        }
        chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "usage": usage}
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    await send({"role": "assistant", "content": ""})
    for delta in reply.deltas:
        made += 1
        if isinstance(delta, bytes):
            await response.write(delta)
        else:
            await send({"content": delta} if isinstance(delta, str) else delta)
        await asyncio.sleep(reply.step_s)
    if reply.hold:
        await asyncio.Event().wait()
    if reply.cut:
        return response
    await send({}, reply.finish)
    await response.write(b"data: [DONE]\n\n")
    return response


@contextlib.asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[Script]:
    app = web.Application()
    add_page(app.router)
    app.router.add_get("/health", script.health)
    app.router.add_get("/v1/models", script.models)
    app.router.add_post("/v1/chat/completions", script.chat)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    script.url = "http://{}:{}".format(*runner.addresses[0][:2])
    try:
        yield script
    finally:
        await runner.cleanup()
