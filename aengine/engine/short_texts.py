"""Masks within texts of limited length, without a walk over the vocabulary.

Owns: which schemas have only texts whose characters are all alike; a small vocabulary for these; masks put together
from its own and from the tokens of so many characters.
Does not know: requests, scheduling.
Invariants: a mask is, bit for bit, what the whole vocabulary would give. Only where nothing of a schema says which
characters a text may have, and no text has two schemas at once, is a state within one told by how many characters may
still come; then a token of plain characters is allowed if it has no more of them. The small vocabulary holds all other
tokens, and one word of each length, spelt with a letter that stands in no schema, that tells how many may come.

The library walks over 30,000 prefixes of tokens, 0.2 to 0.9 ms, for each mask of a text that nears its limit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from llguidance import LLTokenizer

from aengine.engine.schema_check import checked_schema
from aengine.engine.vocabulary import TEXT, Vocabulary
from aengine.models.tokenizer import Tokenizer
from aengine.types import Grammar, Int32s, Int64s

_LETTER = "\u0378"  # no character has this number
_PLAIN = re.compile(f"{TEXT}+")
_LONGEST = 64  # longer tokens are looked at one by one
_SAME = {"type", "required", "minItems", "maxItems", "minLength", "maxLength", "enum", "const", "$ref"}
_SAME |= {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minProperties", "maxProperties"}
_SAME |= {"title", "description", "default", "examples", "$comment", "$schema", "$id"}
_ONE, _LIST, _NAMED = {"items", "additionalProperties"}, {"prefixItems"}, {"properties", "$defs", "definitions"}


def has_short_texts(grammar: Grammar) -> bool:
    """Whether `grammar` has texts of limited length, and none whose characters are not all alike. Its schema is known
    to be one."""
    if grammar.kind != "json_schema" or "maxLength" not in grammar.source:
        return False
    schema = json.loads(checked_schema(grammar.source))
    return _LETTER not in json.dumps(schema, ensure_ascii=False) and _alike(schema)


def _alike(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return isinstance(schema, bool)
    for name, value in schema.items():
        if name in _SAME:
            continue
        if name in _ONE:
            inner = [value]
        elif name in _LIST and isinstance(value, list):
            inner = value
        elif name in _NAMED and isinstance(value, dict):
            inner = list(value.values())
        else:
            return False
        if not all(map(_alike, inner)):
            return False
    return True


class ShortTexts:
    """`vocabulary`: the small one, of the library. Its ids are the model's; the words follow, from a border of 32."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        size = max(vocab_size, tokenizer.vocab_size)
        self._mask_words = -(-size // 32)
        whole = Vocabulary(tokenizer, size)
        lengths = _lengths(whole.tokens)
        small = Vocabulary(tokenizer, size)
        small.keep(np.flatnonzero(lengths == 0).tolist())
        self.most = int(lengths.max(initial=0))
        small.tokens += [b""] * (32 * self._mask_words - size)
        small.tokens += [(_LETTER * count).encode() for count in range(1, self.most + 1)]
        self._small = small
        self._hidden = {int(token): whole.tokens[token] for token in np.flatnonzero(lengths)}
        self._quotes = frozenset(token for token, text in enumerate(whole.tokens) if b'"' in text)
        self._spelt: dict[int, list[int]] = {}
        bits = np.zeros((self.most + 1, 32 * self._mask_words), np.uint8)
        for count in range(1, self.most + 1):
            bits[count, : len(lengths)] = (lengths > 0) & (lengths <= count)
        self._up_to: Int32s = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        self.vocabulary = LLTokenizer(cast(Any, small), eos_token=list(tokenizer.eos_ids) or None, slices=[])
        self.words = -(-len(small.tokens) // 32)

    def may_begin(self, tokens: Sequence[int]) -> bool:
        """Whether a text may begin in `tokens`."""
        return not self._quotes.isdisjoint(tokens)

    def spelt(self, tokens: Sequence[int]) -> list[int]:
        """The same text in tokens of the small vocabulary."""
        ids: list[int] = []
        for token in tokens:
            text = self._hidden.get(token)
            if text is None:
                ids.append(token)
                continue
            spelling = self._spelt.get(token)
            if spelling is None:
                spelling = self._spelt[token] = self._small.greedy(text)
            ids += spelling
        return ids

    def whole(self, masks: Int32s) -> tuple[Int64s, Int32s]:
        """Masks int32 [n, words] of the small vocabulary -> those within a text int64 [k], theirs int32 [k, W]."""
        told = masks[:, self._mask_words :]
        counts = np.unpackbits(told.view(np.uint8), axis=1).sum(axis=1, dtype=np.int64)
        within = counts.nonzero()[0]
        return within, masks[within, : self._mask_words] | self._up_to[counts[within]]


def _lengths(tokens: Sequence[bytes]) -> Int64s:
    """Characters of each token that has more than one, all of them plain and such that stand alone as a token too; else
    0."""
    texts = []
    for token in tokens:
        try:
            text = token.decode()
        except UnicodeDecodeError:
            text = ""
        texts.append(text if _PLAIN.fullmatch(text) else "")
    alone = {text for text in texts if len(text) == 1}
    lengths = np.zeros(len(tokens), np.int64)
    for number, text in enumerate(texts):
        if 1 < len(text) <= _LONGEST and alone.issuperset(text):
            lengths[number] = len(text)
    return lengths
