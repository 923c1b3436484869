"""Prompts as token ids.

Owns: the four forms of a completion prompt, explicit truncation, the encoding of a chat.
Does not know: sampling, responses. Context length is the engine's check.
Invariants: nothing is cut unless truncate_prompt_tokens asked for it; every prompt has at least one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from aengine.errors import InvalidRequest
from aengine.server.facade import Engine, Text
from aengine.server.messages import conversation
from aengine.server.sampling import check_token_ids
from aengine.server.schemas import ChatBody, CompletionBody
from aengine.types import MediaInput

MAX_PROMPTS = 1_024  # the default waiting room; a longer list would be refused as "try again later" for ever


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is the prompt as sent, None where it came as ids or was truncated. `images`: one per placeholder."""

    ids: list[int]
    text: str | None = None
    images: Sequence[MediaInput] = ()


async def chat_prompt(body: ChatBody, engine: Engine, max_tokens: int | None, *, tool_parser: str = "auto") -> Prompt:
    """Renders and encodes the messages; raises InvalidRequest."""
    urls = image_list(engine)
    messages, call = conversation(body, engine.text.chat_template, urls, tool_parser=tool_parser)
    if body.add_special_tokens:  # templates write the special tokens themselves, so this is a wish of its own
        text = await engine.text.render_chat(messages, **call)
        ids = await engine.text.encode(text, add_special_tokens=True)
    else:
        ids = await engine.text.encode_chat(messages, **call)
    images = await engine.read_images(urls) if urls else ()
    return _truncated(Prompt(ids, images=images), "messages", body.truncate_prompt_tokens, _room(engine, max_tokens))


async def completion_prompts(body: CompletionBody, engine: Engine, max_tokens: int | None) -> list[Prompt]:
    """One Prompt per entry; raises InvalidRequest."""
    special = True if body.add_special_tokens is None else body.add_special_tokens
    prompts = await _prompts(body.prompt, engine, special)
    room = _room(engine, max_tokens)
    return [_truncated(prompt, "prompt", body.truncate_prompt_tokens, room) for prompt in prompts]


def image_list(engine: Engine) -> list[str] | None:
    """Where `template_messages` puts the images; None when the model takes none."""
    return [] if engine.model.takes_images else None


def _room(engine: Engine, max_tokens: int | None) -> int:
    """Prompt tokens that leave room for the answer."""
    return engine.model.max_model_len - (max_tokens or 1)


async def _prompts(prompt: str | list[str | int | list[int]], engine: Engine, special: bool) -> list[Prompt]:
    if isinstance(prompt, str):
        return await _texts([prompt], engine.text, special)
    if not prompt:
        raise InvalidRequest("prompt is empty", param="prompt")
    kinds = set(map(type, prompt))  # at C speed: a body may hold millions of ids
    if kinds == {int}:
        return [_token_prompt(cast(list[int], prompt), engine)]
    if len(kinds) > 1:
        raise InvalidRequest("prompt mixes strings, token ids and lists of them", param="prompt")
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt has {len(prompt)} entries; at most {MAX_PROMPTS} are accepted", param="prompt")
    if kinds == {str}:
        return await _texts(cast(list[str], prompt), engine.text, special)
    return [_token_prompt(ids, engine) for ids in cast(list[list[int]], prompt)]


async def _texts(texts: list[str], text: Text, special: bool) -> list[Prompt]:
    if len(texts) == 1:
        return [Prompt(await text.encode(texts[0], add_special_tokens=special), texts[0])]
    batch = await text.encode_batch(texts, add_special_tokens=special)
    return [Prompt(ids, source) for ids, source in zip(batch, texts, strict=True)]


def _token_prompt(ids: list[int], engine: Engine) -> Prompt:
    check_token_ids("prompt", ids, engine.model.vocab_size)
    return Prompt(ids)


def _truncated(prompt: Prompt, param: str, keep: int | None, room: int) -> Prompt:
    """The last `keep` tokens (-1: as many as leave room for the answer). Raises InvalidRequest when none are left."""
    if not prompt.ids:
        raise InvalidRequest(f"{param}: the prompt has no tokens", param=param)
    if keep is None:
        return prompt
    if keep == -1:
        keep = room
    if keep < 1:
        raise InvalidRequest(f"truncate_prompt_tokens is {keep}, not -1 or above 0", param="truncate_prompt_tokens")
    return prompt if len(prompt.ids) <= keep else Prompt(prompt.ids[-keep:], images=prompt.images)
