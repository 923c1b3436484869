"""`/v1/chat/completions`.

Owns: the order of a chat request: gate, body, model, prompt, submission, answer.
Does not know: how any of these is done.
Invariants: every fault of the request is raised before anything is submitted.
"""

from __future__ import annotations

from aiohttp import web
from msgspec.structs import replace

from aengine.errors import InvalidRequest
from aengine.server.body import read_body
from aengine.server.chat_frames import ChatFrames, ChunkOptions, chat_answer
from aengine.server.context import CONTEXT, IGNORED
from aengine.server.envelope import json_response
from aengine.server.jobs import JobHead, collect, submit
from aengine.server.prompts import chat_prompt
from aengine.server.sampling import chat_sampling, renamed
from aengine.server.schemas import ChatBody, GenerationBody
from aengine.server.sse import stream_job
from aengine.server.structured import as_sent


async def chat_completions(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    engine = context.ready()
    body = (await read_body(request, ChatBody)).value
    model = context.served_name(body.model)
    sampling = chat_sampling(body, engine.model.vocab_size)
    if body.chat_template is None:
        sampling = replace(sampling, stop=(*sampling.stop, *engine.model.chat_stops))
    if body.tools and "tools" not in (engine.text.chat_template or ""):
        request[IGNORED] = (*request.get(IGNORED, ()), "tools")  # answered all the same: front-ends always send them
    prompt = await chat_prompt(body, engine, sampling.max_tokens)
    options = chunk_options(body, logprobs=bool(body.logprobs))
    head = JobHead.new("chatcmpl", model, context.fingerprint())
    context.ready()  # rendering took its time in a thread; the server may have begun to drain
    try:
        job = await submit(
            engine,
            head,
            [prompt.ids],
            sampling,
            priority=body.priority,
            cache_salt=body.cache_salt,
            images=prompt.images,
        )
    except InvalidRequest as error:
        raise _as_sent(error, body) from None
    async with job:
        if body.stream:
            frames = ChatFrames(job, options, engine.text)
            return await stream_job(request, job, frames, context.config.keepalive_s)
        return json_response(chat_answer(job, await collect(job), options, engine.text))


def _as_sent(error: InvalidRequest, body: ChatBody) -> InvalidRequest:
    """The engine speaks of prompts and max_tokens; the client sent messages and perhaps the newer name."""
    if error.param == "prompt":
        error.param = "messages"
    if body.max_tokens is None:
        error = renamed(error, "max_tokens", "max_completion_tokens")
    return as_sent(renamed(error, "logprobs", "top_logprobs"), body)


def chunk_options(body: GenerationBody, *, logprobs: bool) -> ChunkOptions:
    asked = body.stream_options
    usage = bool(asked and asked.include_usage)
    return ChunkOptions(
        usage=usage,
        running_usage=bool(asked and asked.continuous_usage_stats),
        token_ids=bool(body.return_token_ids),
        logprobs=logprobs,
    )
