"""The blocking engine on the sim device."""

from __future__ import annotations

import threading

import pytest

from aengine import LLM, SamplingParams
from aengine.errors import ContextLengthExceeded, InvalidRequest
from tests.engine.conftest import Sim
from tests.engine.test_engine import GREEDY, oracle


def test_many_prompts_come_back_in_order(sim: Sim) -> None:
    prompts = [[i, i + 1, 7] for i in range(50)]
    with LLM() as llm:
        outputs = llm.generate(prompts, GREEDY, progress=False)
    assert [o.outputs[0].token_ids for o in outputs] == [oracle(p, 20, ignore_eos=True) for p in prompts]


def test_one_prompt_of_any_kind(sim: Sim) -> None:
    with LLM() as llm:
        (text,) = llm.generate("ab", GREEDY, progress=False)
        (ids,) = llm.generate([ord("a"), ord("b")], GREEDY, progress=False)
        (chat,) = llm.chat([{"role": "user", "content": "ab"}], GREEDY, progress=False)
    assert text.prompt == "ab"
    assert text.outputs[0].token_ids == ids.outputs[0].token_ids == chat.outputs[0].token_ids


def test_params_for_each_prompt(sim: Sim) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (1, 2, 3)]
    with LLM() as llm:
        outputs = llm.generate([[1], [2], [3]], params, progress=False)
        assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 2, 3]
        with pytest.raises(InvalidRequest, match="3 prompts, but 2 SamplingParams"):
            llm.generate([[1], [2], [3]], params[:2], progress=False)


def test_a_bad_prompt_raises_its_own_error_and_the_next_call_works(sim: Sim) -> None:
    with LLM() as llm:
        with pytest.raises(ContextLengthExceeded, match="300 tokens"):
            llm.generate([[1], [2] * 300], GREEDY, progress=False)
        assert llm.generate([[5]], GREEDY, progress=False)[0].outputs[0].token_ids == oracle([5], 20, ignore_eos=True)


def test_nothing_to_do_and_closing_twice(sim: Sim) -> None:
    llm = LLM()
    assert llm.generate([], GREEDY, progress=False) == []
    llm.close()
    llm.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("aengine-")]
