"""What stands still is told once, by name, counted, and makes health fail; what moves is not."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading

import numpy as np
import pytest

from aengine import SamplingParams
from aengine.engine.core import Progress
from aengine.engine.watchdog import OVERDUE_S, REQUEST_STALL_S, GcPauses, LoopWatch, Stalls
from aengine.metrics import Metrics
from aengine.runner.sim import SimExecutor
from tests.engine.conftest import Sim, engine
from tests.engine.test_engine import GREEDY, last
from tests.waiting import DEADLINE_S, turns, until, wait_until


def faults(metrics: Metrics) -> dict[str, int]:
    text = metrics.render().decode()
    lines = [line for line in text.splitlines() if line.startswith("aengine:faults_total")]
    return {line.split('kind="')[1].split('"')[0]: int(float(line.split()[-1])) for line in lines}


def block_the_loop(thread: threading.Thread) -> None:
    thread.start()
    thread.join()


async def test_a_blocked_loop_is_seen_from_outside(sim: Sim, caplog: pytest.LogCaptureFixture) -> None:
    async with engine(sim) as made:
        faults(made.metrics)  # imports what it needs
        assert made._running is not None
        made._running.vitals.loop_watch.close()
        made._running.vitals.loop_watch = LoopWatch(blocked_s=0.15, look_every_s=0.03)
        seen = []

        def ask() -> None:
            wait_until(lambda: not made.health().ok)
            seen.append(made.health())
            wait_until(lambda: any("block_the_loop" in record.message for record in caplog.records))

        asker = threading.Thread(target=ask)
        await turns()
        block_the_loop(asker)
        await until(lambda: made.health().ok)
        await until(lambda: any("turns again" in record.message for record in caplog.records))
        assert not seen[0].ok
        assert "the event loop has not turned for " in str(seen[0].reason)
        counted = faults(made.metrics)["loop_blocked"]
    told = [record.message for record in caplog.records if "has not turned" in record.message]
    assert sum("block_the_loop" in line for line in told) == 1
    assert len(told) == counted  # a line for each: a machine that stands still blocks the loop too
    assert any("turns again" in record.message for record in caplog.records)


class World:
    """A scheduler's face, as far as a watchdog sees it."""

    has_unfinished = True

    def __init__(self) -> None:
        self.handles = np.array([7, -1, 9])
        self.computed = np.array([1, 0, 5], np.int32)

    def oldest(self) -> int:
        return 7

    def positions(self) -> tuple[np.ndarray, np.ndarray]:
        return self.handles.copy(), self.computed.copy()


def test_a_request_without_progress_is_named_once_while_others_move(caplog: pytest.LogCaptureFixture) -> None:
    metrics, world = Metrics(), World()
    stalls = Stalls(metrics, lambda handle: f"req-{handle}")
    for second in range(int(REQUEST_STALL_S) + 30):
        world.computed[2] += 1
        stalls.look(float(second), Progress(at_s=float(second)), world)  # type: ignore[arg-type]
    assert faults(metrics)["request_stalled"] == 1
    assert ["req-7" in record.message for record in caplog.records] == [True]
    world.computed[0] += 1  # it moves, and stands still again
    for second in range(200, 202 + int(REQUEST_STALL_S)):
        world.computed[2] += 1
        stalls.look(float(second), Progress(at_s=float(second)), world)  # type: ignore[arg-type]
    assert faults(metrics)["request_stalled"] == 2


def test_an_overdue_step_is_named_once_and_blames_no_request(caplog: pytest.LogCaptureFixture) -> None:
    metrics, world = Metrics(), World()
    stalls = Stalls(metrics, lambda handle: f"req-{handle}")
    progress = Progress(at_s=0.0, waiting_for="step 12")
    for second in range(200):
        stalls.look(float(second), progress, world)  # type: ignore[arg-type]
    stalls.look(201.0, Progress(at_s=201.0), world)  # type: ignore[arg-type]
    assert faults(metrics)["step_overdue"] == 1
    assert faults(metrics)["request_stalled"] == 0
    (record,) = caplog.records
    assert "step 12" in record.message
    assert "req-7" in record.message
    assert OVERDUE_S < 60


class Slow(SimExecutor):
    """One step takes until the test lets it go on."""

    go_on = threading.Event()

    def run(self, plan):  # type: ignore[no-untyped-def]
        if plan.step == 5:
            assert self.go_on.wait(DEADLINE_S)
        return super().run(plan)


async def test_a_whole_engine_names_the_step_that_hangs(
    sim: Sim, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aengine.engine.watchdog.OVERDUE_S", 0.2)
    monkeypatch.setattr("aengine.engine.vitals.LOOK_EVERY_S", 0.05)
    monkeypatch.setattr("aengine.engine.vitals.STALL_S", 0.2)
    sim.executor_type = Slow
    async with engine(sim) as made:
        task = asyncio.create_task(last(made, [1, 2], GREEDY, request_id="the-one"))
        await until(lambda: not made.health().ok)
        assert "step 5" in str(made.health().reason)
        assert "the-one" in str(made.health().reason)
        await until(lambda: faults(made.metrics)["step_overdue"])
        Slow.go_on.set()
        assert len((await task).outputs[0].token_ids) == 20
        await until(lambda: made.health().ok)
        counted = faults(made.metrics)["step_overdue"]
    assert sum("waiting for step 5; oldest request: the-one" in r.message for r in caplog.records) == 1
    assert sum("waiting for step" in r.message for r in caplog.records) == counted


async def test_faults_have_counters_and_one_line_each(sim: Sim, caplog: pytest.LogCaptureFixture) -> None:
    sim.tokenizer.encode = lambda *args, **kw: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    async with engine(sim) as made:
        with caplog.at_level(logging.ERROR), pytest.raises(Exception, match="ZeroDivisionError"):
            await last(made, "text", SamplingParams(max_tokens=2))
        assert faults(made.metrics) == {**dict.fromkeys(faults(made.metrics), 0), "tokenizer": 1}
    assert [record.message for record in caplog.records] == [
        "the tokenizer raised on a request's text: ZeroDivisionError('division by zero')"
    ]


def test_pauses_of_the_collector_are_seen() -> None:
    before = len(gc.callbacks)
    pauses = GcPauses()
    gc.collect()
    taken = pauses.take()
    pauses.close()
    assert len(taken) >= 1
    assert all(0 <= seconds < 10 for seconds in taken)
    assert pauses.take() == []
    assert len(gc.callbacks) == before
