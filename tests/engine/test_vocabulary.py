"""A vocabulary for grammars: masks do not depend on the sets they are made of, and a forced text is split once."""

import random

import numpy as np
import pytest
from llguidance import LLMatcher

from aengine.engine.vocabulary import read_vocabulary

WORDS = [
    "a",
    "an",
    "ant",
    " text",
    " of some",
    " length that",
    '"',
    '", "',
    '["',
    "]",
    ",",
    "\\",
    "\\n",
    "1",
    "12",
    " ",
    "é",
]


class Tokenizer:
    """256 bytes, then WORDS and repeated letters of any length up to 40; the last token ends."""

    bos_id = None

    def __init__(self):
        self.plain = [bytes([i]) for i in range(256)] + [word.encode() for word in WORDS]
        self.plain += [bytes([97 + n % 26]) * n for n in range(2, 41)] + [b"<end>"]
        self.vocab_size = len(self.plain)
        self.eos_ids = (self.vocab_size - 1,)
        self.special_ids = frozenset(self.eos_ids)
        self.encoded = []

    def token_bytes(self, token):
        return self.plain[token]

    def encode(self, text, *, add_special_tokens):
        self.encoded.append(text)
        return list(text.encode())


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer()


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return read_vocabulary(tokenizer, tokenizer.vocab_size)


SCHEMAS = {
    "limited": {"type": "array", "items": {"type": "string", "maxLength": 12}},
    "free": {"type": "array", "items": {"type": "string"}},
    "pattern": {"type": "array", "items": {"type": "string", "pattern": "^a[a-z ]{3,9}$"}},
    "object": {"type": "object", "properties": {"a": {"type": "string", "minLength": 3}, "b": {"type": "integer"}}},
}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_masks_do_not_depend_on_the_sets_they_are_made_of(vocabulary, schema):
    grammar = LLMatcher.grammar_from_json_schema(schema)
    rng = random.Random(0)
    for _ in range(8):
        made, looked_at = LLMatcher(vocabulary, grammar), LLMatcher(vocabulary.with_slices([]), grammar)
        for _ in range(40):
            mask = made.compute_bitmask()
            assert mask == looked_at.compute_bitmask()
            allowed = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little").nonzero()[0].tolist()
            token = rng.choice(allowed)
            assert made.consume_token(token)
            assert looked_at.consume_token(token)
            if made.is_stopped():
                break


def test_a_forced_text_is_split_once(tokenizer, vocabulary):
    grammar = LLMatcher.grammar_from_regex("(forced and long|b)")
    for count in (1, 0, 0):
        matcher = LLMatcher(vocabulary, grammar)
        tokenizer.encoded.clear()
        assert matcher.consume_token(ord("f"))
        assert bytes(matcher.compute_ff_tokens()) == b"orced and long"
        assert len(tokenizer.encoded) == count
