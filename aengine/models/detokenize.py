"""Tokens back to text, one at a time.

Owns: the bytes of each token and incremental decoding.
Does not know: stop strings, requests, chat.
Invariants: a stream emits only whole characters, and its pieces joined (with `flush`) are what decoding all ids at once
gives, except that bytes which are not UTF-8 may be replaced in other places. State per stream is a few tokens.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

SPACE = "\u2581"
MAX_HELD_TOKENS = 8  # a character has at most 4 bytes, so 4 tokens; more is not UTF-8
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(rest)}


class TokenBytes:
    """id -> the bytes it stands for. Filled as ids are asked for; a vocabulary of 262,144 at once takes 0.3 s."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._known: dict[int, bytes] = {}
        self.byte_level = isinstance(backend.decoder, ByteLevel)
        self._alphabet = byte_alphabet()
        decoder = "" if backend.decoder is None else backend.decoder.__getstate__().decode()
        self._fallback, self._spaces = "ByteFallback" in decoder, "Metaspace" in decoder or SPACE in decoder

    def __call__(self, token: int) -> bytes:
        """b"" for an id the tokenizer does not have."""
        value = self._known.get(token)
        if value is None:
            value = self._known[token] = self._bytes(self._backend.id_to_token(token) or "")
        return value

    def _bytes(self, text: str) -> bytes:
        if self.byte_level:
            try:
                return bytes([self._alphabet[char] for char in text])
            except KeyError:  # an added token, written as plain text
                return text.encode()
        match = _BYTE.fullmatch(text) if self._fallback else None
        if match:
            return bytes([int(match[1], 16)])
        return (text.replace(SPACE, " ") if self._spaces else text).encode()


class TextStream(Protocol):
    """Incremental decoding of one output."""

    def step(self, token: int) -> str | None:
        """Text that became whole with this token; None when there is none."""
        ...

    def flush(self) -> str:
        """What is held back at the end: replacement characters for an unfinished character, mostly ""."""
        ...


class ByteStream:
    """For byte-level vocabularies: bytes straight into a UTF-8 decoder (0.3 µs a token)."""

    def __init__(self, token_bytes: Callable[[int], bytes], skipped: frozenset[int]) -> None:
        self._bytes, self._skipped = token_bytes, skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token: int) -> str | None:
        if token in self._skipped:
            return None
        return self._decoder.decode(self._bytes(token)) or None

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class DecoderStream:
    """For every other decoder: decode a few tokens with and without the new ones, and give out the difference.

    `_context` tokens are already given out as `_shown`; decoding them again tells the decoder whether a word goes on.
    """

    def __init__(self, backend: Tokenizer, skipped: frozenset[int]) -> None:
        self._backend, self._skipped = backend, skipped
        self._context: list[int] = []
        self._shown = ""
        self._held: list[int] = []

    def step(self, token: int) -> str | None:
        if token in self._skipped:
            return None
        self._held.append(token)
        text = self._decode(self._context + self._held)
        unfinished = text.endswith("\ufffd") or text == self._shown
        if unfinished and len(self._held) < MAX_HELD_TOKENS:
            return None
        return self._give_out(text)

    def flush(self) -> str:
        return (self._give_out(self._decode(self._context + self._held)) or "") if self._held else ""

    def _give_out(self, text: str) -> str | None:
        # Bytes that do not go on a character can turn the whole run into replacements, also the part given out.
        fits = text.startswith(self._shown)
        new = text[len(self._shown) :] if fits else self._decode(self._held)
        self._context, self._held = self._held, []
        self._shown = self._decode(self._context)
        return new or None

    def _decode(self, tokens: list[int]) -> str:
        return str(self._backend.decode(tokens, skip_special_tokens=False))
