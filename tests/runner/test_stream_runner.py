"""Launched steps: order, handles, failures, closing.

Owns: StreamRunner over the thread stream with an executor of a few lines.
Does not know: torch.
Invariants: steps are held and let go by events, never by time, except where time is what is measured.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from aengine.errors import StepFailed
from aengine.runner.step import StreamRunner
from aengine.runner.stream import ThreadStream
from aengine.types import StepPlan, StepResult

EMPTY = np.zeros(0, dtype=np.int32)


def plan(step):
    return StepPlan(step, EMPTY, EMPTY.astype(np.int64), EMPTY, EMPTY, EMPTY, EMPTY.astype(bool), EMPTY)


class Script:
    """Executor: per step an action to run on the stream; notes who called what."""

    def __init__(self, **actions):
        self.actions = {int(name[1:]): action for name, action in actions.items()}
        self.calls = []
        self.unstageable = ()
        self.device_s = 0.0

    def stage(self, plan):
        self.calls.append(("stage", plan.step, threading.get_ident()))
        if plan.step in self.unstageable:
            raise ValueError(f"cannot stage {plan.step}")
        return plan.step

    def run(self, step):
        self.calls.append(("run", step, threading.get_ident()))
        self.actions.get(step, lambda: None)()
        return StepResult(step, EMPTY.reshape(0, 1), EMPTY, device_s=self.device_s)


@pytest.fixture
async def make_runner():
    runners = []

    def make(script):
        runners.append(StreamRunner(ThreadStream(name="test-stream"), script, asyncio.get_running_loop()))
        return runners[-1]

    yield make
    for runner in runners:
        await runner.close()
    assert not any(thread.name in ("test-stream", "aengine-waiter") for thread in threading.enumerate())


async def test_stage_runs_on_the_loop_at_launch_and_run_on_the_stream(make_runner):
    script = Script()
    runner = make_runner(script)
    handles = [runner.launch(plan(step)) for step in (1, 2)]
    assert [call[:2] for call in script.calls if call[0] == "stage"] == [("stage", 1), ("stage", 2)]
    assert [handle.step for handle in handles] == [1, 2]
    assert [(await handle.wait()).step for handle in handles] == [1, 2]
    threads = {name: {call[2] for call in script.calls if call[0] == name} for name in ("stage", "run")}
    assert threads["stage"] == {threading.get_ident()}
    assert len(threads["run"]) == 1
    assert threads["run"] != threads["stage"]


async def test_launch_does_not_wait_and_the_loop_runs_beside_a_step(make_runner):
    gate = threading.Event()
    runner = make_runner(Script(s1=gate.wait))
    first, second = runner.launch(plan(1)), runner.launch(plan(2))
    waiting = asyncio.ensure_future(first.wait())
    for _ in range(100):
        await asyncio.sleep(0)
    assert not waiting.done()
    gate.set()
    assert (await waiting).step == 1
    assert (await second.wait()).step == 2


async def test_a_failed_step_raises_from_its_handle_and_later_ones_run(make_runner):
    runner = make_runner(Script(s2=lambda: 1 / 0))
    first, second, third = (runner.launch(plan(step)) for step in (1, 2, 3))
    assert (await first.wait()).step == 1
    with pytest.raises(StepFailed, match="step 2 failed: ZeroDivisionError: division by zero") as caught:
        await second.wait()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert (await third.wait()).step == 3


async def test_a_plan_that_cannot_be_staged_fails_in_its_place(make_runner):
    script = Script()
    script.unstageable = (2,)
    runner = make_runner(script)
    handles = [runner.launch(plan(step)) for step in (1, 2, 3)]
    await handles[0].wait()
    with pytest.raises(StepFailed, match="cannot stage 2") as caught:
        await handles[1].wait()
    assert isinstance(caught.value.__cause__, ValueError)
    assert (await handles[2].wait()).step == 3


async def test_a_handle_is_awaited_once(make_runner):
    handle = make_runner(Script()).launch(plan(7))
    await handle.wait()
    with pytest.raises(RuntimeError, match="step 7 was awaited twice"):
        await handle.wait()


async def test_device_time_is_measured_unless_the_executor_knows_better(make_runner):
    script = Script(s1=lambda: time.sleep(0.02))
    runner = make_runner(script)
    began_s = time.perf_counter()
    device_s = (await runner.launch(plan(1)).wait()).device_s
    assert 0.02 <= device_s <= time.perf_counter() - began_s
    script.device_s = 0.125
    assert (await runner.launch(plan(2)).wait()).device_s == 0.125


async def test_device_time_does_not_count_waiting_behind_another_step(make_runner, monkeypatch):
    gate, clock = threading.Event(), SimpleNamespace(now_s=1.0)

    def long():
        gate.wait()
        clock.now_s += 200.0

    monkeypatch.setattr("aengine.runner.step.time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    runner = make_runner(Script(s1=long))
    handles = [runner.launch(plan(1)), runner.launch(plan(2))]
    gate.set()
    results = [await handle.wait() for handle in handles]
    assert [result.device_s for result in results] == [200.0, 0.0]


async def test_a_cancelled_wait_does_not_disturb_the_others(make_runner):
    gate = threading.Event()
    runner = make_runner(Script(s1=gate.wait))
    first, second = runner.launch(plan(1)), runner.launch(plan(2))
    waiting = asyncio.ensure_future(first.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.set()
    assert (await second.wait()).step == 2


async def test_close_waits_for_launched_steps_and_refuses_new_ones(make_runner):
    script = Script(s1=lambda: time.sleep(0.02), s2=lambda: 1 / 0)
    runner = make_runner(script)
    for step in (1, 2, 3):
        runner.launch(plan(step))
    await runner.close()
    await runner.close()
    assert [call[1] for call in script.calls if call[0] == "run"] == [1, 2, 3]
    with pytest.raises(RuntimeError, match="step 4 was launched on a closed runner"):
        runner.launch(plan(4))


async def test_a_failure_nobody_awaited_is_not_reported_as_lost_after_close(make_runner):
    reports = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context))
    runner = make_runner(Script(s1=lambda: 1 / 0))
    runner.launch(plan(1))
    await runner.close()
    gc.collect()
    await asyncio.sleep(0)
    assert reports == []


async def test_many_steps_with_several_in_flight(make_runner):
    runner = make_runner(Script())
    in_flight, seen = [], []
    for step in range(300):
        in_flight.append(runner.launch(plan(step)))
        if len(in_flight) > 2:
            seen.append((await in_flight.pop(0).wait()).step)
    for handle in in_flight:
        seen.append((await handle.wait()).step)
    assert seen == list(range(300))


def test_runner_and_stream_do_not_import_torch():
    code = "import sys, aengine.runner.step, aengine.runner.stream; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
