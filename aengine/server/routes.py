"""The endpoints of the API, once: what the application serves and what `/openapi.json` describes.

Owns: their methods, paths, handlers, bodies, answers and one-line descriptions.
Does not know: how a handler answers; the chat page, which is no API.
Invariants: a handler with a body reads exactly that struct.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from aiohttp import web

from aengine.server import admin, tokens
from aengine.server.answer_schemas import (
    ChatAnswer,
    CompletionAnswer,
    Detokenized,
    Done,
    Health,
    InputCount,
    MessageAnswer,
    ModelCard,
    ModelList,
    Rendered,
    ResponseAnswer,
    Tokenized,
    TokenizerInfo,
    Trace,
    Version,
)
from aengine.server.anthropic import count_tokens, messages
from aengine.server.anthropic_schema import CountBody, MessagesBody
from aengine.server.chat import chat_completions
from aengine.server.completions import completions, embeddings
from aengine.server.responses import responses, stored_response
from aengine.server.responses_schema import ResponsesBody
from aengine.server.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from aengine.server.trace import TraceQuery, trace

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """`streams`: answers as server-sent events when the body says `stream: true`. `answer`: the JSON of a 200, or its
    media type where that is another; None where there never is one. `loads`: 503 while the model is not ready."""

    method: str
    path: str
    handler: Handler
    summary: str
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | str | None = None
    query: type[msgspec.Struct] | None = None
    streams: bool = False
    loads: bool = True


ROUTES = (
    Route("POST", "/v1/chat/completions", chat_completions, "Answer a chat", ChatBody, ChatAnswer, streams=True),
    Route(
        "POST",
        "/v1/chat/completions/render",
        tokens.render,
        "The prompt of a chat, as text and ids",
        ChatBody,
        Rendered,
    ),
    Route("POST", "/v1/completions", completions, "Continue prompts", CompletionBody, CompletionAnswer, streams=True),
    Route(
        "POST",
        "/v1/responses",
        responses,
        "Answer an input (stateless Responses API)",
        ResponsesBody,
        ResponseAnswer,
        streams=True,
    ),
    Route("GET", "/v1/responses/{id}", stored_response, "Always 404: nothing is stored", loads=False),
    Route(
        "POST",
        "/v1/messages",
        messages,
        "Answer a conversation (Messages API)",
        MessagesBody,
        MessageAnswer,
        streams=True,
    ),
    Route("POST", "/v1/messages/count_tokens", count_tokens, "Input tokens of a message", CountBody, InputCount),
    Route("POST", "/v1/embeddings", embeddings, "Always 501: no embeddings", loads=False),
    Route("GET", "/v1/models", admin.models, "The served names", answer=ModelList),
    Route("GET", "/v1/models/{id}", admin.model, "One served name", answer=ModelCard),
    Route("POST", "/v1/load_lora_adapter", admin.adapters, "Always 501: no adapters", loads=False),
    Route("POST", "/v1/unload_lora_adapter", admin.adapters, "Always 501: no adapters", loads=False),
    Route("POST", "/tokenize", tokens.tokenize, "Token ids of a prompt or a chat", TokenizeBody, Tokenized),
    Route("POST", "/detokenize", tokens.detokenize, "Text of token ids", DetokenizeBody, Detokenized),
    Route("GET", "/tokenizer_info", tokens.tokenizer_info, "End token, chat template, sizes", answer=TokenizerInfo),
    Route("POST", "/reset_prefix_cache", admin.reset_prefix_cache, "Forget cached prefixes", answer=Done),
    Route(
        "GET",
        "/debug/trace",
        trace,
        "The last seconds of the engine's timeline, as a Chrome trace",
        answer=Trace,
        query=TraceQuery,
    ),
    Route("GET", "/health", admin.health, "200 while the engine makes progress", answer=Health),
    Route("GET", "/metrics", admin.metrics, "Prometheus metrics", answer="text/plain", loads=False),
    Route("GET", "/version", admin.version, "The server's version", answer=Version, loads=False),
)


def router_path(path: str) -> str:
    """Model names may hold slashes, so the last part of a path takes them too."""
    return path.replace("{id}", "{id:.+}")
