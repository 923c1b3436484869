"""Masks within texts of limited length are those of the whole vocabulary, bit for bit."""

import json
import random
from functools import partial

import numpy as np
import pytest
from llguidance import LLMatcher

from aengine.engine.grammars import Grammars, _translated
from aengine.engine.short_texts import ShortTexts, has_short_texts
from aengine.engine.vocabulary import read_vocabulary
from aengine.types import Grammar
from tests.engine.test_vocabulary import Tokenizer

TEXT = {"type": "string", "maxLength": 9}


def grammar(schema):
    return Grammar("json_schema", json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "short"),
    [
        (TEXT, True),
        ({"type": "string"}, False),
        ({"type": "string", "maxLength": 9, "pattern": "a*"}, False),
        ({"type": "string", "maxLength": 9, "format": "date"}, False),
        ({"type": "array", "items": TEXT, "prefixItems": [{"enum": ["a"]}]}, True),
        ({"type": "object", "properties": {"pattern": TEXT}, "additionalProperties": False}, True),
        ({"type": "object", "properties": {"a": TEXT, "b": {"pattern": "b"}}}, False),
        ({"type": "object", "properties": {"a": TEXT}, "patternProperties": {"b": {}}}, False),
        ({"type": "object", "properties": {"a": TEXT}, "propertyNames": {"enum": ["a"]}}, False),
        ({"anyOf": [TEXT, {"enum": ["a longer text"]}]}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": TEXT}}, True),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"not": TEXT}}}, False),
        ({"type": "array", "items": TEXT, "x-guidance": {}}, False),
        ({"type": "string", "maxLength": 9, "enum": ["\u0378"]}, False),
    ],
)
def test_only_texts_whose_characters_are_all_alike_are_short(schema, short):
    assert has_short_texts(grammar(schema)) == short


def test_other_grammars_have_no_short_texts():
    assert not has_short_texts(Grammar("regex", "maxLength"))
    assert not has_short_texts(Grammar("json_object"))


SCHEMAS = [
    {"type": "array", "items": TEXT, "minItems": 9},
    {"type": "array", "items": {"type": ["string", "integer"], "maxLength": 5, "minLength": 3}, "minItems": 9},
    {"type": "object", "properties": {"a": TEXT, "an": {"enum": ["ant", " text"]}}, "additionalProperties": TEXT},
    {"type": "array", "items": {"type": "string"}, "minItems": 9},  # none of them
    {"type": "array", "prefixItems": [{"type": "string", "maxLength": 50}, {}, TEXT], "items": {"type": "number"}},
]


async def test_masks_are_those_of_the_whole_vocabulary():
    tokenizer = Tokenizer()
    whole = read_vocabulary(tokenizer, tokenizer.vocab_size).with_slices([])
    made = Grammars(
        partial(read_vocabulary, tokenizer, tokenizer.vocab_size),
        partial(ShortTexts, tokenizer, tokenizer.vocab_size),
    )
    for schema in SCHEMAS:
        await made.prepare(grammar(schema))
    chance = random.Random(0)
    within = 0
    for _ in range(3):
        schemas = list(map(grammar, SCHEMAS * 3))  # more than are made in one thread, until some end
        pairs = [(*made.matchers(one, 1), LLMatcher(whole, _translated(one))) for one in schemas]
        for _ in range(50):
            if chance.random() < 0.5:  # as the scheduler does, and as it does not where tokens are scored
                for one, _ in pairs:
                    one.forced()
            masks = await made.make_masks([one for one, _ in pairs])
            within += sum(one.within for one, _ in pairs)
            going = []
            for (one, looked_at), mask in zip(pairs, masks, strict=True):
                assert mask.tobytes()[: len(looked_at.compute_bitmask())] == looked_at.compute_bitmask()
                allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()
                token = chance.choice(allowed)
                assert looked_at.consume_token(token)
                if one.accept(token):
                    going.append((one, looked_at))
            pairs = going
    made.close()
    assert within > 100
