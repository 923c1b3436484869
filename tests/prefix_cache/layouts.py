"""Small layouts of every lifetime, for tests."""

from __future__ import annotations

import hashlib
import random

from aengine.memory import (
    Chunk,
    Cross,
    Full,
    GroupSpec,
    LayerSpec,
    Media,
    PagePlan,
    Part,
    State,
    Window,
    attention_group,
    plan,
)
from aengine.prefix_cache import MediaItem


def attention(name, lifetime, page=4, layers=1, dtype="float32") -> GroupSpec:
    return attention_group(name, lifetime, layers, kv_heads=1, head_dim=16, dtype=dtype, tokens_per_page=page)


def state(page=4, size=96) -> GroupSpec:
    return GroupSpec("state", State(), (LayerSpec("s", (Part("ssm", (size,), "float32"),)),), tokens_per_page=page)


def items(name, lifetime, page=4) -> GroupSpec:
    return GroupSpec(name, lifetime, (LayerSpec(name, (Part("kv", (8,), "bfloat16"),)),), tokens_per_page=page)


LAYOUTS = {
    "full": lambda: [attention("full", Full())],
    "full+window": lambda: [attention("full", Full()), attention("window", Window(9), layers=3)],
    "window": lambda: [attention("window", Window(6))],
    "full+chunk": lambda: [attention("full", Full(), layers=2), attention("chunk", Chunk(8))],
    "odd pages": lambda: [attention("full", Full(), page=8), attention("window", Window(5), page=4, layers=5)],
    "full+state": lambda: [attention("full", Full(), dtype="bfloat16"), state()],
    "state": lambda: [state(page=8)],
    "state+window+full": lambda: [state(), attention("window", Window(8)), attention("full", Full(), layers=2)],
    "full+cross": lambda: [attention("full", Full(), layers=4), items("cross", Cross())],
    "full+media": lambda: [attention("full", Full(), layers=2), items("media", Media(), page=2)],
    "all": lambda: [
        attention("full", Full()),
        attention("window", Window(7), layers=2),
        attention("chunk", Chunk(12)),
        state(),
        items("cross", Cross()),
        items("media", Media(), page=2),
    ],
}


def small_plan(specs: list[GroupSpec], large_pages: int, multiple: int = 1) -> PagePlan:
    """A plan of `large_pages` usable large pages, each `multiple` times the largest page."""
    size = multiple * max(spec.payload_bytes for spec in specs)
    probe = plan(specs, 2**30, large_bytes=size)
    return plan(specs, probe.large_bytes * (large_pages + 1), large_bytes=size)


def random_media(rng: random.Random, prompt: int) -> tuple[MediaItem, ...]:
    out = []
    position = rng.randrange(3)
    while position < prompt and len(out) < 3:
        span = rng.randint(1, 6)
        if position + span > prompt:
            break
        digest = hashlib.sha256(bytes([rng.randrange(3)])).digest()
        out.append(MediaItem(digest, position, span, 1 + 4 * (digest[0] % 3)))
        position += span + rng.randrange(8)
    return tuple(out)
