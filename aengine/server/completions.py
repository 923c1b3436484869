"""`/v1/completions`, and the answer about embeddings.

Owns: the order of a completion request: gate, body, model, prompts, submission, answer.
Does not know: how any of these is done.
Invariants: every fault of the request is raised before anything is submitted.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from aengine.errors import InvalidRequest, NotSupported
from aengine.server.body import read_body
from aengine.server.chat import chunk_options
from aengine.server.completion_frames import CompletionFrames, CompletionOptions, completion_answer
from aengine.server.context import CONTEXT
from aengine.server.envelope import json_response
from aengine.server.facade import Engine
from aengine.server.jobs import JobHead, collect, submit
from aengine.server.prompts import Prompt, completion_prompts
from aengine.server.sampling import candidates_as_sent, completion_sampling, scores_only
from aengine.server.schemas import CompletionBody
from aengine.server.sse import stream_job
from aengine.server.structured import as_sent


async def completions(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    engine = context.ready()
    body = (await read_body(request, CompletionBody)).value
    model = context.served_name(body.model)
    if body.suffix:
        raise InvalidRequest("suffix: insertion is not available on this server", param="suffix")
    sampling = completion_sampling(body, engine.model.vocab_size)
    prompts = await completion_prompts(body, engine, sampling.max_tokens)
    options = await _options(body, prompts, engine)
    head = JobHead.new("cmpl", model, context.fingerprint())
    context.ready()  # encoding took its time in a thread; the server may have begun to drain
    ids = [prompt.ids for prompt in prompts]
    try:
        job = await submit(engine, head, ids, sampling, priority=body.priority, cache_salt=body.cache_salt)
    except InvalidRequest as error:
        raise as_sent(candidates_as_sent(error, body), body) from None
    async with job:
        if body.stream:
            frames = CompletionFrames(job, options, engine.text)
            return await stream_job(request, job, frames, context.config.keepalive_s)
        return json_response(completion_answer(job, await collect(job), options, engine.text))


async def _options(body: CompletionBody, prompts: Sequence[Prompt], engine: Engine) -> CompletionOptions:
    echoes = [await _echo(prompt, engine) for prompt in prompts] if body.echo else None
    return CompletionOptions(
        chunk=chunk_options(body, logprobs=body.logprobs is not None),
        n=body.n or 1,
        echoes=echoes,
        scores_only=scores_only(body),
        prompt_logprobs=body.prompt_logprobs is not None,
    )


async def _echo(prompt: Prompt, engine: Engine) -> str:
    return prompt.text if prompt.text is not None else await engine.text.decode(prompt.ids)


async def embeddings(request: web.Request) -> web.StreamResponse:
    raise NotSupported("this server generates text; it has no embeddings")
