"""What models with recurrent state ask of a plan.

Owns: whether a cache has state groups, where drafts must end, and which sequences wait for a twin's checkpoint.
Does not know: how state is kept.
Invariants: pure; without state groups nothing here changes a plan. A sequence waits only for an older one that runs and
has a checkpoint ahead which it can use, so the oldest never waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from aengine.memory import State
from aengine.prefix_cache import Lease, PrefixCache

if TYPE_CHECKING:
    from aengine.scheduler.columns import Columns
    from aengine.scheduler.sequence import Sequence


def has_state(cache: PrefixCache) -> bool:
    return any(isinstance(group.spec.lifetime, State) for group in cache.pool.plan.groups)


def draft_room(lease: Lease, scheduled: int, known: int) -> int:
    """How many drafts may follow the known tokens before the next checkpoint, which a step must not run across."""
    return lease.next_boundary(scheduled) - known


def ready_rows(rows: Iterable[Sequence], columns: Columns) -> list[Sequence]:
    """`rows`, oldest first, without those that wait.

    Attention pages of a prompt are shared while it is being prefilled, a state only at a checkpoint. So the choices of
    one prompt (n > 1) would each compute all of it side by side; instead they wait until the first has got to the last
    checkpoint.
    """
    ready: list[Sequence] = []
    leaders: dict[int, Sequence] = {}  # by identity of the prompt, which the choices of one request share
    for sequence in rows:
        leader = leaders.setdefault(id(sequence.request.prompt_ids), sequence)
        if leader is sequence or sequence.request.cause != "fork" or not _waits(sequence, leader, columns):
            ready.append(sequence)
    return ready


def _waits(sequence: Sequence, leader: Sequence, columns: Columns) -> bool:
    assert sequence.lease is not None
    assert leader.lease is not None
    checkpoint = leader.lease.next_boundary(int(columns.scheduled[leader.slot]))
    usable = sequence.lease.sharing and checkpoint <= sequence.lease.bound
    return usable and int(columns.scheduled[sequence.slot]) < checkpoint
