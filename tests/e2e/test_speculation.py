"""Speculation on the real model: the same answers with and without it, whatever ends them, alone and together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from aengine import AsyncEngine, RequestOutput, SamplingParams
from aengine.engine.facts import EngineStats
from tests.e2e.conftest import config, last, run_all

PERIODIC = " red green blue" * 12
LISTING = "1. apple: a fruit\n2. pear: a fruit\n3. plum: a fruit\n4."
STORY = "Once upon a time, in a village by the sea,"
WARM = 0.8


def greedy(tokens: int = 30, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, **{"ignore_eos": True, **more})  # type: ignore[arg-type]


ASKED = [
    (LISTING, greedy()),
    (STORY, greedy(16)),
    (LISTING, SamplingParams(temperature=WARM, seed=7, max_tokens=20, ignore_eos=True)),
    (PERIODIC, SamplingParams(temperature=WARM, seed=8, top_p=0.9, max_tokens=20, ignore_eos=True)),
    (PERIODIC, greedy(29)),  # ends by length within drafts
    (PERIODIC, greedy(logprobs=2)),
    (PERIODIC, greedy(stop=("green green",))),
    (PERIODIC, greedy(frequency_penalty=0.4)),
    (LISTING, greedy(min_tokens=9, stop=("fruit",))),
]


@dataclass
class Answers:
    alone: list[RequestOutput]
    together: list[RequestOutput]
    stats: EngineStats


async def answers(speculate: int | None) -> Answers:
    prompts, params = [prompt for prompt, _ in ASKED], [each for _, each in ASKED]
    async with AsyncEngine(config(dtype="auto", speculate=speculate, max_model_len=512)) as engine:
        alone = [await last(engine, prompt, each) for prompt, each in ASKED] if speculate is None else []
        stats = engine.stats()
        return Answers(alone, await run_all(engine, prompts, params), stats)


@pytest.fixture(scope="module")
def both() -> tuple[Answers, Answers]:
    async def run() -> tuple[Answers, Answers]:
        return await answers(0), await answers(None)

    return asyncio.run(run())


def told(outputs: list[RequestOutput]) -> list[object]:
    return [(each.outputs[0].token_ids, each.outputs[0].text, each.outputs[0].finish_reason) for each in outputs]


def test_answers_are_the_same(both: tuple[Answers, Answers]) -> None:
    off, on = both
    assert told(on.alone) == told(on.together) == told(off.together)
    assert on.alone[5].outputs[0].logprobs == off.together[5].outputs[0].logprobs, "and so are log-probabilities"
    assert on.alone[6].outputs[0].finish_reason == on.alone[8].outputs[0].finish_reason == "stop"


def test_drafts_were_accepted_and_counted(both: tuple[Answers, Answers]) -> None:
    off, on = (each.stats for each in both)
    assert off.drafted_tokens == off.drafts == 0
    assert on.accepted_tokens > 15
    assert on.drafts <= on.drafted_tokens
    assert sum(on.accepted_by_position) == on.accepted_tokens
    assert list(on.accepted_by_position) == sorted(on.accepted_by_position, reverse=True)
    tokens = sum(len(each.outputs[0].token_ids) for each in both[1].alone)
    assert on.steps < tokens - 15
