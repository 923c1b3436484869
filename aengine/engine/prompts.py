"""From the forms of a prompt that a program may hand over to token ids and images.

Owns: `read_prompt`.
Does not know: limits, requests, the scheduler.
Invariants: text and pixels are processed in worker threads; a form that is not known is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

from aengine.engine.images import take_images
from aengine.errors import InvalidRequest
from aengine.types import Int32s, MediaInput

if TYPE_CHECKING:
    from aengine.engine.images import Images
    from aengine.engine.text import TextProcessor

Prompt = str | Sequence[int] | Int32s | Sequence[Mapping[str, Any]] | Mapping[str, Any]


class PromptTokens(msgspec.Struct, frozen=True):
    """`text` is what was encoded, None when the prompt came as ids or messages."""

    text: str | None
    ids: Sequence[int] | Int32s
    images: Sequence[MediaInput] = ()


async def read_prompt(prompt: Prompt, text: TextProcessor, images: Images) -> PromptTokens:
    """Raises InvalidRequest when the prompt has no known form, or its text or images cannot be processed."""
    if isinstance(prompt, str):
        return PromptTokens(prompt, await text.encode(prompt))
    if isinstance(prompt, np.ndarray):
        return PromptTokens(None, prompt)
    if isinstance(prompt, Mapping):
        return await _read_mapping(prompt, text, images)
    if not isinstance(prompt, Sequence):
        raise InvalidRequest(f"a prompt is a text, token ids or messages, not {type(prompt).__name__}", param="prompt")
    first = prompt[0] if len(prompt) else None
    if isinstance(first, Mapping):
        return await _read_mapping({"messages": prompt}, text, images)
    if isinstance(first, str | Sequence):
        raise InvalidRequest("a list of prompts: submit them one by one, or use LLM.generate", param="prompt")
    return PromptTokens(None, cast(Sequence[int], prompt))


async def _read_mapping(prompt: Mapping[str, Any], text: TextProcessor, images: Images) -> PromptTokens:
    brought = await images.read(list(prompt.get("images") or ()), files=True)
    if "messages" in prompt:
        messages, sources = take_images(prompt["messages"], brought)  # these may come from strangers: no paths
        read = await images.read(sources)
        return PromptTokens(None, await text.encode_chat(messages), read)
    if "prompt_token_ids" in prompt:
        return PromptTokens(None, prompt["prompt_token_ids"], brought)
    if not isinstance(prompt.get("prompt"), str):
        raise InvalidRequest("a prompt needs one of prompt, prompt_token_ids or messages", param="prompt")
    return PromptTokens(prompt["prompt"], await text.encode(prompt["prompt"]), brought)
