"""Where time goes: exclusive stages, idle time by cause, a bounded ring, Chrome's format."""

from __future__ import annotations

import gc
import json
import threading

import numpy as np
import pytest

from aengine.timeline import CAUSES, Ring, StepTimes, Timeline, chrome_trace
from aengine.timeline.names import COPY, DEVICE, LANE_OF, LANES, NAMES, PLAN
from tests.counting import calls


class Time:
    """The clocks of stages: they go on when a test says so."""

    def __init__(self):
        self.wall_s, self.processor_s = 1000.0, 3.0

    def perf_counter(self):
        return self.wall_s

    def thread_time(self):
        return self.processor_s

    def sleep(self, seconds):
        self.wall_s += seconds

    def burn(self, seconds):
        self.wall_s += seconds
        self.processor_s += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Time()
    for module in ("stages", "timeline"):
        monkeypatch.setattr(f"aengine.timeline.{module}.time", made)
    return made


@pytest.fixture
def timeline(clock):
    made = Timeline()
    made.open()
    yield made
    made.close()


# ---- stages


def test_stages_add_up_to_wall_time_and_are_exclusive(timeline, clock):
    for _ in range(40):
        with timeline.write:
            clock.burn(0.0001)
            with timeline.plan:
                clock.burn(0.0005)
        clock.burn(0.0003)
        clock.sleep(0.0007)
    totals = timeline.clock.totals()
    assert sum(totals.values()) == pytest.approx(clock.wall_s - timeline.clock.began_s) == pytest.approx(40 * 0.0016)
    assert totals["plan"] == pytest.approx(40 * 0.0005)
    assert totals["write"] == pytest.approx(40 * 0.0001)  # what it had beside the span inside it
    assert totals["waiting"] == pytest.approx(40 * 0.0007)
    assert totals["other"] == pytest.approx(40 * 0.0003)


def test_totals_only_grow(timeline, clock):
    before = timeline.clock.totals()
    for _ in range(5):
        with timeline.commit:
            clock.burn(0.0002)
        after = timeline.clock.totals()
        assert all(after[stage] >= before[stage] for stage in before)
        before = after


def test_an_open_span_is_counted_up_to_now(timeline, clock):
    with timeline.plan:
        clock.burn(0.002)
        assert timeline.clock.totals()["plan"] == pytest.approx(0.002)
        clock.burn(0.001)
    totals = timeline.clock.totals()
    assert sum(totals.values()) == totals["plan"] == pytest.approx(0.003)


def test_a_span_gives_its_beginning_to_the_stage_before_it(timeline, clock):
    with timeline.launch as span:
        clock.burn(0.002)
        span.after(timeline.stage, clock.perf_counter())
        clock.burn(0.001)
    totals = timeline.clock.totals()
    assert totals["stage"] == pytest.approx(0.002)
    assert totals["launch"] == pytest.approx(0.001)
    spans, *_ = timeline.last(30)
    assert [NAMES[code] for code in spans.code] == ["stage", "launch"]
    assert spans.ended_s[0] == spans.began_s[1]


def test_a_span_that_never_staged_has_an_empty_stage(timeline):
    with timeline.launch as span:
        span.after(timeline.stage, 0.0)
    assert timeline.clock.totals()["stage"] == 0.0


def test_collections_are_seen_wherever_they_happen(timeline, clock):
    def takes(phase, info):
        clock.burn(0.01 if phase == "start" else 0.0)

    gc.callbacks.append(takes)
    with timeline.plan:
        clock.burn(0.0001)
        gc.collect()
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    spans, *_ = timeline.last(30)
    collected = [code for code in spans.code.tolist() if NAMES[code] == "gc"]
    assert len(set(collected)) == 2  # on the loop's thread, and elsewhere
    gc.callbacks.remove(takes)
    totals = timeline.clock.totals()
    assert totals["gc"] == pytest.approx(0.01)
    assert totals["plan"] == pytest.approx(0.0001)
    timeline.close()
    gc.collect()
    assert len(timeline.last(30)[0]) == len(spans)


# ---- the ring


def test_the_ring_is_bounded_and_keeps_the_newest():
    ring = Ring(8)
    for i in range(20):
        ring.add(PLAN, float(i + 1), i + 1.5, i)
    spans = ring.since(0.0)
    assert spans.value.tolist() == list(range(12, 20))
    assert ring.since(18.0).value.tolist() == [17, 18, 19]
    assert ring.since(100.0).code.tolist() == []


# ---- the device


class Device:
    """Steps told with times in milliseconds."""

    def __init__(self):
        self.timeline = Timeline()
        self.clock = self.timeline.device
        self.number = 0

    def step(self, launched, began, ended, arrived=None, chosen=0, busy=None, waited=True):
        self.number += 1
        took = ended - began if busy is None else busy
        arrived = ended if arrived is None else arrived
        self.clock.step(
            StepTimes(self.number, *(ms / 1e3 for ms in (launched, began, ended, arrived, took, chosen)), waited)
        )

    def idle_ms(self, now=0.0):
        return {cause: round(1e3 * seconds, 6) for cause, seconds in self.clock.idle_s(now / 1e3).items() if seconds}


def test_a_step_launched_in_time_leaves_no_gap():
    device = Device()
    device.step(0, 0, 10)
    device.step(4, 10, 20, waited=False)
    assert device.idle_ms() == {}
    assert device.clock.busy_s == pytest.approx(0.02)


def test_a_synchronous_gap_is_copy_host_copy():
    device = Device()
    device.step(0, 0, 10, arrived=11)
    device.step(14, 16, 20)
    assert device.idle_ms() == {"copy": 1 + 2, "host": 3}


def test_a_late_host_is_blamed_though_the_result_came_late_too():
    device = Device()
    device.step(0, 0, 10, arrived=13)
    device.step(14, 14, 20, waited=False)
    assert device.idle_ms() == {"host": 4}


def test_waiting_for_requests_is_nobody_s_fault():
    device = Device()
    device.step(0, 0, 10, arrived=11)
    device.clock.wait()
    assert device.idle_ms(now=25) == {"no_work": 15}
    device.clock.wake(0.030)
    assert device.idle_ms(now=31) == {}  # it is told when the step that ends it is
    device.step(32, 32.5, 40)
    assert device.idle_ms(now=99) == {"no_work": 20, "host": 2, "copy": 0.5}


def test_masks_that_come_late_are_told_apart():
    device = Device()
    device.step(0, 0, 10, arrived=12, chosen=12)  # a model that samples outside of its step's time
    device.step(13, 13, 23)
    assert device.idle_ms() == {"decide": 2, "host": 1}
    device.step(20, 23, 40, busy=11, chosen=30, waited=False)  # one that samples inside of it
    assert device.idle_ms() == {"decide": 2 + 6, "host": 1}


def test_a_failed_step_leaves_a_gap_that_nobody_knows():
    device = Device()
    device.step(0, 0, 10)
    device.clock.forget()
    device.step(30, 30, 40)
    assert device.idle_ms() == {}


def test_busy_and_idle_make_up_the_time_between_the_ends():
    device = Device()
    draw = np.random.default_rng(1)
    at = 0.0
    for _ in range(200):
        launched = at + draw.uniform(-5, 5)
        began = max(at, launched) + draw.uniform(0, 1)
        at = began + draw.uniform(1, 9)
        device.step(launched, began, at, at + draw.uniform(0, 3), waited=bool(draw.integers(2)))
    spans = device.timeline.ring.since(-1.0)
    began_ms = 1e3 * spans.began_s[spans.code == DEVICE].min()
    whole_ms = 1e3 * device.clock.busy_s + sum(device.idle_ms().values())
    assert whole_ms == pytest.approx(at - began_ms, abs=1e-4)


# ---- Chrome's format


def test_the_trace_is_what_chrome_and_perfetto_read(timeline, clock):
    for number in range(3):
        with timeline.plan as span:
            span.value = 7
        now_s = clock.perf_counter()
        timeline.device.step(StepTimes(number, now_s, now_s, now_s + 1e-4, now_s + 2e-4, 1e-4))
        clock.sleep(0.001)
    timeline.lag(clock.perf_counter() - 0.001, clock.perf_counter())
    trace = json.loads(chrome_trace(*timeline.last(30)))
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] == "ms"
    names = {}
    last = {}
    for event in trace["traceEvents"]:
        assert event["ph"] in ("M", "X")
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["ts"], int | float)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            if event["name"] == "thread_name":
                names[event["tid"]] = event["args"]["name"]
            continue
        assert event["dur"] >= 0
        assert event["cat"] == names[event["tid"]]
        assert event["ts"] >= last.get(event["tid"], 0)
        last[event["tid"]] = event["ts"]
    assert tuple(names.values()) == LANES
    seen = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert {"plan", "step", "idle: host", "copy", "loop lag"} <= seen
    plans = [event for event in trace["traceEvents"] if event["name"] == "plan"]
    assert plans[0]["args"] == {"rows": 7}


def test_the_sums_are_of_the_window_alone():
    ring = Ring(8)
    ring.add(DEVICE, 0.5, 2.0, 1)
    ring.add(DEVICE + 2, 2.0, 4.0, 2)  # idle: host
    told = json.loads(chrome_trace(ring.since(1.0), 1.0, 3.0))["otherData"]
    assert told["busy_s"] == 1.0
    assert told["idle_s"] == dict.fromkeys(CAUSES, 0.0) | {"host": 1.0}
    assert (told["from_us"], told["to_us"], told["window_s"]) == (1e6, 3e6, 2.0)


def test_every_span_has_a_name_and_a_lane():
    assert len(NAMES) == len(LANE_OF)
    assert set(LANE_OF) == set(range(len(LANES)))
    assert NAMES[COPY] == "copy"
    assert all('"' not in name for name in (*NAMES, *LANES))


# ---- the cost


def test_a_span_is_a_few_calls():
    """What they take is bench/timeline.py's to measure."""
    timeline = Timeline()

    def spans():
        for _ in range(100):
            with timeline.plan:
                pass

    assert calls(spans) <= 100 * 8
