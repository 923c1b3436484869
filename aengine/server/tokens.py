"""Tokenizer endpoints: `/tokenize`, `/detokenize`, `/tokenizer_info`, `/v1/chat/completions/render`.

Owns: their answers.
Does not know: sampling, the scheduler; nothing here is queued behind generation.
Invariants: render and tokenize give the very ids that the same chat request would be submitted with.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from aengine.errors import InvalidRequest
from aengine.server.body import read_body
from aengine.server.chat import told_of_chat
from aengine.server.context import CONTEXT
from aengine.server.envelope import json_response
from aengine.server.facade import Engine
from aengine.server.messages import conversation
from aengine.server.prompts import chat_prompt, image_list
from aengine.server.sampling import chat_sampling, check_token_ids
from aengine.server.schemas import ChatBody, DetokenizeBody, TokenizeBody


async def tokenize(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    engine = context.ready()
    body = (await read_body(request, TokenizeBody)).value
    context.served_name(body.model)
    ids = await _token_ids(body, engine, context.config.tool_parser)
    texts = [engine.text.token_text(token) for token in ids] if body.return_token_strs else None
    return json_response(
        {"count": len(ids), "max_model_len": engine.model.max_model_len, "tokens": ids, "token_strs": texts}
    )


async def _token_ids(body: TokenizeBody, engine: Engine, tool_parser: str) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("send either prompt or messages", param="prompt")
    if body.prompt is not None:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        return await engine.text.encode(body.prompt, add_special_tokens=special)
    messages, call = conversation(body, engine.text.chat_template, image_list(engine), tool_parser=tool_parser)
    if body.add_special_tokens:
        return await engine.text.encode(await engine.text.render_chat(messages, **call), add_special_tokens=True)
    return await engine.text.encode_chat(messages, **call)


async def detokenize(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    engine = context.ready()
    body = (await read_body(request, DetokenizeBody)).value
    context.served_name(body.model)
    check_token_ids("tokens", body.tokens, engine.model.vocab_size)
    return json_response({"prompt": await engine.text.decode(body.tokens)})


async def tokenizer_info(request: web.Request) -> web.StreamResponse:
    """What lm-eval probes to render and count by itself."""
    engine = request.app[CONTEXT].ready()
    eos_ids = list(engine.model.eos_ids)
    info: dict[str, Any] = {
        "eos_token": engine.text.token_text(eos_ids[0]) if eos_ids else None,
        "eos_token_ids": eos_ids,
        "vocab_size": engine.model.vocab_size,
        "model_max_length": engine.model.max_model_len,
        "chat_template": engine.text.chat_template,
        "has_chat_template": engine.model.has_chat_template,
    }
    return json_response(info)


async def render(request: web.Request) -> web.StreamResponse:
    """The prompt of a chat request, as text and as ids, without running it."""
    context = request.app[CONTEXT]
    engine = context.ready()
    body = (await read_body(request, ChatBody)).value
    model = context.served_name(body.model)
    parser = context.config.tool_parser
    try:
        sampling = chat_sampling(body, engine.model.vocab_size)
        prompt = await chat_prompt(body, engine, sampling.max_tokens, tool_parser=parser)
    except InvalidRequest as error:
        raise told_of_chat(error, body) from None
    messages, call = conversation(body, engine.text.chat_template, image_list(engine), tool_parser=parser)
    text = await engine.text.render_chat(messages, **call)
    return json_response({"model": model, "prompt": text, "token_ids": prompt.ids, "count": len(prompt.ids)})
