"""Schemas as they reach the grammar library: counts, bounds, many optional properties, and grammars' tokens."""

import json
from functools import partial

import numpy as np
import pytest

from aengine.engine.grammars import FEW_MASKS, MASK_THREADS, Grammars
from aengine.engine.schema_check import MAX_OPTIONAL, checked_lark, checked_schema
from aengine.engine.short_texts import ShortTexts
from aengine.engine.vocabulary import read_vocabulary
from aengine.errors import GrammarTooComplex, InvalidGrammar
from aengine.types import Grammar
from tests.engine.test_vocabulary import Tokenizer


@pytest.fixture(scope="module")
def grammars():
    tokenizer = Tokenizer()
    made = Grammars(
        partial(read_vocabulary, tokenizer, tokenizer.vocab_size),
        partial(ShortTexts, tokenizer, tokenizer.vocab_size),
    )
    yield made
    made.close()


def many(count, required=()):
    return {"type": "object", "properties": {f"p{i}": {} for i in range(count)}, "required": list(required)}


def test_counts_may_be_written_as_floats():
    schema = {"items": {"maxLength": 3.0, "enum": [{"maxLength": 3.0}]}, "minItems": 2.0, "maxItems": 2.5}
    changed = '{"items": {"maxLength": 3, "enum": [{"maxLength": 3.0}]}, "minItems": 2, "maxItems": 2.5}'
    assert checked_schema(json.dumps(schema)) == changed
    untouched = '{"a":1.0,  "maxLength": 3}'
    assert checked_schema(untouched) is untouched
    assert checked_lark('start: %json {"maxLength": 1.0} "x" %json {"a": 1}') == (
        'start: %json {"maxLength": 1} "x" %json {"a": 1}'
    )
    assert checked_lark('start: "%json {" /a/') == 'start: "%json {" /a/'


def test_too_many_optional_properties_are_told_before_anything_is_compiled():
    with pytest.raises(GrammarTooComplex, match=r"\$\.items has 1,201 optional properties in a row, of at most 1,200"):
        checked_schema(json.dumps({"items": many(MAX_OPTIONAL + 1)}))
    for schema in (many(MAX_OPTIONAL), many(2 * MAX_OPTIONAL, [f"p{MAX_OPTIONAL}"])):
        checked_schema(json.dumps(schema))


async def test_as_many_optional_properties_as_are_accepted_can_be_followed(grammars):
    grammar = Grammar("json_schema", json.dumps(many(MAX_OPTIONAL)))
    await grammars.prepare(grammar)
    matcher = grammars.matchers(grammar, 1)[0]
    for byte in b'{"p1199": 1':
        matcher.accept(byte)
        await grammars.make_masks([matcher])
        assert matcher.error is None


async def test_a_token_outside_the_vocabulary_is_named_with_the_vocabularys_size(grammars):
    with pytest.raises(InvalidGrammar, match=r"the grammar names token id 999999999, not in \[0, 313\)"):
        await grammars.prepare(Grammar("lark", "start: <[999999999]>"))


async def test_matchers_take_turns_among_the_families_and_their_masks_keep_their_rows(grammars):
    grammar = Grammar("regex", "[a-z]{1,9}!")
    await grammars.prepare(grammar)
    times = FEW_MASKS // MASK_THREADS + 1  # together in several threads, alone in one
    matchers = grammars.matchers(grammar, times * MASK_THREADS)
    assert sorted(one.family for one in matchers) == sorted([*range(MASK_THREADS)] * times)
    for number, matcher in enumerate(matchers):
        for _ in range(number % 10):
            matcher.accept(ord("a"))
    masks = await grammars.make_masks(matchers)
    for one, mask in zip(matchers, masks, strict=True):
        alone = await grammars.make_masks([one])
        assert np.array_equal(alone[0], mask)
    assert len({mask.tobytes() for mask in masks}) > 1
