"""Images of prompts: found in messages, preprocessed off the event loop, matched with their placeholders.

Owns: `Images` (worker threads around the image processor), `take_images`, `place_images`.
Does not know: how pixels are processed, HTTP, the scheduler.
Invariants: as many images as placeholders, in the same order, or a typed error with both numbers; which positions see
which image depends on the ids before them only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from aengine.errors import InvalidRequest
from aengine.types import NO_END, Int32s, MediaInput, RequestMedia

if TYPE_CHECKING:
    from aengine.models.images import ImageProcessor

IMAGE_THREADS = 2
IMAGE_PARTS = ("image_url", "input_image", "image")
TEXT_ONLY = "this model takes text only"
_DATA_KEYS = ("image_url", "image", "url", "data")


class Images:
    """`processor` None: the model takes no images."""

    def __init__(self, processor: ImageProcessor | None) -> None:
        self._processor = processor
        self._threads = ThreadPoolExecutor(IMAGE_THREADS, thread_name_prefix="aengine-image")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read(self, sources: Sequence[Any], *, files: bool = False) -> list[MediaInput]:
        """`files`: paths may be opened, which only this process's own code may ask for. Raises InvalidRequest."""
        if not sources:
            return []
        if self._processor is None:
            raise InvalidRequest(f"{len(sources)} images are given, but {TEXT_ONLY}", param="messages")
        loop, read = asyncio.get_running_loop(), self._processor.read
        works = [
            loop.run_in_executor(self._threads, partial(read, source, files=files, where=f"image {index}"))
            for index, source in enumerate(sources)
        ]
        return list(await asyncio.gather(*works))


def take_images(
    messages: Sequence[Mapping[str, Any]], given: Sequence[Any] = ()
) -> tuple[list[dict[str, Any]], list[Any]]:
    """-> (messages whose image parts are only marks, as templates expect them; the images in their order).

    A part of type image_url, input_image or image brings its image, or stands for the next of `given`.
    """
    rest, images = list(given), list[Any]()
    out = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple):
            content = [_part(part, rest, images) for part in content]
            out.append({**message, "content": content})
        else:
            out.append(dict(message))
    return out, images + rest


def _part(part: Any, rest: list[Any], images: list[Any]) -> Any:
    if not isinstance(part, Mapping) or part.get("type") not in IMAGE_PARTS:
        return part
    value: Any = next((part[key] for key in _DATA_KEYS if part.get(key) is not None), None)
    if isinstance(value, Mapping):
        value = value.get("url")
    if value is not None:
        images.append(value)
    elif rest:
        images.append(rest.pop(0))
    else:
        raise InvalidRequest(f"a part of type {part['type']!r} brings no image", param="messages")
    return {"type": "image"}


def place_images(ids: Int32s, images: Sequence[MediaInput], token: int | None) -> tuple[RequestMedia, ...]:
    """Each image at its placeholder. `token`: the placeholder's id; None: the model takes no images.

    A position sees the images of the last run of adjacent placeholders that began at or before it, up to itself.
    """
    if token is None:
        if images:
            raise InvalidRequest(f"{len(images)} images are given, but {TEXT_ONLY}", param="messages")
        return ()
    positions = np.flatnonzero(ids == token).tolist()
    if len(positions) != len(images):
        raise InvalidRequest(
            f"the prompt has {len(positions)} image placeholders (token {token}) for {len(images)} images",
            param="prompt",
        )
    return tuple(
        RequestMedia(image, position, 1, _until(positions, index))
        for index, (image, position) in enumerate(zip(images, positions, strict=True))
    )


def _until(positions: list[int], index: int) -> int:
    """Where the next run of placeholders begins."""
    for before, after in zip(positions[index:], positions[index + 1 :], strict=False):
        if after != before + 1:
            return after
    return NO_END
