"""WHERE bytes live: pages of several sizes in one arena.

Owns: page layout, the pool of pages, the fence; `arena` alone touches torch and is imported by name.
Does not know: requests, tokens, schedulers.
Invariants: see planner (addresses) and pool (states).
"""

from aengine.memory.accounting import GroupStats, PoolStats
from aengine.memory.compaction import Moved, compact
from aengine.memory.fence import Fence
from aengine.memory.groups import GroupSpec, LayerSpec, Part, attention_group
from aengine.memory.lifetimes import Chunk, Cross, Full, Lifetime, Media, State, Window
from aengine.memory.planner import GroupPlan, PagePlan, plan, uniform_plan
from aengine.memory.pool import Pool
from aengine.memory.slabs import Page

__all__ = [
    "Chunk",
    "Cross",
    "Fence",
    "Full",
    "GroupPlan",
    "GroupSpec",
    "GroupStats",
    "LayerSpec",
    "Lifetime",
    "Media",
    "Moved",
    "Page",
    "PagePlan",
    "Part",
    "Pool",
    "PoolStats",
    "State",
    "Window",
    "attention_group",
    "compact",
    "plan",
    "uniform_plan",
]
