"""Log-probabilities in OpenAI's three forms.

Owns: the chat form, the completions form, vLLM's prompt_logprobs.
Does not know: endpoints, streams.
Invariants: every number is finite (JSON has no infinity); one entry per token, also for tokens that show no text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aengine.types import TokenLogprob

LEAST = -9999.0  # stands for minus infinity: a masked token


class TokenTexts(Protocol):
    def token_text(self, id: int) -> str: ...
    def token_bytes(self, id: int) -> bytes: ...


def chat_logprobs(entries: Iterable[TokenLogprob], text: TokenTexts) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer or chunk."""
    return {"content": [_chat_entry(entry, text) for entry in entries], "refusal": None}


def _chat_entry(entry: TokenLogprob, text: TokenTexts) -> dict[str, Any]:
    top = [_chat_token(token, value, text) for token, value in entry.top]
    own = _chat_token(entry.token_id, entry.logprob, text)
    return {**own, "rank": entry.rank, "top_logprobs": top}


def _chat_token(token: int, value: float, text: TokenTexts) -> dict[str, Any]:
    return {"token": text.token_text(token), "logprob": _finite(value), "bytes": list(text.token_bytes(token))}


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Names tokens by id ("token_id:7"), for clients that asked so: texts of two tokens may be the same."""

    def token_text(self, id: int) -> str:
        return f"token_id:{id}"

    def token_bytes(self, id: int) -> bytes:
        return b""


def prompt_logprobs(entries: Sequence[TokenLogprob | None] | None, text: TokenTexts) -> list[dict[str, Any] | None]:
    """vLLM's extra: per prompt token a dict from token id to {logprob, rank, decoded_token}; the first is null."""
    return [None if entry is None else _prompt_entry(entry, text) for entry in entries or ()]


def _prompt_entry(entry: TokenLogprob, text: TokenTexts) -> dict[str, Any]:
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += [(token, value, place) for place, (token, value) in enumerate(entry.top, start=1)]
    return {
        str(token): {"logprob": _finite(value), "rank": rank, "decoded_token": text.token_text(token)}
        for token, value, rank in reversed(ranked)  # the chosen token last, so that its exact rank stays
    }


@dataclass(slots=True)
class CompletionLogprobs:
    """The completions form, built piece by piece. `offset` is where the next token's text begins.

    `names`: what tokens are called; None: by their text. With names of their own come two columns of ours: `ranks`, and
    `top_counts`, how many of a token's `top_logprobs` were asked for (the chosen token may follow them).
    """

    text: TokenTexts
    names: TokenTexts | None = None
    offset: int = 0

    def form(self, ids: Sequence[int], entries: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """`ids` and `entries` are parallel; an entry is None only for the first token of a prompt."""
        offsets = []
        for token in ids:
            offsets.append(self.offset)
            self.offset += len(self.text.token_text(token))
        form: dict[str, Any] = {
            "tokens": [label(token, self.names or self.text) for token in ids],
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }
        if self.names is not None:
            form["ranks"] = [None if entry is None else entry.rank for entry in entries]
            form["top_counts"] = [None if entry is None else len(entry.top) for entry in entries]
        return form

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The best tokens and the chosen one, which may not be among them. Two tokens of one text: the better stays."""
        out: dict[str, float] = {}
        for token, value in (*entry.top, (entry.token_id, entry.logprob)):
            name = label(token, self.names or self.text)
            out[name] = max(_finite(value), out.get(name, LEAST))
        return out


def label(token: int, text: TokenTexts) -> str:
    """A token's text; where it is only part of a character, its bytes, so that two such tokens stay distinct keys."""
    raw = text.token_bytes(token)
    try:
        return raw.decode() if raw else text.token_text(token)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(value: float) -> float:
    return value if value > LEAST else LEAST
