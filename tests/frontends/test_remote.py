"""The façade over a pipe: the same as the engine in one process, refusals, losses, bounds, counters."""

from __future__ import annotations

import asyncio
import re
import socket
from typing import Any

import numpy as np
import pytest
import uvloop

from aengine import FinishReason, SamplingParams
from aengine.config import AengineConfig, ServerConfig
from aengine.errors import (
    ContextLengthExceeded,
    EngineDead,
    InvalidGrammar,
    InvalidRequest,
    NotReady,
    QueueFull,
    RequestTooLarge,
)
from aengine.frontends import parent, seat, wire
from aengine.frontends.seat import Seat
from aengine.frontends.wire import Fault, Submit, Up
from aengine.types import Admitted, Grammar, HttpFigures, MediaInput, StepOutputs, Submission
from tests.engine.conftest import VOCAB, Sim, engine
from tests.engine.test_engine import oracle
from tests.frontends.conftest import house
from tests.waiting import until

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=250, ignore_eos=True, logprobs=5)


async def read(stream: Any) -> dict[int, tuple[Any, ...]]:
    """Choices by index: text, tokens, log-probabilities, how it ended."""
    out: dict[int, tuple[Any, ...]] = {}
    async for delta in stream:
        text, ids, scores, *_ = out.get(delta.index, ("", (), ()))
        ended = (delta.finish_reason, delta.stop_reason)
        out[delta.index] = (text + delta.text, ids + delta.token_ids, scores + (delta.logprobs or ()), *ended)
    return out


CASES = {
    "plain": GREEDY,
    "choices with scores": SamplingParams(n=3, seed=7, max_tokens=9, logprobs=2, prompt_logprobs=1),
    "stop string": SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=(chr(0x100 + 17),)),
    "end token": SamplingParams(temperature=0.0, max_tokens=200),
    "rules": SamplingParams(max_tokens=5, seed=-1, logit_bias={5: 3.0}, bad_words=("ab",), stop_token_ids=(9,)),
    "no text": SamplingParams(temperature=0.0, max_tokens=4, detokenize=False),
}


async def test_streams_are_those_of_one_process(sim: Sim) -> None:
    prompt = [(7 * i + 3) % VOCAB for i in range(33)]
    async with engine(sim) as plain, house(sim, fronts=2) as home:
        for name, params in CASES.items():
            stream = plain.submit(prompt, params, request_id="a", cache_salt=name, priority=-2)
            wanted = await read(stream)
            for front in home.fronts:
                remote = front.submit(prompt, params, request_id="a", cache_salt=name, priority=-2)
                assert await read(remote) == wanted, name
                assert remote.prompt_logprobs == stream.prompt_logprobs
                assert remote.completion_tokens == stream.completion_tokens
                assert remote.prompt_ids == prompt
            assert remote.cached_tokens >= 32  # what the first front-end's request left
        assert home.hub.open_choices == 0
        assert home.host.stats().running == 0


async def test_many_streams_of_two_front_ends_get_their_own_tokens(sim: Sim) -> None:
    async with house(sim, fronts=2) as home:
        prompts = [[i, 2 * i % VOCAB, 5] for i in range(60)]
        streams = [home.fronts[i % 2].submit(prompt, GREEDY, request_id=f"r{i}") for i, prompt in enumerate(prompts)]
        for prompt, out in zip(prompts, await asyncio.gather(*map(read, streams)), strict=True):
            assert list(out[0][1]) == oracle(prompt, 20, ignore_eos=True)


async def test_refusals_come_before_the_first_delta(sim: Sim) -> None:
    sim.pages = 20
    async with house(sim, max_waiting=2, max_num_seqs=1) as home:
        (front,) = home.fronts
        cases: list[tuple[list[int], dict[str, Any], type[Exception], str]] = [
            ([5] * 256, {}, ContextLengthExceeded, "256"),
            ([5] * 10, {"max_tokens": 200}, RequestTooLarge, "210 tokens"),
            ([5], {"n": 3}, InvalidRequest, "waiting room holds 2"),
            ([5, VOCAB], {}, InvalidRequest, f"token id {VOCAB}"),
            ([5, -1], {}, InvalidRequest, "token id -1"),
            ([5, 2**32], {}, InvalidRequest, "no integer of 32 bits"),
            ([5, 2**70], {}, InvalidRequest, "not one list of integers"),
            ([5, 1.5], {}, InvalidRequest, "not one list of integers"),  # type: ignore[list-item]
        ]
        for i, (prompt, fields, kind, text) in enumerate(cases):
            with pytest.raises(kind, match=text):
                await read(front.submit(prompt, SamplingParams(**fields), request_id=f"bad{i}"))
        streams = [front.submit([5], GREEDY, request_id=f"r{i}") for i in range(8)]
        with pytest.raises(InvalidRequest, match="in use"):
            front.submit([5], GREEDY, request_id="r0")
        ended = await asyncio.gather(*map(read, streams), return_exceptions=True)
        full = [error for error in ended if isinstance(error, QueueFull)]
        assert full
        assert all(error.retry_after_s for error in full)
        assert len(full) + sum(isinstance(out, dict) for out in ended) == 8
        assert b"aengine:requests_rejected_total" in await front.metrics_text()


def test_faults_cross_with_all_they_know() -> None:
    error = InvalidGrammar("no", param="schema", place="$.a")
    made = Fault.of(error).error()
    assert type(made) is InvalidGrammar
    assert (str(made), made.param, made.place) == ("no", "schema", "$.a")
    assert "log" in str(Fault.of(ValueError("secret")).error())


async def test_aborts_before_and_after_acceptance(sim: Sim) -> None:
    sim.step_s = 0.002
    async with house(sim) as home:
        (front,) = home.fronts
        early = front.submit([5], SamplingParams(max_tokens=200, ignore_eos=True), request_id="early")
        early.abort()
        late = front.submit([6], SamplingParams(max_tokens=200, ignore_eos=True), request_id="late")
        await anext(late)
        assert front.abort("late")
        for stream in (early, late):
            out = await read(stream)
            assert out[0][3] is FinishReason.ABORT
            assert len(out[0][1]) < 100
        assert not front.abort("late")
        assert home.host.stats().kv_usage == 0


async def test_a_lost_front_end_costs_only_its_own_requests(sim: Sim) -> None:
    sim.step_s = 0.002
    long = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    async with house(sim, fronts=2) as home:
        lost, other = home.fronts
        kept = other.submit([1, 2, 3], long, request_id="kept")
        gone = [lost.submit([i], long, request_id=f"gone{i}") for i in range(3)]
        for stream in (kept, *gone):
            await anext(stream)
        lost.bind_http(lambda: HttpFigures({}, 5, 4))
        await other.metrics_text()
        home.pipes[0].cut()
        left = await home.serving[0]
        assert left == (3, 5, 4)
        assert str(left).startswith("3 sequences aborted, 5 connections lost, 4 of them")
        no_rows = StepOutputs(0, admitted=[Admitted(10**9, 0)])
        await home.host._running.core.outputs.put(no_rows)  # type: ignore[union-attr]
        for stream in gone:
            with pytest.raises(EngineDead):
                await read(stream)
        assert lost.phase == "dead"
        await until(lambda: home.host.stats().running == 1)
        assert kept.completion_tokens < 120  # it is under way still
        await read(kept)
        assert kept.completion_tokens == 120
        assert home.host.stats().kv_usage == 0
        text = (await other.metrics_text()).decode()
        assert float(re.findall(r"^vllm:time_to_first_token_seconds_count\S* (\S+)$", text, re.M)[0]) >= 1


async def test_who_takes_nothing_is_cut_off_and_others_go_on(sim: Sim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HIGH_BYTES", 2048)
    monkeypatch.setattr(wire, "STUCK_S", 0.1)
    sim.step_s = 0.001
    async with house(sim) as home:
        end = await home.connect(1)
        for message in (
            Up(),
            *(Submit(i, Submission(f"x{i}", np.array([i], np.int32), LONG)) for i in range(8)),
        ):
            data = wire.encode(message)
            end.sendall(len(data).to_bytes(8, "little") + data)
        alone = home.fronts[0].submit([9, 9], GREEDY, request_id="alone")
        assert list((await read(alone))[0][1]) == oracle([9, 9], 20, ignore_eos=True)
        async with asyncio.timeout(60):
            assert (await home.serving[1]).sequences > 0
        end.close()


def test_sending_to_an_end_that_is_gone_does_nothing_on_either_loop() -> None:
    async def send(cut: bool) -> None:
        ours, theirs = socket.socketpair()
        pipe = await wire.Pipe.over(ours, wire.ToEngine)
        if cut:
            pipe.cut()
        theirs.close()
        for _ in range(8):
            pipe.send(wire.Stop())
            await asyncio.sleep(0)
        assert await pipe.receive() is None
        pipe.send(wire.Stop())
        await pipe.close()

    for loop in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=loop) as runner:
            for cut in (False, True):
                runner.run(send(cut))


async def test_who_talks_nonsense_is_cut_off_and_others_go_on(sim: Sim) -> None:
    async with house(sim) as home:
        end = await home.connect(1)
        end.sendall((3).to_bytes(8, "little") + b"\xc1\xc1\xc1")
        assert (await home.serving[1]).sequences == 0
        assert list((await read(home.fronts[0].submit([9], GREEDY, request_id="a")))[0][1]) == oracle(
            [9], 20, ignore_eos=True
        )
        end.close()


async def test_a_dead_engine_ends_all_streams_and_says_why(sim: Sim) -> None:
    sim.step_s = 0.002
    async with house(sim) as home:
        (front,) = home.fronts
        stream = front.submit([5], LONG, request_id="a")
        await anext(stream)
        home.host._running.core.scheduler.commit = None  # type: ignore[union-attr, method-assign, assignment]
        with pytest.raises(EngineDead):
            await read(stream)
        assert front.phase == "dead"
        assert not front.health().ok
        with pytest.raises(EngineDead):
            front.submit([5], GREEDY, request_id="b")


async def test_ready_only_when_all_are_up_and_errors_until_then(sim: Sim) -> None:
    async with house(sim, seats=2) as home:
        (front,) = home.fronts
        await until(lambda: front.phase == "starting front-ends")
        assert not front.health().ok
        with pytest.raises(NotReady, match="starting front-ends"):
            front.submit([5], GREEDY, request_id="a")


async def test_what_is_asked_is_done_and_its_faults_come_back(sim: Sim) -> None:
    async with house(sim) as home:
        (front,) = home.fronts
        await read(front.submit([5] * 40, GREEDY, request_id="a"))
        await front.reset_prefix_cache()
        stream = front.submit([5] * 40, GREEDY, request_id="b")
        await read(stream)
        assert stream.cached_tokens == 0
        with pytest.raises(InvalidRequest, match="text only"):
            await front.read_images(["data:image/png;base64,AAAA"])
        with pytest.raises(InvalidRequest):
            await front.prepare(SamplingParams(grammar=Grammar("regex", "(")))


async def test_counters_are_sums_whoever_is_asked(sim: Sim) -> None:
    async with house(sim, fronts=2) as home:
        for i, front in enumerate(home.fronts):
            for j in range(i + 1):
                await read(front.submit([5, i, j], GREEDY, request_id=f"r{j}"))
        for front in home.fronts:
            text = (await front.metrics_text()).decode()
            assert 'vllm:generation_tokens_total{model_name="sim"} 60.0' in text
            assert 'vllm:request_success_total{finished_reason="length",model_name="sim"} 3.0' in text
            assert 'vllm:time_to_first_token_seconds_count{model_name="sim"} 3.0' in text


async def test_socket_figures_are_sums_and_outlive_who_leaves_in_order(sim: Sim) -> None:
    seen = [HttpFigures({"evicted": 0, "stalled": 1}, 5, 2, 70), HttpFigures({"evicted": 3, "stalled": 0}, 4, 1)]

    def told(text: bytes) -> dict[str, float]:
        found = re.findall(r'^aengine:http_(\w+){(?:kind="(\w+)",)?model_name="sim"} (\S+)$', text.decode(), re.M)
        return {kind or name: float(value) for name, kind, value in found}

    async with house(sim, fronts=2) as home:
        for front, figures in zip(home.fronts, seen, strict=True):
            front.bind_http(lambda figures=figures: figures)  # type: ignore[misc]
        both = {"evicted": 3, "stalled": 1, "connections": 9, "connections_busy": 3, "upload_bytes": 70}
        for front in home.fronts:
            assert told(await front.metrics_text()) == both
        seen_last = HttpFigures({"evicted": 8, "stalled": 1}, 5, 2, 70)
        home.fronts[0].bind_http(lambda: seen_last)
        await home.fronts[0].close()
        await home.serving[0]
        after = {"evicted": 11, "stalled": 1, "connections": 4, "connections_busy": 1, "upload_bytes": 0}
        assert told(await home.fronts[1].metrics_text()) == after


def test_the_memory_for_bodies_is_shared() -> None:
    whole = AengineConfig(server=ServerConfig(max_upload_bytes=2**26, max_body_bytes=2**24))
    assert parent.share(whole, 3).server.max_upload_bytes == 2**26 // 3
    assert parent.share(whole, 64).server.max_upload_bytes == 2**24
    assert parent.share(whole, 3).engine == whole.engine


def test_each_front_end_takes_the_connections_that_chance_brings_it() -> None:
    draw = np.random.default_rng(1)
    for most, count in ((64, 2), (1000, 4), (16384, 4)):
        room = parent.share(AengineConfig(server=ServerConfig(max_connections=most)), count).server.max_connections
        fullest = draw.multinomial(most, [1 / count] * count, size=2000).max(axis=1)
        assert (fullest > room).mean() < 0.01
        assert room * count <= most + 3 * (most * count) ** 0.5 + count
    assert parent.share(AengineConfig(server=ServerConfig(max_connections=1)), 64).server.max_connections == 1


async def test_kept_images_are_bounded_and_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seat, "KEPT_IMAGE_BYTES", 1000)
    made = Seat(0, None)  # type: ignore[arg-type]
    images = [MediaInput(bytes([i]), 4, {"pixels": np.full(50, i)}) for i in range(4)]  # 400 bytes each
    told = [made.keep([image])[0] for image in images]
    assert [image.n_bytes for image in told] == [8] * 4
    assert made.take(told[3:]) == images[3:]
    with pytest.raises(QueueFull, match="1 images"):
        made.take(told[3:])
    with pytest.raises(QueueFull):
        made.take(told[:1])
    assert made.take(told[2:3]) == images[2:3]


@pytest.mark.parametrize(("cores", "count"), [(2, 0), (7, 0), (8, 2), (12, 3), (64, 4)])
def test_auto_goes_by_cores_and_says_so(cores: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    found, line = parent.wanted(ServerConfig())
    assert found == count
    assert f"auto: {cores} cores" in line
    assert parent.wanted(ServerConfig(frontends=3)) == (3, "HTTP and text: 3 front-end processes")
