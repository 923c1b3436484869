"""Structured output on SmolLM2: answers follow their grammar, and only that; nothing else changes a token."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from jsonschema import Draft202012Validator

from aengine import AsyncEngine, Grammar, GrammarTooComplex, InvalidGrammar, InvalidRequest, SamplingParams
from aengine.errors import NoTokenAllowed
from bench.random_schemas import random_schema
from tests.e2e.conftest import config, last, run_all

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "tags": {"enum": ["a long and forced text", "other"]}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}
RULED = Grammar("json_schema", json.dumps(SCHEMA))
CHOICES = ["yes it is", 'no "never" | not', "ü\nß"]


def params(**changes):
    return SamplingParams(**({"max_tokens": 60, "temperature": 0.0, "grammar": RULED} | changes))


MIXED = [
    params(),
    params(temperature=1.0, seed=7, n=2),
    params(temperature=1.0, seed=7, logprobs=1),
    params(grammar=Grammar("regex", "[0-9]{3}-[0-9]{4}")),
    params(grammar=Grammar("choice", json.dumps(CHOICES))),
    params(grammar=Grammar("lark", 'start: "x" /[a-c]{1,8}/ "y"')),
    params(repetition_penalty=1.3, min_tokens=40),
    params(grammar=None, max_tokens=24),
    params(max_tokens=5),
]


def texts(outputs):
    return [[(c.text, tuple(c.token_ids), c.finish_reason) for c in output.outputs] for output in outputs]


async def ask(**changes):
    async with AsyncEngine(config(**changes)) as engine:
        made = await run_all(engine, ["The data: "] * len(MIXED), MIXED)
        return made, engine.stats()


async def test_grammars_rule_and_depth_capture_and_room_change_nothing():
    made, stats = await ask(speculate=0)  # steps with drafts are not overlapped
    assert stats.steps_overlapped >= stats.steps - 3
    assert stats.forced_tokens > 0
    first, two, told, phone, choice, lark, penalised, free, cut = (output.outputs for output in made)
    for one in (*first, *two, *told, *penalised):
        Draft202012Validator(SCHEMA).validate(json.loads(one.text))
        assert one.finish_reason == "stop"
    assert two[0].token_ids == told[0].token_ids  # tokens that were taken over, and the same tokens sampled one by one
    assert len(told[0].logprobs) == len(told[0].token_ids)
    assert re.fullmatch("[0-9]{3}-[0-9]{4}", phone[0].text)
    assert choice[0].text in CHOICES
    assert re.fullmatch("x[a-c]{1,8}y", lark[0].text)
    assert len(free[0].token_ids) == 24
    assert first[0].token_ids[:5] == cut[0].token_ids
    assert cut[0].finish_reason == "length"
    for changes in ({"depth": 0, "capture": False}, {"kv_bytes": 5 * 2**20, "max_model_len": 96}):
        other, _ = await ask(**changes)
        assert texts(other) == texts(made), changes


async def test_random_schemas_validate():
    """A sample; bench/structured.py runs a thousand."""
    async with AsyncEngine(config(dtype="auto")) as engine:

        async def one(seed):
            schema = random_schema(seed)
            grammar = Grammar("json_schema", json.dumps(schema))
            sampling = params(grammar=grammar, temperature=float(seed % 2), seed=seed, max_tokens=300)
            made = (await last(engine, f"Example {seed}:\n", sampling)).outputs[0]
            assert made.finish_reason == "stop"
            Draft202012Validator(schema).validate(json.loads(made.text))

        await asyncio.gather(*(one(seed) for seed in range(20)))
        await refusals(engine)


async def refusals(engine):
    part = {"type": "array", "items": {"if": {}}}
    nested = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d"}, "b": part}, "$defs": {"d": {}}}
    with pytest.raises(InvalidGrammar, match=r"\$\.properties\.b\.items: .*if") as caught:
        await last(engine, "x", params(grammar=Grammar("json_schema", json.dumps(nested))))
    assert caught.value.place == "$.properties.b.items"
    nested["properties"] = {"any": True, "none": False, "b": part}
    with pytest.raises(InvalidGrammar, match=r"\$\.properties\.b\.items: "):
        await last(engine, "x", params(grammar=Grammar("json_schema", json.dumps(nested))))
    json.loads((await last(engine, "x", params(grammar=Grammar("json_schema", "true")))).outputs[0].text)
    for grammar in (
        Grammar("json_schema", "false"),
        Grammar("json_schema", '{"type": "strng"}'),
        Grammar("json_schema", "{"),
        Grammar("json_schema", "[1]"),
        Grammar("regex", "("),
        Grammar("lark", "start: nowhere"),
        Grammar("choice", "[]"),
        Grammar("poem", "x"),
    ):
        with pytest.raises(InvalidGrammar):
            await last(engine, "x", params(grammar=grammar))
    wide = {"type": "object", "properties": {"a": {"type": ["integer", "null"], "minimum": 10**30}}}
    with pytest.raises(InvalidGrammar, match=r"\$\.properties\.a\.minimum is 1000") as caught:
        await last(engine, "x", params(grammar=Grammar("json_schema", json.dumps(wide))))
    with pytest.raises(GrammarTooComplex, match="characters"):
        await last(engine, "x", params(grammar=Grammar("regex", "a" * 300_000)))
    with pytest.raises(InvalidRequest, match="not prepared"):
        engine.submit([1], params(grammar=Grammar("regex", "never seen")), request_id="r")
    stopping = {"grammar": Grammar("lark", 'start: "hi" <[100]> "more"'), "stop_token_ids": (100,), "min_tokens": 9}
    for changes in ({"grammar": Grammar("choice", '["yes"]'), "allowed_token_ids": (5,)}, stopping):
        for logprobs in (None, 0):  # a forced token is refused whether it is taken over or sampled
            with pytest.raises(NoTokenAllowed):
                await last(engine, "x", params(logprobs=logprobs, **changes))
    made = await last(engine, "x", params(max_tokens=4))  # and it goes on
    assert len(made.outputs[0].token_ids) == 4


async def test_a_text_that_the_vocabulary_cannot_spell_and_a_limit_met_late_are_the_requests_fault():
    unspeakable = "\U00089cd6"  # its first byte has no token
    async with AsyncEngine(config(device="sim")) as engine:
        with pytest.raises(NoTokenAllowed, match="cannot spell"):
            await last(engine, "x", params(grammar=Grammar("regex", f"ab{unspeakable}c")))
        for grammar in (
            Grammar("json_schema", '{"type": "array", "items": {"const": 1}, "minItems": 9000}'),
            Grammar("regex", "((a{1,300}){1,300}){1,300}"),
        ):
            with pytest.raises(GrammarTooComplex, match="oo many"):
                await last(engine, "x", params(grammar=grammar))
        with pytest.raises(InvalidGrammar, match="no answer can satisfy it"):
            await last(engine, "x", params(grammar=Grammar("choice", json.dumps([unspeakable + "c"]))))
        output = await last(engine, "x", params(grammar=Grammar("choice", json.dumps([unspeakable, "四 🙂"]))))
        assert output.outputs[0].text == "四 🙂"
