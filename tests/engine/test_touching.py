"""KV pages are touched ahead of what is used, from the first on, and only so far."""

import asyncio
import contextlib
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from aengine.engine import touching
from aengine.engine.process import take_spare_time
from aengine.engine.touching import PIECE, READY_LEAST, READY_MOST, TouchAhead

MIB = 2**20


class Arena:
    """What has been touched; `used` as a pool would tell it."""

    def __init__(self) -> None:
        self.used = 0
        self.pieces: list[tuple[int, int]] = []

    def touch(self, start: int, stop: int) -> None:
        self.pieces.append((start, stop))


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("used", "size", "idle", "busy"),
    [
        (0, 4096 * MIB, READY_LEAST, READY_LEAST),
        (100 * MIB, 4096 * MIB, 100 * MIB + READY_LEAST, 100 * MIB + READY_LEAST),
        (500 * MIB, 4096 * MIB, 1000 * MIB, 500 * MIB + READY_LEAST),
        (3000 * MIB, 8192 * MIB, 3000 * MIB + READY_MOST, 3000 * MIB + READY_LEAST),
        (3000 * MIB, 3100 * MIB, 3100 * MIB, 3100 * MIB),
        (0, 5 * MIB + 1, 5 * MIB + 1, 5 * MIB + 1),
    ],
)
def test_as_much_again_as_is_used_is_kept_ready_within_bounds(used, size, idle, busy):
    def goal(running: bool) -> int:
        return TouchAhead(size, lambda: used, lambda: running, lambda start, stop: None).goal()

    assert (goal(False), goal(True)) == (idle, busy)


async def test_the_goal_is_followed_piece_by_piece_without_a_gap(monkeypatch):
    monkeypatch.setattr(touching, "LOOK_EVERY_S", 0.001)
    arena = Arena()
    ahead = TouchAhead(2048 * MIB + 5, lambda: arena.used, lambda: False, arena.touch)
    task = asyncio.create_task(ahead.run())
    await until(lambda: ahead.touched >= READY_LEAST)
    await asyncio.sleep(0.02)
    assert ahead.touched == READY_LEAST
    arena.used = 300 * MIB
    await until(lambda: ahead.touched >= 600 * MIB)
    await asyncio.sleep(0.02)
    assert ahead.touched == 600 * MIB
    arena.used = 2048 * MIB
    await asyncio.wait_for(task, 10)  # all is touched: it ends
    assert arena.pieces[0][0] == 0
    assert arena.pieces[-1][1] == 2048 * MIB + 5
    assert all(stop - start <= PIECE for start, stop in arena.pieces)
    assert all(before[1] == after[0] for before, after in zip(arena.pieces, arena.pieces[1:], strict=False))


async def test_its_thread_has_ended_when_it_is_cancelled():
    busy, loop = asyncio.Event(), asyncio.get_running_loop()

    def touch(start: int, stop: int) -> None:
        loop.call_soon_threadsafe(busy.set)
        time.sleep(0.05)

    task = asyncio.create_task(TouchAhead(64 * PIECE, lambda: 64 * PIECE, lambda: False, touch).run())
    await asyncio.wait_for(busy.wait(), 10)
    assert any(thread.name.startswith("aengine-touch") for thread in threading.enumerate())
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert not any(thread.name.startswith("aengine-touch") for thread in threading.enumerate())


async def test_closing_holds_up_nobody_until_a_piece_is_done():
    busy, done, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def touch(start: int, stop: int) -> None:
        loop.call_soon_threadsafe(busy.set)
        assert done.wait(10)

    task = asyncio.create_task(TouchAhead(64 * PIECE, lambda: 64 * PIECE, lambda: False, touch).run())
    await asyncio.wait_for(busy.wait(), 10)
    task.cancel()
    await asyncio.sleep(0.02)  # the loop turns, and the task is not over before the piece
    assert not task.done()
    done.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)


async def test_where_the_system_refuses_pages_come_when_they_are_written(caplog):
    def touch(start: int, stop: int) -> None:
        raise OSError("no more")

    await asyncio.wait_for(TouchAhead(64 * PIECE, lambda: 0, lambda: False, touch).run(), 10)
    assert "not touched ahead any more: no more" in caplog.text


def test_a_thread_that_is_less_urgent_already_stays_so():
    """As a user may only lower its urgency: raising it is refused."""

    def niced(start: int) -> int:
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, start)
        take_spare_time()
        return os.getpriority(os.PRIO_PROCESS, thread)

    if sys.platform == "linux":
        for start, expected in ((0, 10), (15, 15)):
            with ThreadPoolExecutor(1) as own:
                assert own.submit(niced, start).result() == expected
