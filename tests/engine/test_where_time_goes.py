"""An engine at work: its stages, its device's idle time, its trace, its request spans, and steps planned at once."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import sys
import time
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from aengine import AsyncEngine, FinishReason, RequestOutput, SamplingParams
from aengine.engine.spans import RequestSpans, load_spans
from aengine.errors import ConfigError, StepFailed
from aengine.runner.modelled import ModelledExecutor
from aengine.runner.sim import SimExecutor
from aengine.types import StepPlan
from tests.engine.conftest import EOS, VOCAB, Sim, engine
from tests.engine.test_engine import GREEDY, last, oracle

STAGES = {"drain", "plan", "stage", "launch", "commit", "detokenise", "write"}


class Modelled(ModelledExecutor):
    """Taken for a SimExecutor by the assembly of these tests."""

    made: list[Modelled]

    def __init__(self, groups: object, *, max_tokens: int, max_seqs: int, vocab: int, profile: Any) -> None:
        super().__init__(profile, max_seqs=max_seqs, vocab=vocab)
        type(self).made = [self]


async def answers(made: AsyncEngine, n: int, params: SamplingParams = GREEDY) -> list[RequestOutput]:
    return await asyncio.gather(*(last(made, [7, i, 3], params) for i in range(n)))


async def test_stages_add_up_to_wall_time_at_work(sim: Sim) -> None:
    sim.step_s = 0.002
    async with engine(sim) as made:
        clock = made._running.timeline.clock  # type: ignore[union-attr]
        earliest_s, before, latest_s = time.perf_counter(), clock.totals(), time.perf_counter()
        await answers(made, 16)
        least_s, after = time.perf_counter() - latest_s, clock.totals()
        most_s = time.perf_counter() - earliest_s
        grown = {stage: after[stage] - before[stage] for stage in after}
        text = made.metrics.render().decode()
    assert 0.99 * least_s <= sum(grown.values()) <= 1.01 * most_s
    assert all(grown[stage] > 0 for stage in STAGES)
    assert grown["waiting"] > 0
    assert all(f'aengine:stage_seconds_total{{model_name="sim",stage="{stage}"}}' in text for stage in after)


@pytest.mark.parametrize(("depth", "multi_step"), [(0, 1), (1, 1), (1, 4)])
async def test_idle_time_is_the_modelled_device_s_own(sim: Sim, depth: int, multi_step: int) -> None:
    """All of it has a cause; a device that is never waited for has none but for want of work."""
    sim.executor_type = Modelled  # type: ignore[assignment]
    sim.step_s = 0.004
    async with engine(sim, depth=depth, multi_step=multi_step) as made:
        await answers(made, 4)
        await asyncio.sleep(0.02)
        await answers(made, 4)
        (device,) = Modelled.made
        clock = made._running.timeline.device  # type: ignore[union-attr]
        idle_s = clock.idle_s(0.0)  # at the first step's time: nothing is added for the idle present
        assert sum(idle_s.values()) == pytest.approx(device.occupancy.idle_s, abs=1e-6)
        assert clock.busy_s == pytest.approx(device.occupancy.busy_s)
    assert idle_s["no_work"] > 0.018
    assert idle_s["decide"] == 0
    if depth == 0:
        assert idle_s["host"] > 0
        assert idle_s["copy"] > 0


async def test_the_trace_has_every_phase(sim: Sim) -> None:
    sim.step_s = 0.001
    async with engine(sim) as made:
        await answers(made, 4)
        trace = json.loads(await made.trace())
        nothing = json.loads(await made.trace(1e-6))
    seen = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert STAGES | {"step", "copy"} <= seen
    steps = [event for event in trace["traceEvents"] if event["name"] == "step"]
    assert [event["args"]["step"] for event in steps] == list(range(1, len(steps) + 1))
    assert trace["otherData"]["busy_s"] > 0.018
    assert len(nothing["traceEvents"]) < len(trace["traceEvents"])


# ---- multi-step


@pytest.mark.parametrize("multi_step", [2, 8])
async def test_steps_planned_at_once_change_no_token(sim: Sim, multi_step: int) -> None:
    """Lengths and ends of text fall inside of runs of steps; what was computed behind them is discarded."""
    sim.step_s = 0.001
    rng = random.Random(multi_step)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))] for _ in range(40)]
    wanted = [rng.randint(1, 30) for _ in prompts]
    async with engine(sim, multi_step=multi_step) as made:
        params = [SamplingParams(temperature=0.0, max_tokens=n) for n in wanted]
        outputs = await asyncio.gather(*(last(made, p, q) for p, q in zip(prompts, params, strict=True)))
        stats = made.stats()
    for prompt, n, output in zip(prompts, wanted, outputs, strict=True):
        want = oracle(prompt, n)
        assert output.outputs[0].token_ids == want
        assert (output.outputs[0].finish_reason is FinishReason.STOP) == (want[-1] == EOS)
    assert stats.running == stats.open_streams == stats.in_flight == 0


async def test_tokens_of_steps_planned_at_once_are_seen_together(sim: Sim) -> None:
    sim.step_s = 0.005
    async with engine(sim, multi_step=5) as made:
        stream = made.submit([1, 2], GREEDY, request_id="a")
        sizes = [len(delta.token_ids) async for delta in stream if delta.token_ids]
    assert sizes == [1, 5, 5, 5, 4]  # the prompt's step is its own


class FailsOnce(SimExecutor):
    def run(self, plan: StepPlan) -> Any:
        if plan.step == 4:
            raise RuntimeError("planted")
        return super().run(plan)


async def test_a_step_that_fails_among_steps_planned_at_once(sim: Sim) -> None:
    sim.executor_type = FailsOnce
    async with engine(sim, multi_step=6) as made:
        with pytest.raises(StepFailed, match="planted"):
            await last(made, [5, 5], GREEDY)
        assert (await last(made, [5, 5], GREEDY)).outputs[0].token_ids == oracle([5, 5], 20, ignore_eos=True)
        assert made.stats().running == made.stats().in_flight == 0


# ---- request spans


@pytest.fixture
def exported(sim: Sim, monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    build = sim.build

    def with_spans(*args: Any) -> Any:
        spans = RequestSpans(provider.get_tracer("test"), provider, "sim")
        return dataclasses.replace(build(*args), spans=spans)

    monkeypatch.setattr("aengine.engine.build.build", with_spans)
    return exporter


async def test_a_request_leaves_its_spans(sim: Sim, exported: InMemorySpanExporter) -> None:
    sim.step_s = 0.002
    began_ns = time.time_ns()
    async with engine(sim) as made:
        stream = made.submit([1, 2, 3], GREEDY, request_id="slow")
        ended = asyncio.Event()
        stream.on_finished(ended.set)
        await ended.wait()
        assert exported.get_finished_spans() == ()  # it has ended, but its reader has not read it
        assert [delta.finish_reason async for delta in stream][-1] is FinishReason.LENGTH
        spans = {span.name: span for span in exported.get_finished_spans()}
    whole = spans.pop("request")
    assert whole.attributes["gen_ai.response.id"] == "slow/0"
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert whole.attributes["gen_ai.usage.input_tokens"] == 3
    assert whole.attributes["gen_ai.usage.output_tokens"] == 20
    assert list(spans) == ["queue", "prefill", "decode", "stream"]
    at_ns = whole.start_time
    for span in spans.values():
        assert span.parent.span_id == whole.context.span_id
        assert span.start_time == at_ns  # each begins where the one before ends
        at_ns = span.end_time
    assert at_ns == whole.end_time
    assert began_ns - 1_000_000 <= whole.start_time <= whole.end_time <= time.time_ns() + 1_000_000
    assert spans["decode"].end_time - spans["decode"].start_time > 0.03 * 1e9


async def test_a_reader_that_leaves_and_a_failure_leave_spans_too(sim: Sim, exported: InMemorySpanExporter) -> None:
    sim.executor_type = FailsOnce
    async with engine(sim) as made:
        with pytest.raises(StepFailed):
            await last(made, [1], GREEDY)
        stream = made.submit([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True), request_id="b")
        ended = asyncio.Event()
        stream.on_finished(ended.set)
        await ended.wait()
        await stream.aclose()
    names = [span.name for span in exported.get_finished_spans()]
    assert names.count("request") == 2
    failed = next(span for span in exported.get_finished_spans() if span.name == "request")
    assert failed.attributes["gen_ai.response.finish_reasons"] == ("error",)
    assert not failed.status.is_ok


def test_the_exporter_is_made_of_what_the_extra_installs() -> None:
    spans = load_spans("http://127.0.0.1:9/v1/traces", "m")
    spans.close()


def test_without_the_packages_the_engine_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'aengine\[otlp\]'"):
        load_spans("http://127.0.0.1:9/v1/traces", "m")


def test_an_endpoint_is_a_url() -> None:
    with pytest.raises(ConfigError, match="not an http"):
        load_spans("localhost:4318", "m")
