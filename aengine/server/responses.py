"""`/v1/responses`, without a store.

Owns: the order of its requests.
Does not know: how any step is done; behind its own body it is a chat.
Invariants: nothing is kept of a response once it was sent.
"""

from __future__ import annotations

from contextlib import aclosing

from aiohttp import web

from aengine.errors import InvalidRequest, NotFound
from aengine.server.blocks import Blocks
from aengine.server.body import read_body
from aengine.server.chat import start_chat
from aengine.server.context import CONTEXT, IGNORED
from aengine.server.drafts import as_sent
from aengine.server.envelope import json_response, shorten
from aengine.server.responses_frames import ResponseFrames
from aengine.server.responses_input import SENT_NAMES, chat_request
from aengine.server.responses_schema import ResponsesBody
from aengine.server.sse import KEEP_ALIVE, Dialect, stream_job


async def responses(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    engine = context.ready()
    body = (await read_body(request, ResponsesBody)).value
    chat = chat_request(body)
    if chat.ignored:
        request[IGNORED] = (*request.get(IGNORED, ()), *chat.ignored)
    try:
        started = await start_chat(request, chat.body, "resp")
    except InvalidRequest as error:
        raise as_sent(error, chat, SENT_NAMES) from None
    async with started.job as job:
        frames = ResponseFrames(job, body, Blocks(started.parser), engine.text)
        if body.stream:
            dialect = Dialect(done=b"", keep_alive=KEEP_ALIVE, failure=frames.failure)
            return await stream_job(request, job, frames, context.config.keepalive_s, dialect)
        async with aclosing(job.deltas()) as deltas:
            async for delta in deltas:
                frames.delta(delta)
        return json_response(frames.response())


async def stored_response(request: web.Request) -> web.StreamResponse:
    """Whoever asks for a response later: there is none."""
    id = shorten(request.match_info["id"], 100)
    raise NotFound(f"there is no response {id!r}: this server stores none", param="response_id")
