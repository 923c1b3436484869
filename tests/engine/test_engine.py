"""The public engine on the sim device: identity of tokens, ends of requests, faults, shutdown."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from aengine import AsyncEngine, FinishReason, RequestOutput, SamplingParams
from aengine.errors import (
    ContextLengthExceeded,
    EngineDead,
    InvalidRequest,
    NotReady,
    QueueFull,
    RequestTooLarge,
    StepFailed,
)
from aengine.runner.sim import SimExecutor, sim_token
from aengine.types import StepPlan, StepResult
from tests.engine.conftest import EOS, VOCAB, Sim, engine
from tests.waiting import DEADLINE_S, turns, until


def oracle(ids: list[int], n: int, *, ignore_eos: bool = False) -> list[int]:
    out: list[int] = []
    while len(out) < n:
        out.append(sim_token(ids + out, VOCAB))
        if out[-1] == EOS and not ignore_eos:
            break
    return out


async def last(made: AsyncEngine, prompt: object, params: SamplingParams, **kw: object) -> RequestOutput:
    outputs = [output async for output in made.generate(prompt, params, **kw)]  # type: ignore[arg-type]
    return outputs[-1]


GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_many_requests_at_once_get_their_own_tokens(sim: Sim, depth: int) -> None:
    sim.step_s = 0.001
    rng = random.Random(depth)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))] for _ in range(60)]
    async with engine(sim, depth=depth) as made:
        outputs = await asyncio.gather(*(last(made, p, GREEDY) for p in prompts))
        stats = made.stats()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == oracle(prompt, 20, ignore_eos=True)
        assert output.outputs[0].finish_reason is FinishReason.LENGTH
        assert output.finished
    assert stats.running == stats.waiting == stats.open_streams == 0
    assert (stats.steps_overlapped > stats.steps / 2) == (depth > 0)


async def test_eos_ends_with_stop_and_its_text_is_hidden(sim: Sim) -> None:
    async with engine(sim) as made:
        for first in range(40):
            output = await last(made, [first, 7], SamplingParams(temperature=0.0, max_tokens=200))
            want = oracle([first, 7], 200)
            assert output.outputs[0].token_ids == want
            if want[-1] == EOS:
                assert output.outputs[0].finish_reason is FinishReason.STOP
                assert output.outputs[0].stop_reason == EOS
                assert chr(0x100 + EOS) not in output.outputs[0].text
                return
    raise AssertionError("no prompt of 40 met EOS within 200 tokens")


async def test_stop_string_trims_and_frees_the_slot(sim: Sim) -> None:
    want = oracle([5, 6], 20, ignore_eos=True)
    stop = chr(0x100 + want[4]) + chr(0x100 + want[5])
    async with engine(sim) as made:
        params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, stop=(stop,))
        output = await last(made, [5, 6], params)
        assert output.outputs[0].text == "".join(chr(0x100 + t) for t in want[:4])
        assert output.outputs[0].stop_reason == stop
        await until(lambda: made.stats().running == 0)
        assert made.stats().steps < 200


async def test_choices_of_one_prompt_share_its_pages(sim: Sim) -> None:
    prompt = list(range(64))
    params = SamplingParams(temperature=1.0, seed=9, n=4, max_tokens=10, ignore_eos=True)
    async with engine(sim) as made:
        output = await last(made, prompt, params)
        single = await last(made, prompt, SamplingParams(temperature=1.0, seed=9, max_tokens=10, ignore_eos=True))
        assert made.stats().prefix_hits >= 3 * 56
    tokens = [choice.token_ids for choice in output.outputs]
    assert len({tuple(t) for t in tokens}) == 4
    assert tokens[0] == single.outputs[0].token_ids
    assert [choice.index for choice in output.outputs] == [0, 1, 2, 3]


async def test_leaving_the_loop_aborts(sim: Sim) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    async with engine(sim) as made:
        sim.hold(3)
        outputs = made.generate([1, 2, 3], params)
        async for _ in outputs:
            break
        await outputs.aclose()  # type: ignore[attr-defined]
        sim.free()
        await until(lambda: made.stats().running == 0)
        sim.hold(3)
        task = asyncio.create_task(last(made, [1, 2, 3], params))
        await until(lambda: made.stats().running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        sim.free()
        await until(lambda: made.stats().running == made.stats().open_streams == 0)
        assert made.stats().steps < 50  # neither ran to its end


async def test_abort_by_id_finishes_the_stream(sim: Sim) -> None:
    async with engine(sim) as made:
        sim.hold(3)
        task = asyncio.create_task(
            last(made, [1], SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True), request_id="mine")
        )
        await until(lambda: made.stats().running == 1)
        assert made.abort("mine")
        sim.free()
        output = await task
        assert output.outputs[0].finish_reason is FinishReason.ABORT
        assert not made.abort("mine")


async def test_priority_runs_first(sim: Sim) -> None:
    sim.step_s = 0.001
    order: list[str] = []
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)

    async def one(made: AsyncEngine, name: str, priority: int) -> None:
        await last(made, [1, 2], params, priority=priority)
        order.append(name)

    async with engine(sim, max_num_seqs=1) as made:
        names = [("a", 0), ("b", 0), ("c", -1), ("d", 1), ("e", -1)]
        await asyncio.gather(*(one(made, name, priority) for name, priority in names))
    assert order == ["c", "e", "a", "b", "d"]


class FailingSteps(SimExecutor):
    """Raises in chosen steps."""

    fail_at: tuple[int, ...] = ()

    def run(self, plan: StepPlan) -> StepResult:
        if plan.step in self.fail_at:
            raise MemoryError("planted")
        return super().run(plan)


async def test_a_step_that_raises_fails_its_rows_only(sim: Sim) -> None:
    FailingSteps.fail_at = (4,)
    sim.executor_type = FailingSteps
    async with engine(sim, max_num_seqs=2) as made:
        results = await asyncio.gather(*(last(made, [i, 1, 2], GREEDY) for i in range(6)), return_exceptions=True)
        failed = [r for r in results if isinstance(r, BaseException)]
        assert len(failed) == 2
        assert all(isinstance(error, StepFailed) and "planted" in str(error) for error in failed)
        for i, result in enumerate(results):
            if isinstance(result, RequestOutput):
                assert result.outputs[0].token_ids == oracle([i, 1, 2], 20, ignore_eos=True)
        assert made.health().ok
        assert made.stats().running == 0


async def test_a_tokenizer_that_raises_fails_its_request_only(sim: Sim) -> None:
    want = oracle([9, 9], 20, ignore_eos=True)
    other = oracle([8, 1], 20, ignore_eos=True)
    sim.tokenizer.poison = next(t for t in want if t not in other)
    async with engine(sim) as made:
        bad, good = await asyncio.gather(last(made, [9, 9], GREEDY), last(made, [8, 1], GREEDY), return_exceptions=True)
        assert isinstance(bad, StepFailed)
        assert isinstance(good, RequestOutput)
        assert good.outputs[0].token_ids == other
        await until(lambda: made.stats().running == 0)


class Broken(SimExecutor):
    """Returns a result of a step that was not launched: an internal fault."""

    def run(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step + 1, np.zeros((1, 1), np.int32), np.zeros(1, np.int32))


async def test_a_dead_engine_says_so_to_everyone(sim: Sim) -> None:
    sim.executor_type = Broken
    made = engine(sim)
    await made.start()
    results = await asyncio.gather(*(last(made, [i], GREEDY) for i in range(3)), return_exceptions=True)
    assert all(isinstance(result, EngineDead) for result in results)
    assert not made.health().ok
    assert made.health().phase == "dead"
    with pytest.raises(EngineDead):
        made.submit([1], GREEDY, request_id="x")
    await made.close()


async def test_refusals_name_their_numbers(sim: Sim) -> None:
    async with engine(sim, max_waiting=2, max_num_seqs=1) as made:
        with pytest.raises(ContextLengthExceeded, match=r"256 tokens; this model's maximum context length is 256"):
            made.submit([1] * 256, GREEDY, request_id="a")
        with pytest.raises(ContextLengthExceeded, match=r"250 prompt tokens and max_tokens 20 make 270"):
            made.submit([1] * 250, GREEDY, request_id="a")
        with pytest.raises(InvalidRequest, match=r"token id 256, not in \[0, 256\)"):
            made.submit([256], GREEDY, request_id="a")
        with pytest.raises(InvalidRequest, match="no tokens"):
            made.submit([], GREEDY, request_id="a")
        for i in range(3):  # one for the free slot, two that wait
            made.submit([1], GREEDY, request_id=f"q{i}")
        with pytest.raises(InvalidRequest, match="in use"):
            made.submit([1], GREEDY, request_id="q0")
        with pytest.raises(QueueFull, match="3 requests are waiting; the waiting room holds 2") as full:
            made.submit([1], GREEDY, request_id="q3")
        assert full.value.retry_after_s is not None
        assert full.value.retry_after_s >= 1


async def test_a_request_that_can_never_fit_is_refused(sim: Sim) -> None:
    sim.pages = 20
    async with engine(sim) as made:
        with pytest.raises(RequestTooLarge, match="101 tokens"):
            made.submit([1] * 81, GREEDY, request_id="a")
        assert (await last(made, [1] * 50, GREEDY)).finished


async def test_close_drains_then_refuses(sim: Sim) -> None:
    made = engine(sim)
    await made.start()
    sim.hold(3)
    task = asyncio.create_task(last(made, [1, 2], GREEDY))
    await until(lambda: made.stats().running == 1)
    closing = asyncio.create_task(made.close(drain_s=DEADLINE_S))
    await turns()
    sim.free()
    await closing
    assert (await task).outputs[0].token_ids == oracle([1, 2], 20, ignore_eos=True)
    with pytest.raises(NotReady):
        made.submit([1], GREEDY, request_id="late")
    await made.close()


async def test_close_without_drain_ends_open_streams(sim: Sim) -> None:
    made = engine(sim)
    await made.start()
    sim.hold(3)
    task = asyncio.create_task(last(made, [1, 2], SamplingParams(max_tokens=200, ignore_eos=True)))
    await until(lambda: made.stats().running == 1)
    closing = asyncio.create_task(made.close())
    await turns()
    sim.free()
    await closing
    with pytest.raises(NotReady):
        await task


async def test_a_slow_reader_gets_everything_in_fewer_deltas(sim: Sim) -> None:
    async with engine(sim) as made:
        stream = made.submit([1, 2], GREEDY, request_id="slow")
        ended = asyncio.Event()
        stream.on_finished(ended.set)
        await ended.wait()
        deltas = [delta async for delta in stream]
        assert len(deltas) == 1
        assert list(deltas[0].token_ids) == oracle([1, 2], 20, ignore_eos=True)


async def test_token_ids_logprobs_and_prompt_logprobs_line_up(sim: Sim) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    prompt = [random.Random(1).randrange(VOCAB) for _ in range(150)]
    async with engine(sim) as made:
        await last(made, prompt, GREEDY)  # fills the cache, which prompt log-probabilities must not use
        output = await last(made, prompt, params)
    assert [p.token_id for p in output.outputs[0].logprobs or []] == output.outputs[0].token_ids
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [p.token_id for p in output.prompt_logprobs[1:] if p] == prompt[1:]


async def test_random_load_with_cancellations_leaves_nothing_behind(sim: Sim) -> None:
    sim.pages, sim.step_s = 60, 0.0005
    rng = random.Random(3)
    async with engine(sim, max_num_seqs=8) as made:

        async def one(i: int) -> None:
            prompt = [rng.randrange(4) for _ in range(rng.randint(1, 80))]
            most = rng.randint(1, 40)
            params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
            await asyncio.sleep(rng.random() * 0.3)
            try:
                async with asyncio.timeout(rng.choice([0.01, 0.05, 5.0])):
                    output = await last(made, prompt, params)
            except TimeoutError:
                return
            assert output.outputs[0].token_ids == oracle(prompt, most, ignore_eos=True)

        await asyncio.gather(*(one(i) for i in range(120)))
        await until(lambda: not (made.stats().running or made.stats().waiting or made.stats().open_streams))
        stats = made.stats()
        assert stats.kv_usage == 0.0
        assert stats.preemptions > 0
