"""Tokenising, detokenising and chat templates, off the event loop.

Owns: `TextProcessor`, a small pool of worker threads around the tokenizer.
Does not know: requests, HTTP.
Invariants: the loop never runs a call whose cost grows with a text (the tokenizer's Rust part releases the GIL);
detokenising one new token, a few microseconds, is the exception and runs in the output task.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from aengine.errors import AengineError, ConfigError, ContextLengthExceeded, InvalidRequest
from aengine.models.detokenize import TextStream
from aengine.models.response import ResponseStream
from aengine.models.tokenizer import Tokenizer

log = logging.getLogger(__name__)

T = TypeVar("T")
Messages = list[dict[str, Any]]
TEXT_THREADS = 2
CHARS_PER_TOKEN_MAX = 256  # the longest tokens of common vocabularies are runs of 128 blanks


def _ignore() -> None:
    """Nobody counts."""


def read_template(path: str | None) -> str | None:
    """The file with a chat template. Raises ConfigError."""
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template {path!r} cannot be read: {error}", param="chat_template") from error


class TextProcessor:
    """All coroutines raise InvalidRequest when the text cannot be processed."""

    def __init__(self, tokenizer: Tokenizer, *, max_context: int, chat_template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self._chat_template = chat_template
        self._max_context = max_context
        self.on_fault: Callable[[], None] = _ignore  # called on the loop when the tokenizer itself raised
        self._threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="aengine-text")

    @property
    def chat_template(self) -> str | None:
        """The Jinja template in use; None: the fallback for models without one."""
        return self._chat_template or self.tokenizer.chat_template

    @property
    def has_response_template(self) -> bool:
        return self.tokenizer.response_template is not None

    def response_stream(self, prompt: str, tools: list[dict[str, Any]] | None) -> ResponseStream | None:
        """Cuts one answer by the checkpoint's response template; None: it has none."""
        template = self.tokenizer.response_template
        return None if template is None else template.stream(prompt, tools)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _check_length(self, text: str) -> None:
        """Refuse a text that cannot fit before seconds go into encoding it."""
        most = self._max_context * CHARS_PER_TOKEN_MAX
        if len(text) > most:
            raise ContextLengthExceeded(
                f"the prompt has {len(text):,} characters; no more than {most:,} can make up the context of "
                f"{self._max_context} tokens",
                param="prompt",
            )

    async def _run(self, fn: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, fn)
        except AengineError:
            raise
        except Exception as error:  # a tokenizer that raises fails its request, not the engine
            log.error("the tokenizer raised on a request's text: %s", repr(error)[:300])
            self.on_fault()
            raise InvalidRequest(f"the text cannot be tokenized: {type(error).__name__}: {error}"[:500]) from error

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self._check_length(text)
        return await self._run(partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens))

    async def encode_batch(self, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        for text in texts:
            self._check_length(text)
        return await self._run(partial(self.tokenizer.encode_batch, texts, add_special_tokens=add_special_tokens))

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return await self._run(partial(self.tokenizer.decode, list(ids), skip_special_tokens=skip_special_tokens))

    async def render_chat(
        self,
        messages: Messages,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation; raises InvalidRequest(param="messages") when the template refuses it."""
        render = partial(
            self.tokenizer.render_chat,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template or self._chat_template,
            **(kwargs or {}),
        )
        return await self._run(render)

    async def encode_chat(
        self,
        messages: Messages,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """As `render_chat`, then encoded; the template wrote the special tokens, so none are added."""
        text = await self.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            kwargs=kwargs,
        )
        return await self.encode(text, add_special_tokens=False)

    def token_text(self, id: int) -> str:
        return self.tokenizer.token_text(id)

    def token_bytes(self, id: int) -> bytes:
        return self.tokenizer.token_bytes(id)

    def detokenizer(self, *, skip_special_tokens: bool) -> TextStream:
        """Incremental text of one output: whole characters only, the rest at `flush`."""
        return self.tokenizer.stream(skip_special_tokens=skip_special_tokens)
