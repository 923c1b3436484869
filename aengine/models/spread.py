"""Short tensor work on all cores while weights are read.

Owns: a few threads, for as long as one call takes.
Does not know: what the work is.
Invariants: ranges are disjoint and cover everything once, so a result does not depend on the number of threads. torch's
own threads are not used: they spin at each operation's end, and on a busy machine that costs more than it gains.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

MOST_THREADS = 8
LEAST_SLICES = 4  # each thread's; for less, handing over costs more than it gains


def spread(count: int, step: int, work: Callable[[slice], None]) -> None:
    """Call `work` for slices of at most `step` that cover 0 .. count - 1, some of them at a time."""
    affinity = getattr(os, "sched_getaffinity", None)
    threads = min(MOST_THREADS, len(affinity(0)) if affinity is not None else os.cpu_count() or 1)
    starts = range(0, count, step)
    if threads == 1 or len(starts) < LEAST_SLICES * threads:
        _run(starts, step, count, work)
        return
    share = -(-len(starts) // threads)
    parts = [starts[first : first + share] for first in range(0, len(starts), share)]
    with ThreadPoolExecutor(threads, thread_name_prefix="aengine-load") as pool:
        others = [pool.submit(_run, part, step, count, work) for part in parts[1:]]
        _run(parts[0], step, count, work)
        for other in others:
            other.result()


def _run(starts: range, step: int, count: int, work: Callable[[slice], None]) -> None:
    for first in starts:
        work(slice(first, min(count, first + step)))
