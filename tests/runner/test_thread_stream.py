"""The worker-thread stream and the waiter.

Owns: order, where errors surface, closing, callbacks on the loop.
Does not know: steps.
Invariants: no test sleeps to be right; threads meet at events.
"""

from __future__ import annotations

import asyncio
import threading
import weakref

import pytest

from aengine.runner.stream import ThreadStream, Waiter


@pytest.fixture(params=[False, True], ids=["", "hand over"])
def stream(request):
    stream = ThreadStream(name="test-stream", hand_over=request.param)
    yield stream
    stream.close()
    assert not any(thread.name == "test-stream" for thread in threading.enumerate())


def test_work_runs_in_order_on_one_other_thread(stream):
    seen = []
    for i in range(50):
        stream.launch(lambda i=i: seen.append((i, threading.get_ident())))
    stream.record().wait()
    assert [i for i, _ in seen] == list(range(50))
    assert len({thread for _, thread in seen} - {threading.get_ident()}) == 1


def test_launch_and_record_return_while_work_is_held(stream):
    gate = threading.Event()
    stream.launch(gate.wait)
    event = stream.record()
    assert not event.done()
    gate.set()
    event.wait()
    assert event.done()


def test_an_idle_thread_has_taken_its_work_when_launch_returns(monkeypatch):
    stream = ThreadStream(hand_over=True)
    monkeypatch.setattr("aengine.runner.stream.HAND_OVER_S", 60.0)
    for _ in range(20):
        gate = threading.Event()
        stream.launch(gate.wait)
        assert stream._queue.empty()
        stream.launch(lambda: None)  # behind other work nobody waits
        gate.set()
        stream.record().wait()
    stream.close()


def test_launch_does_not_wait_long_for_a_thread_that_does_not_come(stream, monkeypatch):
    monkeypatch.setattr("aengine.runner.stream.HAND_OVER_S", 0.0)
    gate = threading.Event()
    stream.launch(gate.wait)
    stream.launch(lambda: None)
    gate.set()
    stream.record().wait()


def test_an_error_surfaces_in_the_event_of_its_work_only(stream):
    done = []
    before = stream.record()
    stream.launch(lambda: 1 / 0)
    failed = stream.record()
    stream.launch(lambda: done.append(1))
    after = stream.record()
    before.wait()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failed.wait()
    assert failed.done()
    after.wait()
    assert done == [1]


def test_of_two_errors_before_an_event_the_first_surfaces(stream):
    stream.launch(lambda: 1 / 0)
    stream.launch(lambda: [][0])
    with pytest.raises(ZeroDivisionError):
        stream.record().wait()
    stream.record().wait()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_no_kind_of_error_kills_the_thread(stream, kind):
    def work():
        raise kind("stop")

    stream.launch(work)
    with pytest.raises(kind):
        stream.record().wait()
    stream.launch(lambda: None)
    stream.record().wait()


def test_close_runs_what_was_launched_and_ends_the_thread():
    stream, gate, seen = ThreadStream(), threading.Event(), []
    stream.launch(gate.wait)
    stream.launch(lambda: seen.append(1))
    gate.set()
    stream.close()
    stream.close()
    assert seen == [1]
    with pytest.raises(RuntimeError, match="closed"):
        stream.launch(lambda: None)
    with pytest.raises(RuntimeError, match="closed"):
        stream.record()


def test_initialise_runs_first_on_the_streams_thread():
    seen = []
    stream = ThreadStream(initialise=lambda: seen.append(threading.get_ident()))
    stream.launch(lambda: seen.append(threading.get_ident()))
    stream.close()
    assert seen[0] == seen[1] != threading.get_ident()


def test_a_failing_initialise_raises_from_the_constructor_and_leaves_no_thread():
    with pytest.raises(ZeroDivisionError):
        ThreadStream(initialise=lambda: 1 / 0, name="test-broken")
    assert not any(thread.name == "test-broken" for thread in threading.enumerate())


def test_finished_work_is_let_go_while_the_stream_idles(stream):
    class Work:
        def __call__(self):
            pass

    work = Work()
    gone = threading.Event()
    weakref.finalize(work, gone.set)
    stream.launch(work)
    del work
    assert gone.wait(60), "the stream still holds work that it has run"


# ---- waiter


async def test_the_waiter_calls_back_on_the_loop_in_order(stream):
    waiter, calls, done = Waiter(asyncio.get_running_loop()), [], asyncio.Event()

    def note(name, error):
        calls.append((name, type(error), threading.get_ident()))
        if name == 2:
            done.set()

    for name, work in enumerate((lambda: None, lambda: 1 / 0, lambda: None)):
        stream.launch(work)
        waiter.notify(stream.record(), lambda error, name=name: note(name, error))
    await asyncio.wait_for(done.wait(), 60)
    here = threading.get_ident()
    assert calls == [(0, type(None), here), (1, ZeroDivisionError, here), (2, type(None), here)]
    waiter.close()


async def test_the_loop_runs_while_the_waiter_blocks(stream):
    gate, reached = threading.Event(), asyncio.Event()
    waiter = Waiter(asyncio.get_running_loop())
    stream.launch(gate.wait)
    waiter.notify(stream.record(), lambda error: reached.set())
    for _ in range(100):
        await asyncio.sleep(0)
    assert not reached.is_set()
    gate.set()
    await asyncio.wait_for(reached.wait(), 60)
    waiter.close()


async def test_a_closed_waiter_takes_nothing_and_is_joined(stream):
    waiter = Waiter(asyncio.get_running_loop(), name="test-waiter")
    waiter.close()
    waiter.close()
    with pytest.raises(RuntimeError, match="closed"):
        waiter.notify(stream.record(), print)
    assert not any(thread.name == "test-waiter" for thread in threading.enumerate())


def test_a_loop_that_is_gone_does_not_break_the_waiter(stream):
    loop = asyncio.new_event_loop()
    waiter = Waiter(loop)
    loop.close()
    waiter.notify(stream.record(), print)
    waiter.close()
