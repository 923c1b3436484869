"""Images: from whatever a caller has to what a vision tower takes.

Owns: opening and checking images, transformers' own preprocessing, the digest that names an image.
Does not know: prompts, threads, HTTP. Nothing is fetched from the network.
Invariants: an image that cannot be used is an InvalidRequest, never a crash; its size is checked before its pixels are
decoded. The digest is made of the decoded pixels, their size and mode, and the processor's settings: the same picture
in another file or encoding without loss is the same image.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aengine.errors import AengineError, InvalidRequest, ModelLoadError
from aengine.models.vision_config import VisionConfig
from aengine.types import MediaInput

SETTINGS = "preprocessor_config.json"
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 2**26  # 67 million: as RGB 201 MB while it is resized
DATA_URL = "data:"


class ImageProcessor:
    """The preprocessing of one model. `read` may be called from several threads."""

    def __init__(self, folder: Path, vision: VisionConfig) -> None:
        from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil

        if (folder / SETTINGS).exists():
            self._processor = MllamaImageProcessorPil.from_pretrained(folder)
        else:
            side = vision.image_size
            self._processor = MllamaImageProcessorPil(
                size={"height": side, "width": side}, max_image_tiles=vision.max_tiles
            )
        self._tile_tokens = vision.tile_tokens
        settings = self._processor.to_dict()
        made = (settings["size"]["height"], settings["max_image_tiles"])
        if made != (vision.image_size, vision.max_tiles):
            raise ModelLoadError(
                f"{folder / SETTINGS}: makes {made[1]} tiles of {made[0]} pixels, the vision tower takes "
                f"{vision.max_tiles} of {vision.image_size}"
            )
        self._settings = json.dumps(settings, sort_keys=True, default=str).encode()

    def read(self, source: Any, *, files: bool, where: str) -> MediaInput:
        """One image: a PIL image, an array uint8 [H, W] or [H, W, 1, 3 or 4], encoded bytes, a data: URL, or (with
        `files`) a path. `where` names it in errors. Raises InvalidRequest."""
        if isinstance(source, MediaInput):
            return source
        try:
            picture = _decode(_open(source, files=files, where=where), where)
            made = self._processor(picture)
        except AengineError:
            raise
        except Exception as error:  # decoders meet hostile input and raise anything
            raise InvalidRequest(
                f"{where} cannot be decoded: {type(error).__name__}: {error}"[:300], param="messages"
            ) from error
        tiles = int(made["num_tiles"][0][0])
        arrays: dict[str, NDArray[Any]] = {
            "pixel_values": np.array(made["pixel_values"][0][0][:tiles], np.float32),  # the other tiles are zero
            "aspect_ratio_ids": np.asarray(made["aspect_ratio_ids"][0], np.int64),
            "aspect_ratio_mask": np.asarray(made["aspect_ratio_mask"][0][0], np.int64),
        }
        for array in arrays.values():
            array.flags.writeable = False
        return MediaInput(self._digest(picture), tiles * self._tile_tokens, arrays)

    def _digest(self, picture: Any) -> bytes:
        digest = hashlib.sha256()
        head = json.dumps([picture.mode, *picture.size]).encode()
        for part in (head, self._settings, picture.tobytes()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.digest()


def _open(source: Any, *, files: bool, where: str) -> Any:
    """-> PIL image, whose pixels may not be decoded yet."""
    from PIL import Image

    if isinstance(source, Image.Image):
        return source
    if isinstance(source, np.ndarray):
        return _from_array(source, where)
    if isinstance(source, str) and source[:5].lower() == DATA_URL:
        source = _from_data_url(source, where)
    if isinstance(source, bytes):
        return Image.open(io.BytesIO(source), formats=FORMATS)
    if isinstance(source, str) and source.lower().startswith(("http://", "https://")):
        raise InvalidRequest(
            f"{where} is a remote URL; nothing is fetched here: send the image itself, as a data: URL", param="messages"
        )
    if files and isinstance(source, str | Path):
        return Image.open(source, formats=FORMATS)
    kind = "text that is no data: URL" if isinstance(source, str) else f"a {type(source).__name__}"
    raise InvalidRequest(f"{where} is {kind}, not an image", param="messages")


def _from_array(array: NDArray[Any], where: str) -> Any:
    from PIL import Image

    deep = array.ndim == 3 and array.shape[2] in (1, 3, 4)
    if array.dtype != np.uint8 or not (array.ndim == 2 or deep):
        raise InvalidRequest(
            f"{where} is an array {array.dtype} {list(array.shape)}, not uint8 [H, W] or [H, W, 1, 3 or 4]",
            param="messages",
        )
    return Image.fromarray(array[:, :, 0] if deep and array.shape[2] == 1 else array)


def _from_data_url(url: str, where: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.lower().startswith("data:image/") or not head.lower().endswith(";base64"):
        raise InvalidRequest(f"{where}: a data: URL must begin with data:image/<type>;base64,", param="messages")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{where}: the data: URL is not valid base64: {error}", param="messages") from error


def _decode(picture: Any, where: str) -> Any:
    """The picture upright, as RGB: what the processor would make of it, so that equal pixels have equal digests."""
    from PIL import ImageOps

    width, height = picture.size
    if not 0 < width * height <= MAX_PIXELS:
        raise InvalidRequest(
            f"{where} has {width} x {height} = {width * height} pixels, not 1 to {MAX_PIXELS}", param="messages"
        )
    return ImageOps.exif_transpose(picture).convert("RGB")
