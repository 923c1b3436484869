"""A model's vocabulary as grammars see it.

Owns: the translation of a tokenizer into llguidance's.
Does not know: grammars, requests.
Invariants: special tokens are no text: a grammar can name them, but no text of a grammar is spelt with them. A text is
split into tokens as the model's tokenizer does, or, where that adds to the text, into the longest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from llguidance import LLTokenizer

if TYPE_CHECKING:
    from aengine.models.tokenizer import Tokenizer

_SPECIAL = b"\xff"  # no UTF-8 text holds this byte


class _Vocabulary:
    """What LLTokenizer asks of a tokenizer."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_ids[0] if tokenizer.eos_ids else None
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = sorted(tokenizer.special_ids)
        plain = [tokenizer.token_bytes(token) for token in range(size)]
        self._ids = {text: token for token, text in reversed(list(enumerate(plain))) if text}
        self._longest = max(map(len, self._ids), default=1)
        self.tokens = plain
        for token in self.special_token_ids:
            self._ids.pop(plain[token], None)
            self.tokens[token] = _SPECIAL + plain[token]

    def __call__(self, text: str | bytes) -> Sequence[int]:
        if isinstance(text, bytes):
            text = text.decode()
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        said = b"".join(self.tokens[token] for token in ids)
        return ids if said == text.encode() else self._greedy(text.encode())

    def _greedy(self, text: bytes) -> list[int]:
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
    vocabulary = _Vocabulary(tokenizer, max(vocab_size, tokenizer.vocab_size))
    return LLTokenizer(cast(Any, vocabulary), eos_token=list(tokenizer.eos_ids) or None)
