"""The page groups of a model, and how many pages this machine gets.

Owns: which layers share pages, the element type of KV pages, the width of block tables, the page plan.
Does not know: devices, weights, kernels.
Invariants: groups stand in the order of the model's group numbers, those of attention before those of state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aengine.config import EngineConfig
from aengine.engine.sizing import MEMORY_SHARE, size_pool
from aengine.errors import ConfigError
from aengine.memory import Chunk, Full, GroupSpec, LayerSpec, PagePlan, Part, State, Window, attention_group
from aengine.memory.lifetimes import Cross, Lifetime
from aengine.models.facts import load_config
from aengine.models.store import ModelFiles

if TYPE_CHECKING:
    from aengine.kernels.ops import AttentionSpec, Model, StateSpec


def kv_groups(attention: Sequence[AttentionSpec], dtype: str, page_tokens: int) -> list[GroupSpec]:
    """The page groups of a model's attention layers: layers with one group number share pages and lifetime."""
    groups = []
    for number in range(1 + max(spec.group for spec in attention)):
        specs = [spec for spec in attention if spec.group == number]
        lifetime = _lifetime(specs[0])
        name = type(lifetime).__name__.lower()
        layers = [f"layer{spec.layer}" for spec in specs]
        groups.append(
            attention_group(
                name,
                lifetime,
                layers,
                kv_heads=specs[0].kv_heads,
                head_dim=specs[0].head_dim,
                dtype=dtype,
                tokens_per_page=page_tokens,
            )
        )
    return groups


def kv_dtype(config: EngineConfig, model: Model) -> str:
    """The element type of KV pages. Raises ConfigError for one that some layer's kernels cannot read."""
    if config.cache.kv_dtype == "auto" and config.model.dtype == "auto":
        return "bfloat16"  # half the bytes to read; its rounding is a fortieth of what a bf16 model's own is
    if config.cache.kv_dtype == "auto":
        return str(model.dtype).removeprefix("torch.")
    cross = sum(spec.cross for spec in model.attention)
    kind = config.cache.kv_dtype
    if kind in ("int8", "fp8") and cross:
        text = (
            f"kv_dtype {kind} is not for models with cross-attention: {cross} of {len(model.attention)} layers have it"
        )
        raise ConfigError(text, param="kv_dtype")
    return "float8_e4m3fn" if kind == "fp8" else kind


def state_groups(states: Sequence[StateSpec], page_tokens: int) -> list[GroupSpec]:
    """The page groups of a model's recurrent layers, which follow those of attention; checkpoints of a state stand at
    multiples of `page_tokens`."""
    groups = []
    for number in sorted({spec.group for spec in states}):
        layers = []
        for spec in (spec for spec in states if spec.group == number):
            parts = (Part(part.name, part.shape, str(part.dtype).removeprefix("torch.")) for part in spec.parts)
            layers.append(LayerSpec(f"state{spec.layer}", tuple(parts)))
        groups.append(GroupSpec("state", State(), tuple(layers), page_tokens))
    return groups


def table_columns(spec: GroupSpec, context: int) -> int:
    """Width of a slot's block table: one entry per page, (page read, page written) for recurrent state, none for media
    items, whose placements bring their pages."""
    if spec.lifetime.per_item:
        return 0
    return 2 if isinstance(spec.lifetime, State) else -(-context // spec.tokens_per_page)


def _lifetime(spec: AttentionSpec) -> Lifetime:
    if spec.cross:
        return Cross()
    if spec.window:
        return Window(spec.window)
    return Chunk(spec.chunk) if spec.chunk else Full()


def plan_pages(
    config: EngineConfig, files: ModelFiles, model: Model, free: int, share: float = MEMORY_SHARE
) -> tuple[PagePlan, int]:
    """(page plan, context length in tokens) of all the model's groups; at most `share` of `free` bytes."""
    from aengine.kernels.ops import state_specs

    groups = kv_groups(model.attention, kv_dtype(config, model), config.cache.page_tokens)
    groups += state_groups(state_specs(model), config.cache.page_tokens)
    vision = load_config(files).vision
    return size_pool(
        groups,
        config.cache,
        config.scheduler,
        model_context=model.max_context,
        max_model_len=config.model.max_model_len,
        free=free,
        share=share,
        media_tokens=() if vision is None else (vision.max_tokens,),
    )
