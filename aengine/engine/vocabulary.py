"""A model's vocabulary as grammars see it.

Owns: the translation of a tokenizer into llguidance's.
Does not know: grammars, requests.
Invariants: special tokens are no text: a grammar can name them, but no text of a grammar is spelt with them. A text is
split into tokens as the model's tokenizer does, or, where that adds to the text, into the longest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from llguidance import LLTokenizer

if TYPE_CHECKING:
    from aengine.models.tokenizer import Tokenizer

_SPECIAL = b"\xff"  # no UTF-8 text holds this byte
_SPLIT = 4096  # texts whose tokens are kept
_SPLIT_CHARS = 256  # longer ones are not: a forced text is mostly a key or a few signs
# A mask is put together from sets made beforehand: one that a state allows as a whole is not looked at token by token.
# The longer ones are the library's own; the shorter ones save half the work in texts that near their greatest length.
TEXT = r'[^"\\\x00-\x1F\x7F]'
_SETS = (r"[\x20\x0A\x0D\x09]+", *(f"{TEXT}{{1,{most}}}" for most in (2, 4, 6, 8, 10, 15, 30)), f"{TEXT}+")


class Vocabulary:
    """What LLTokenizer asks of a tokenizer."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_ids[0] if tokenizer.eos_ids else None
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._kept = lru_cache(_SPLIT)(self._tokens)
        plain = [tokenizer.token_bytes(token) for token in range(size)]
        self._ids = {text: token for token, text in reversed(list(enumerate(plain))) if text}
        self._longest = max(map(len, self._ids), default=1)
        self.tokens = plain
        for token in self.special_token_ids:
            self._ids.pop(plain[token], None)
            self.tokens[token] = _SPECIAL + plain[token]

    def keep(self, ids: Sequence[int]) -> None:
        """Of all tokens only these; texts are split into the longest of them."""
        kept = set(ids)
        self._ids = {text: token for text, token in self._ids.items() if token in kept}
        self.tokens = [text if token in kept else b"" for token, text in enumerate(self.tokens)]

    def __call__(self, text: str | bytes) -> Sequence[int]:
        """Called again and again with the same texts: those that a grammar forces."""
        if isinstance(text, bytes):
            text = text.decode()
        return self._kept(text) if len(text) <= _SPLIT_CHARS else self._tokens(text)

    def _tokens(self, text: str) -> Sequence[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        said = b"".join(self.tokens[token] for token in ids)
        return ids if said == text.encode() else self.greedy(text.encode())

    def greedy(self, text: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            for end in range(min(len(text), at + self._longest), at, -1):
                token = self._ids.get(text[at:end])
                if token is not None:
                    ids.append(token)
                    at = end
                    break
            else:
                break  # a byte without a token: nothing behind it can be forced either
        return ids


def read_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    """Blocks the interpreter: 0.4 s for 49,152 tokens, most of it inside one foreign call."""
    vocabulary = Vocabulary(tokenizer, max(vocab_size, tokenizer.vocab_size))
    return LLTokenizer(cast(Any, vocabulary), eos_token=list(tokenizer.eos_ids) or None, slices=list(_SETS))
