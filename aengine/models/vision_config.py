"""What a vision model's config.json says beside its text decoder.

Owns: VisionConfig, and the making of a flat text configuration from a nested one.
Does not know: tensors, images, how the text part is read (config).
Invariants: frozen, pure data; defaults are those of the family, because a config.json may leave out what equals them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aengine.errors import ModelLoadError

Json = Mapping[str, Any]
MLLAMA_CROSS_LAYERS = (3, 8, 13, 18, 23, 28, 33, 38)
MLLAMA_TEXT: Json = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
}


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The image side of a model. `cross_layers`: decoder layers that attend to images instead of the text.

    `image_token`: id of the placeholder, which the embedding knows but the output head does not; ids below
    `input_vocab` have embeddings. An image is cut into up to `max_tiles` tiles of `image_size` pixels a side, each of
    which makes `tile_tokens` entries. `settings`: the vision tower's own configuration, as JSON text.
    """

    cross_layers: tuple[int, ...]
    image_token: int
    input_vocab: int
    max_tiles: int
    tile_tokens: int
    image_size: int
    settings: str

    @property
    def max_tokens(self) -> int:
        """Entries of the largest image."""
        return self.max_tiles * self.tile_tokens


def text_part(config: Json) -> Json:
    """The decoder's configuration, flat, with what the outer level says about end-of-sequence ids."""
    inner = config.get("text_config") or {}
    known = {key: value for key, value in inner.items() if value is not None}
    rope = {} if "rope_parameters" in known else {"rope_theta": MLLAMA_TEXT["rope_theta"]}
    return {**MLLAMA_TEXT, **rope, **known, "architectures": config.get("architectures"), "model_type": "mllama"}


def vision_part(config: Json, layers: int, vocab: int) -> VisionConfig:
    """Raises ModelLoadError when sizes contradict each other."""
    vision = dict(config.get("vision_config") or {})
    text = config.get("text_config") or {}
    size, patch = int(vision.get("image_size", 448)), int(vision.get("patch_size", 14))
    cross = tuple(sorted(int(layer) for layer in text.get("cross_attention_layers") or MLLAMA_CROSS_LAYERS))
    if not cross or cross[-1] >= layers or len(set(cross)) == layers:
        raise ModelLoadError(f"config.json: cross_attention_layers {list(cross)} do not suit {layers} layers")
    if size % patch:
        raise ModelLoadError(f"config.json: image_size {size} is not a multiple of patch_size {patch}")
    return VisionConfig(
        cross_layers=cross,
        image_token=int(config.get("image_token_index", 128_256)),
        input_vocab=vocab + 8,
        max_tiles=int(vision.get("max_num_tiles", 4)),
        tile_tokens=(size // patch) ** 2 + 1,
        image_size=size,
        settings=json.dumps(vision, sort_keys=True),
    )
