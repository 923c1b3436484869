"""What a program may get wrong harms its own request only, and says why."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from typing import Any

import numpy as np
import pytest

from aengine import AsyncEngine, DeviceConfig, EngineConfig, SamplingParams
from aengine.errors import EngineDead, InvalidRequest, NotReady, StepFailed
from aengine.runner.sim import SimExecutor
from aengine.types import StepPlan, StepResult
from tests.engine.conftest import Sim, engine
from tests.engine.test_engine import GREEDY, last, oracle
from tests.waiting import DEADLINE_S, turns, until


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ([[1, 2, 3]], {}),
        ([[1], [2]], {}),
        (["a", "b"], {}),
        ([1.5, 2.0], {}),
        ([True, False], {}),
        (np.zeros((2, 2), np.int32), {}),
        (7, {}),
        ([1], {"priority": "high"}),
        ([1], {"priority": float("nan")}),
        ([1], {"priority": 2**40}),
        ([1], {"cache_salt": "\ud800"}),
        ([1], {"cache_salt": 5}),
        ([1], {"request_id": ""}),
    ],
)
async def test_a_bad_call_is_refused_and_others_go_on(sim: Sim, prompt: Any, options: dict[str, Any]) -> None:
    async with engine(sim) as made:
        good = asyncio.create_task(last(made, [1, 2], GREEDY))
        with pytest.raises(InvalidRequest):
            await last(made, prompt, GREEDY, **options)
        assert (await good).outputs[0].token_ids == oracle([1, 2], 20, ignore_eos=True)
        assert made.health().ok


async def test_numpy_ids_and_an_absent_salt_are_fine(sim: Sim) -> None:
    async with engine(sim) as made:
        output = await last(made, np.array([1, 2]), GREEDY, cache_salt=None)
        assert output.outputs[0].token_ids == oracle([1, 2], 20, ignore_eos=True)


def test_sampling_params_take_single_strings_and_lists_and_refuse_other_kinds() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(bad_words="foo").bad_words == ("foo",)
    assert SamplingParams(stop_token_ids=[3]).stop_token_ids == (3,)  # type: ignore[arg-type]
    for wrong in ({"max_tokens": 1.5}, {"n": True}, {"seed": "x"}, {"bad_words": ["w"] * 129}, {"bad_words": [" "]}):
        with pytest.raises(InvalidRequest):
            SamplingParams(**wrong)  # type: ignore[arg-type]


async def test_abort_while_the_prompt_is_encoded(sim: Sim) -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Slow:
        def __call__(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            entered.set()
            assert go_on.wait(DEADLINE_S)
            return [1, 2]

    sim.tokenizer.encode = Slow()  # type: ignore[method-assign]
    async with engine(sim) as made:
        task = asyncio.create_task(last(made, "text", GREEDY, request_id="mine"))
        await until(entered.is_set)
        assert made.abort("mine")
        go_on.set()
        assert (await task).outputs[0].finish_reason == "abort"


async def test_a_second_reader_is_refused(sim: Sim) -> None:
    async with engine(sim) as made:
        sim.hold()
        stream = made.submit([1], GREEDY, request_id="a")
        first = asyncio.create_task(anext(stream))
        await turns()
        with pytest.raises(RuntimeError, match="reader already"):
            await anext(stream)
        sim.free()
        await first


async def test_outputs_that_are_kept_do_not_grow(sim: Sim) -> None:
    sim.step_s = 0.002
    async with engine(sim) as made:
        kept = [len(o.outputs[0].token_ids) async for o in made.generate([1], GREEDY)]
        outputs = [o async for o in made.generate([1], GREEDY)]
    assert [len(o.outputs[0].token_ids) for o in outputs] == sorted(len(o.outputs[0].token_ids) for o in outputs)
    assert len({len(o.outputs[0].token_ids) for o in outputs}) > 1
    assert kept[-1] == 20


async def test_close_while_loading_and_a_failed_start(sim: Sim, monkeypatch: pytest.MonkeyPatch) -> None:
    real = sim.build

    entered, go_on = threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        entered.set()
        assert go_on.wait(DEADLINE_S)
        return real(*args)

    monkeypatch.setattr("aengine.engine.build.build", slow)
    made = engine(sim)
    start = asyncio.create_task(made.start())
    await until(entered.is_set)
    closing = asyncio.create_task(made.close())
    await turns()
    go_on.set()
    await closing
    with pytest.raises(NotReady):
        await start
    assert made.phase == "closed"

    def broken(*args: Any) -> Any:
        raise MemoryError("planted")

    monkeypatch.setattr("aengine.engine.build.build", broken)
    made = engine(sim)
    with pytest.raises(MemoryError):
        await made.start()
    assert made.phase == "failed"
    await made.close()


async def test_closing_one_engine_leaves_the_other_frozen(sim: Sim) -> None:
    one, two = engine(sim), engine(sim)
    before_s = sys.getswitchinterval()
    await one.start()
    await two.start()
    await asyncio.gather(one.close(), one.close())
    assert gc.get_freeze_count() > 0
    assert sys.getswitchinterval() <= 0.001
    await two.close()
    assert gc.get_freeze_count() == 0
    assert sys.getswitchinterval() == before_s


class Hopeless(SimExecutor):
    def run(self, plan: StepPlan) -> StepResult:
        raise MemoryError("planted")


async def test_a_device_that_always_fails_does_not_look_alive(sim: Sim) -> None:
    sim.executor_type = Hopeless
    made = engine(sim)
    await made.start()
    for _ in range(40):
        try:
            with pytest.raises(StepFailed):
                await last(made, [1], GREEDY)
        except EngineDead:
            break
    assert not made.health().ok
    assert made.health().phase == "dead"
    assert made.stats().running == 0
    await made.close()


async def test_prompt_logprobs_come_before_any_choice_speaks(sim: Sim) -> None:
    params = SamplingParams(temperature=1.0, n=2, max_tokens=4, ignore_eos=True, prompt_logprobs=0, seed=1)
    prompt = list(range(100)) * 2
    async with engine(sim) as made:
        await last(made, prompt, GREEDY)
        stream = made.submit(prompt, params, request_id="a")
        async for _ in stream:
            assert stream.prompt_logprobs is not None
            assert len(stream.prompt_logprobs) == len(prompt)
        single = made.submit([5], SamplingParams(max_tokens=1, prompt_logprobs=0), request_id="b")
        async for _ in single:
            assert single.prompt_logprobs == [None]


async def test_an_old_request_is_not_starved_by_rows_that_fill_the_budget(sim: Sim) -> None:
    """More decode rows than budget: the oldest prompt still gets its share of every step."""
    order: list[str] = []
    async with engine(sim, max_num_seqs=16, max_batched_tokens=4) as made:
        sim.hold(20)

        async def one(name: str, prompt: list[int], tokens: int, priority: int) -> None:
            await last(
                made, prompt, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True), priority=priority
            )
            order.append(name)

        crowd = [asyncio.create_task(one(f"c{i}", [i], 60, 5)) for i in range(8)]
        await until(lambda: made.stats().steps > 20)  # all of the crowd are at it, and none can be through
        urgent = asyncio.create_task(one("urgent", list(range(40)), 2, -10))
        await until(lambda: made.stats().waiting + made.stats().running == 9)
        sim.free()
        await urgent
        assert order == ["urgent"] or order.index("urgent") < 4
        await asyncio.gather(*crowd)


def test_types_of_the_engine() -> None:
    assert AsyncEngine().phase == "created"


@pytest.mark.parametrize("name", ["allowed_token_ids", "bad_words", "logit_bias"])
async def test_the_simulated_device_refuses_what_it_would_not_honour(sim: Sim, name: str) -> None:
    """It draws every token alike: a mask or a bias would be dropped in silence."""
    value: Any = {"allowed_token_ids": (5,), "bad_words": ("x",), "logit_bias": {5: 1.0}}[name]
    simulated = AsyncEngine(EngineConfig(device=DeviceConfig(device="sim")))
    async with simulated as made:
        with pytest.raises(InvalidRequest) as raised:
            await last(made, [1, 2], SamplingParams(**{name: value}))
        assert raised.value.param == name
        assert raised.value.message == f"{name}: the simulated device draws every token alike and cannot honour it"
        for empty in ({}, {"bad_words": ()}, {"logit_bias": {}}):  # ask nothing of it
            assert (await last(made, [1, 2], SamplingParams(max_tokens=2, **empty))).finished
    async with engine(sim) as made:  # other devices honour them, or say why not themselves
        assert (await last(made, [1, 2], SamplingParams(max_tokens=2, **{name: value}))).finished
