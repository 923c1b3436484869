"""Who runs next. Pure, synchronous, deterministic.

Owns: sequences, step plans, chunked prefill, preemption.
Does not know: torch, asyncio, clocks, text.
Invariants: see scheduler.py.
"""

from aengine.scheduler.drafts import ROWS_MAX, Drafter, DraftRow, PromptLookup
from aengine.scheduler.matcher import Matcher
from aengine.scheduler.scheduler import Scheduler, SchedulerStats

__all__ = ["ROWS_MAX", "DraftRow", "Drafter", "Matcher", "PromptLookup", "Scheduler", "SchedulerStats"]
