"""From SamplingParams and prompts to request bodies.

Owns: which field says what on the wire, and what cannot be said there.
Does not know: sockets, answers.
Invariants: nothing that was asked is left out silently: what the wire cannot carry raises InvalidRequest with `param`.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from aengine.errors import InvalidRequest
from aengine.types import Grammar, Int32s, SamplingParams

Prompt = str | Sequence[int] | Int32s | Sequence[Mapping[str, Any]] | Mapping[str, Any]
Body = dict[str, Any]

_IMAGE_PARTS = ("image_url", "input_image", "image")
_DATA_KEYS = ("image_url", "image", "url", "data")
_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",
    "stop",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
)


def messages_of(prompt: Prompt) -> list[dict[str, Any]] | None:
    """The chat messages that a prompt consists of, images and all; None: it is text or token ids."""
    images: list[Any] = []
    listed: Any = prompt
    if isinstance(prompt, Mapping):
        images = list(prompt.get("images") or ())
        listed = prompt.get("messages")
        if listed is None and images:
            raise InvalidRequest("images go to a server in messages, not beside a text", param="images")
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed or not isinstance(listed[0], Mapping):
        return None
    return with_images(listed, images)


def prompt_of(prompt: Prompt) -> str | list[int]:
    """A text or token ids. Raises InvalidRequest for any other form."""
    inner: Any = prompt
    if isinstance(prompt, Mapping):
        inner = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if isinstance(inner, np.ndarray):
        return [int(token) for token in inner]
    if isinstance(inner, str):
        return inner
    if isinstance(inner, Sequence) and all(isinstance(token, int | np.integer) for token in inner):
        return [int(token) for token in inner]
    raise InvalidRequest("a prompt is a text, token ids or messages", param="prompt")


def sampling_body(sampling: SamplingParams) -> Body:
    """The fields that chat and plain completions share; only those that differ from their defaults."""
    default = SamplingParams()
    body: Body = {name: value for name in _SAME_NAME if (value := getattr(sampling, name)) != getattr(default, name)}
    body["temperature"] = sampling.temperature  # servers take defaults from models
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.max_tokens is not None:
        body["max_tokens"] = sampling.max_tokens
    if sampling.grammar is not None:
        body.update(_grammar(sampling.grammar))
    return body


def _grammar(grammar: Grammar) -> Body:
    if grammar.kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if grammar.kind == "json_schema":
        return {"structured_outputs": {"json": msgspec.json.decode(grammar.source)}}
    if grammar.kind == "choice":
        return {"structured_outputs": {"choice": msgspec.json.decode(grammar.source)}}
    field = {"regex": "regex", "lark": "grammar"}.get(grammar.kind)
    if field is None:
        raise InvalidRequest(f"a grammar of kind {grammar.kind!r} has no form on the wire", param="grammar")
    return {"structured_outputs": {field: grammar.source}}


# ---- images


def with_images(messages: Sequence[Mapping[str, Any]], given: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """Messages whose image parts carry data: URLs; a part that brings no image takes the next of `given`."""
    rest = list(given)
    out = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple):
            content = [_part(part, rest) for part in content]
            out.append({**message, "content": content})
        else:
            out.append(dict(message))
    if rest:
        raise InvalidRequest(f"{len(rest)} images have no place in the messages", param="images")
    return out


def _part(part: Any, rest: list[Any]) -> Any:
    if not isinstance(part, Mapping) or part.get("type") not in _IMAGE_PARTS:
        return part
    value: Any = next((part[key] for key in _DATA_KEYS if part.get(key) is not None), None)
    if isinstance(value, Mapping):
        value = value.get("url")
    if value is None:
        if not rest:
            raise InvalidRequest(f"a part of type {part['type']!r} brings no image", param="messages")
        value = rest.pop(0)
    return {"type": "image_url", "image_url": {"url": data_url(value)}}


def data_url(image: Any) -> str:
    """A data: URL of encoded bytes, an array uint8 [H, W] or [H, W, 1, 3 or 4], or a PIL image. Pixels become PNG."""
    if isinstance(image, str):
        return image
    if isinstance(image, bytes | bytearray | memoryview):
        return _as_url(bytes(image))
    if isinstance(image, np.ndarray):
        from PIL import Image

        image = Image.fromarray(image.squeeze(-1) if image.ndim == 3 and image.shape[-1] == 1 else image)
    if not hasattr(image, "save"):
        raise InvalidRequest(f"an image is bytes, an array or a PIL image, not {type(image).__name__}", param="images")
    png = io.BytesIO()
    image.save(png, format="PNG")
    return _as_url(png.getvalue())


_MAGIC = ((b"\x89PNG", "png"), (b"\xff\xd8", "jpeg"), (b"GIF8", "gif"), (b"RIFF", "webp"))


def _as_url(data: bytes) -> str:
    kind = next((kind for magic, kind in _MAGIC if data.startswith(magic)), "png")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
