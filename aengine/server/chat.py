"""`/v1/chat/completions`.

Owns: the order of a chat request: gate, body, model, prompt, submission, answer.
Does not know: how any of these is done.
Invariants: every fault of the request is raised before anything is submitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web
from msgspec.structs import replace

from aengine.errors import InvalidRequest
from aengine.server.answers import PlainParser, answer_form
from aengine.server.body import read_body
from aengine.server.chat_frames import ChatFrames, ChunkOptions, chat_answer
from aengine.server.context import CONTEXT, IGNORED
from aengine.server.envelope import json_response
from aengine.server.jobs import Job, JobHead, collect, submit
from aengine.server.logprobs import TokenIds
from aengine.server.pieces import AnswerParser
from aengine.server.prompts import chat_prompt
from aengine.server.sampling import chat_sampling, renamed
from aengine.server.schemas import ChatBody, GenerationBody
from aengine.server.sse import stream_job
from aengine.server.structured import as_sent
from aengine.server.tool_faults import tool_fault
from aengine.server.tools import knows_tools


async def chat_completions(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    engine = context.ready()
    body = (await read_body(request, ChatBody)).value
    try:
        chat = await start_chat(request, body, "chatcmpl")
    except InvalidRequest as error:
        raise told_of_chat(error, body) from None
    options = chunk_options(body, logprobs=bool(body.logprobs))
    async with chat.job as job:
        if body.stream:
            frames = ChatFrames(job, options, engine.text, chat.parsers)
            return await stream_job(request, job, frames, context.config.keepalive_s)
        return json_response(chat_answer(job, await collect(job), options, engine.text, chat.parsers))


@dataclass(frozen=True, slots=True)
class StartedChat:
    """`parsers`: one per choice; None: the text is the answer."""

    job: Job
    parsers: Sequence[AnswerParser] | None

    @property
    def parser(self) -> AnswerParser:
        """Of the only choice."""
        return self.parsers[0] if self.parsers else PlainParser()


async def start_chat(request: web.Request, body: ChatBody, prefix: str) -> StartedChat:
    """Submits a chat whose id begins with `prefix`, for whichever endpoint; raises typed errors in a chat's terms."""
    context = request.app[CONTEXT]
    engine = context.ready()
    model = context.served_name(body.model)
    sampling = chat_sampling(body, engine.model.vocab_size)
    if body.chat_template is None:
        sampling = replace(sampling, stop=(*sampling.stop, *engine.model.chat_stops))
    form = answer_form(body, engine.text, context.config)
    if body.tools and not (form.use.written or knows_tools(body.chat_template or engine.text.chat_template)):
        request[IGNORED] = (*request.get(IGNORED, ()), "tools")  # answered all the same: front-ends always send them
    prompt = await chat_prompt(body, engine, sampling.max_tokens, tool_parser=context.config.tool_parser)
    try:
        await engine.prepare(sampling)  # what the client wrote, by itself: faults in it are told in its own terms
    except InvalidRequest as error:
        raise as_sent(error, body) from None
    shown = sampling.skip_special_tokens
    sampling = await form.sampling(sampling, prompt.ids, engine.text)
    head = JobHead.new(prefix, model, context.fingerprint())
    if body.parse_answer is False:  # the model's own text, as the engine in process gives it
        parsers, sampling = None, replace(sampling, skip_special_tokens=shown)
    else:
        parsers = await form.parsers(sampling.n, prompt.ids, engine.text)
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
        if form.use.forced and error.param == "grammar":
            raise await tool_fault(engine, body.tools or (), form.use.offered, error) from None
        raise as_sent(error, body) from None
    job.thoughts = form.thoughts(job.choices, prompt.ids, engine.text)
    return StartedChat(job, parsers)


def told_of_chat(error: InvalidRequest, body: ChatBody) -> InvalidRequest:
    """The engine speaks of prompts and max_tokens; the client sent messages and perhaps the newer name."""
    if error.param == "prompt":
        error.param = "messages"
    if body.max_tokens is None:
        error = renamed(error, "max_tokens", "max_completion_tokens")
    return renamed(error, "logprobs", "top_logprobs")


def chunk_options(body: GenerationBody, *, logprobs: bool) -> ChunkOptions:
    asked = body.stream_options
    usage = bool(asked and asked.include_usage)
    return ChunkOptions(
        usage=usage,
        running_usage=bool(asked and asked.continuous_usage_stats),
        token_ids=bool(body.return_token_ids),
        logprobs=logprobs,
        names=TokenIds() if body.return_tokens_as_token_ids else None,
    )
