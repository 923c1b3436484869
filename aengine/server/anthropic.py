"""`/v1/messages` and its count_tokens: the Messages API.

Owns: the order of its requests.
Does not know: how any step is done; behind its own body a message is a chat.
Invariants: count_tokens gives the number of input tokens that the same message would be charged with.
"""

from __future__ import annotations

from contextlib import aclosing

from aiohttp import web

from aengine.errors import InvalidRequest
from aengine.server.anthropic_frames import DIALECT, MessageFrames
from aengine.server.anthropic_input import SENT_NAMES, chat_request
from aengine.server.anthropic_schema import CountBody, MessagesBody
from aengine.server.blocks import Blocks
from aengine.server.body import read_body
from aengine.server.chat import start_chat
from aengine.server.context import CONTEXT, IGNORED
from aengine.server.drafts import ChatRequest, as_sent
from aengine.server.envelope import json_response
from aengine.server.prompts import chat_prompt
from aengine.server.sampling import chat_sampling
from aengine.server.sse import stream_job


async def messages(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    context.ready()
    body = (await read_body(request, MessagesBody)).value
    chat = _chat(request, body)
    try:
        started = await start_chat(request, chat.body, "msg")
    except InvalidRequest as error:
        raise as_sent(error, chat, SENT_NAMES) from None
    async with started.job as job:
        frames = MessageFrames(job, Blocks(started.parser), body.stop_sequences or ())
        if body.stream:
            return await stream_job(request, job, frames, context.config.keepalive_s, DIALECT)
        async with aclosing(job.deltas()) as deltas:
            async for delta in deltas:
                frames.delta(delta)
        return json_response(frames.message())


async def count_tokens(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    engine = context.ready()
    body = (await read_body(request, CountBody)).value
    context.served_name(body.model)
    chat = _chat(request, body)
    try:
        chat_sampling(chat.body, engine.model.vocab_size)  # raises for what a message could not have
        prompt = await chat_prompt(chat.body, engine, None, tool_parser=context.config.tool_parser)
    except InvalidRequest as error:
        raise as_sent(error, chat, SENT_NAMES) from None
    return json_response({"input_tokens": len(prompt.ids)})


def _chat(request: web.Request, body: CountBody) -> ChatRequest:
    chat = chat_request(body)
    if chat.ignored:
        request[IGNORED] = (*request.get(IGNORED, ()), *chat.ignored)
    return chat
