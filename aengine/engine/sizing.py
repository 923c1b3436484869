"""How many bytes of KV pages, and how long a context, a machine can hold.

Owns: reading free memory (cgroup limits included) and choosing the KV pool's size.
Does not know: models' layers beyond their page groups.
Invariants: the context length it returns fits the pool by the same function that admits requests (`PagePlan.fits`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from aengine.config import CacheConfig, SchedulerConfig
from aengine.errors import ConfigError
from aengine.memory import GroupSpec, PagePlan, plan

MEMORY_SHARE = 0.4  # of what is free, for KV pages: the rest is for activations, page cache and the user's programs
_CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """Bytes this process may still take: MemAvailable, or what its cgroup leaves if that is less."""
    free = _meminfo_available()
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    return free


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:  # not Linux
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup(name: str) -> int | None:
    try:
        return int((_CGROUP / name).read_text())
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return None


def in_flight_tokens(scheduler: SchedulerConfig) -> int:
    """Most positions of one sequence that are launched and not retired: every step in flight a whole budget, but for
    steps planned at once, which have one position each."""
    if scheduler.multi_step > 1:
        return scheduler.max_batched_tokens + scheduler.multi_step
    return scheduler.steps_in_flight * scheduler.max_batched_tokens


def bytes_for(
    groups: list[GroupSpec], tokens: int, in_flight: int | None = None, media_tokens: Sequence[int] = ()
) -> int:
    """Bytes of KV that one sequence of `tokens` holds at most, padding aside; `in_flight`: see in_flight_tokens;
    `media_tokens`: the entries of its media items."""
    total = 0
    for spec in groups:
        if spec.lifetime.per_item:
            pages = sum(spec.lifetime.peak_pages(entries, spec.tokens_per_page, None) for entries in media_tokens)
            total += pages * spec.payload_bytes
            continue
        total += spec.lifetime.peak_pages(tokens, spec.tokens_per_page, in_flight) * spec.payload_bytes
    return total


def size_pool(
    groups: list[GroupSpec],
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    *,
    model_context: int,
    max_model_len: int | None,
    free: int,
    share: float = MEMORY_SHARE,
    media_tokens: Sequence[int] = (),
) -> tuple[PagePlan, int]:
    """(page plan, context length in tokens). `media_tokens`: entries of the items that a usual prompt brings.

    Without `kv_bytes`, the pool gets `share` of `free`, but no more than all slots at full context would fill.
    Raises ConfigError when the wanted context does not fit the pool or the model.
    """
    if max_model_len is not None and max_model_len > model_context:
        raise ConfigError(
            f"max_model_len is {max_model_len} tokens, but the model knows {model_context} positions",
            param="max_model_len",
        )
    context = max_model_len or model_context
    flight = in_flight_tokens(scheduler)
    wanted = (scheduler.max_num_seqs + 1) * bytes_for(groups, context, flight, media_tokens)
    arena = cache.kv_bytes or min(int(free * share), wanted)
    least = 3 * bytes_for(groups, 2 * max(group.tokens_per_page for group in groups), flight, media_tokens)
    if arena > free:
        raise ConfigError(
            f"kv_bytes is {arena:,} bytes, but only {free:,} bytes of memory are free (unset, it is fitted to them)",
            param="kv_bytes",
        )
    if arena < least:
        raise ConfigError(
            f"kv_bytes is {arena:,} bytes; this model needs at least {least:,} (unset, it is fitted to free memory)",
            param="kv_bytes",
        )
    pages = plan(groups, arena)
    fitted = pages.max_tokens(context, in_flight_tokens=flight)
    if context < 2:
        raise ConfigError("max_model_len is 1 token: it must hold a prompt and an output token", param="max_model_len")
    if max_model_len is not None and fitted < max_model_len:
        need = bytes_for(groups, max_model_len, flight)
        raise ConfigError(
            f"max_model_len of {max_model_len} tokens needs {need:,} bytes of KV pages; {arena:,} bytes hold "
            f"{fitted} tokens (set kv_bytes, or a shorter max_model_len)",
            param="max_model_len",
        )
    if fitted < 2:
        raise ConfigError(f"{arena:,} bytes of KV pages hold {fitted} tokens; at least 2 are needed", param="kv_bytes")
    return pages, fitted
