"""Tokens back to text, one at a time.

Owns: the bytes of each token and incremental decoding.
Does not know: stop strings, requests, chat.
Invariants: a stream emits only whole characters, and its pieces joined (with `flush`) are what decoding all ids at once
gives, except that bytes which are not UTF-8 may be replaced in other places. State per stream is a few tokens. A token
whose text cannot depend on its neighbours costs one look-up in a table that all streams share.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

SPACE = "\u2581"
MAX_HELD_TOKENS = 8  # a character has at most 4 bytes, so 4 tokens; more is not UTF-8
NO_TEXTS: Mapping[int, str] = {}
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
        self._whole: tuple[dict[int, str], dict[int, str]] = {}, {}
        self.byte_level = isinstance(backend.decoder, ByteLevel)
        alphabet = byte_alphabet()
        self._to_bytes = codecs.charmap_build("".join(sorted(alphabet, key=alphabet.__getitem__)))
        decoder = "" if backend.decoder is None else backend.decoder.__getstate__().decode()
        self._fallback, self._spaces = "ByteFallback" in decoder, "Metaspace" in decoder or SPACE in decoder
        self._separate = bool(decoder) and _separate(json.loads(decoder))

    def __call__(self, token: int) -> bytes:
        """b"" for an id the tokenizer does not have."""
        value = self._known.get(token)
        if value is None:
            value = self._known[token] = self._bytes(self._backend.id_to_token(token) or "")
        return value

    def whole(self, skipped: frozenset[int]) -> dict[int, str]:
        """Text of ids that have the same between whole characters, for all streams that skip the same; they fill it.
        A tokenizer has one set of special ids, which a stream skips or not."""
        return self._whole[bool(skipped)]

    def separate(self, token: int) -> bool:
        """Whether its text is the same behind any other text. Single bytes in a row make characters together."""
        return self._separate and not (self._fallback and _BYTE.fullmatch(self._backend.id_to_token(token) or ""))

    def _bytes(self, text: str) -> bytes:
        if self.byte_level:
            try:
                return codecs.charmap_encode(text, "strict", self._to_bytes)[0]
            except UnicodeEncodeError:  # an added token, written as plain text
                return text.encode()
        match = _BYTE.fullmatch(text) if self._fallback else None
        if match:
            return bytes([int(match[1], 16)])
        return (text.replace(SPACE, " ") if self._spaces else text).encode()


def _separate(step: Mapping[str, Any]) -> bool:
    """Whether a decoder, given as its JSON, treats all tokens but the first and single bytes one by one."""
    match step["type"]:
        case "Sequence":
            return all(map(_separate, step["decoders"]))
        case "Replace":
            return len(str(step["pattern"].get("String", ""))) == 1
        case "Strip":
            return int(step["start"]) <= 1 and int(step["stop"]) == 0
    return step["type"] in ("ByteFallback", "Fuse", "Metaspace")


class TextStream(Protocol):
    """Incremental decoding of one output."""

    @property
    def table(self) -> Mapping[int, str]:
        """Tokens that need no `step` as long as none is made: their text, whichever and however many of them come."""
        ...

    def step(self, token: int) -> str | None:
        """Text that became whole with this token; None when there is none."""
        ...

    def flush(self) -> str:
        """What is held back at the end: replacement characters for an unfinished character, mostly ""."""
        ...


class ByteStream:
    """For byte-level vocabularies: a token of whole characters is its text (0.1 µs), others go into a UTF-8 decoder."""

    __slots__ = ("_between", "_bytes", "_decoder", "_skipped", "_whole")

    def __init__(self, token_bytes: TokenBytes, skipped: frozenset[int]) -> None:
        self._bytes, self._skipped = token_bytes, skipped
        self._whole = token_bytes.whole(skipped)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._between = True  # no character is unfinished

    @property
    def table(self) -> Mapping[int, str]:
        return self._whole if self._between else NO_TEXTS

    def step(self, token: int) -> str | None:
        if self._between:
            text = self._whole.get(token)
            if text is not None:
                return text
        return self._step(token)

    def _step(self, token: int) -> str | None:
        if token in self._skipped:
            return None
        value = self._bytes(token)
        if self._between and (text := _as_text(value)):
            self._whole[token] = text
            return text
        text = self._decoder.decode(value)
        self._between = not self._decoder.getstate()[0]
        return text or None

    def flush(self) -> str:
        self._between = True
        return self._decoder.decode(b"", final=True)


def _as_text(value: bytes) -> str:
    """The text of bytes that are whole characters, else ""."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return ""


class DecoderStream:
    """For every other decoder: decode a few tokens with and without the new ones, and give out the difference.

    `_context` tokens are already given out as `_shown`; decoding them again tells the decoder whether a word goes on.
    Where the decoder treats tokens one by one (`TokenBytes.separate`), that is needed only at the beginning, where it
    may strip a space, and for tokens that are single bytes.
    """

    def __init__(self, backend: Tokenizer, skipped: frozenset[int], token_bytes: TokenBytes) -> None:
        self._backend, self._skipped, self._token_bytes = backend, skipped, token_bytes
        self._whole = token_bytes.whole(skipped)
        self._context: list[int] = []
        self._shown: str | None = ""  # None: not decoded yet
        self._held: list[int] = []
        self._between = False  # something is given out, and nothing held: separate tokens are their own text

    @property
    def table(self) -> Mapping[int, str]:
        """None: what was given out last is the context of what comes next."""
        return NO_TEXTS

    def step(self, token: int) -> str | None:
        if self._between:
            text = self._whole.get(token)
            if text is not None:
                self._context, self._shown = [token], None
                return text
        return self._step(token)

    def _step(self, token: int) -> str | None:
        if token in self._skipped:
            return None
        alone, self._between = self._between, False
        self._held.append(token)
        text, shown = self._decode(self._context + self._held), self._context_text()
        unfinished = text.endswith("\ufffd") or text == shown
        if unfinished and len(self._held) < MAX_HELD_TOKENS:
            return None
        new = self._give_out(text)
        if new and alone and text.startswith(shown) and self._token_bytes.separate(token):
            self._whole[token] = new
        return new

    def flush(self) -> str:
        return (self._give_out(self._decode(self._context + self._held)) or "") if self._held else ""

    def _give_out(self, text: str) -> str | None:
        # Bytes that do not go on a character can turn the whole run into replacements, also the part given out.
        shown = self._context_text()
        new = text[len(shown) :] if text.startswith(shown) else self._decode(self._held)
        self._context, self._held, self._shown = self._held, [], None
        self._between = True
        return new or None

    def _context_text(self) -> str:
        if self._shown is None:
            self._shown = self._decode(self._context)
        return self._shown

    def _decode(self, tokens: list[int]) -> str:
        return str(self._backend.decode(tokens, skip_special_tokens=False))
