"""A conversation as data: what was said, how answers are sampled, what it took so far.

Owns: the messages, sampling settings by name, totals, the form in which a conversation is saved.
Does not know: terminals, engines.
Invariants: messages are an optional system message, then questions and answers in turn; a saved conversation is JSON
that `from_json` either takes whole or refuses with an InvalidRequest.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from aengine.cli.session import Answer, Messages
from aengine.errors import InvalidRequest
from aengine.types import SamplingParams

KINDS: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": int,
    "max_tokens": int,
    "stop": str,
}


@dataclass
class Totals:
    """Sums over the answers of one run of the program."""

    answers: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: float = 0.0
    writing_s: float = 0.0

    def add(self, answer: Answer, took_s: float) -> None:
        ttft_s = took_s if answer.ttft_s is None else answer.ttft_s
        self.answers += 1
        self.tokens += answer.tokens
        self.prompt_tokens += answer.prompt_tokens
        self.cached_tokens += answer.cached_tokens
        self.ttft_s += ttft_s
        self.writing_s += max(took_s - ttft_s, 0.0)

    def line(self) -> str:
        if not self.answers:
            return "no answers yet"
        rate = max(self.tokens - self.answers, 0) / self.writing_s if self.writing_s > 0 else 0.0
        return (
            f"{self.answers} answers · {self.prompt_tokens} prompt tokens ({self.cached_tokens} cached) · "
            f"{self.tokens} tokens · first token {self.ttft_s / self.answers:.2f} s on average · {rate:.1f} tokens/s"
        )


@dataclass
class Dialogue:
    """Changed by the chat command alone. `sampling`: only what differs from SamplingParams' defaults need be there."""

    sampling: dict[str, Any]
    messages: Messages = field(default_factory=list)

    @property
    def system(self) -> str | None:
        first = self.messages[0] if self.messages else None
        return str(first["content"]) if first is not None and first["role"] == "system" else None

    def begin(self, system: str | None) -> None:
        self.messages = [{"role": "system", "content": system}] if system else []

    def params(self) -> SamplingParams:
        return SamplingParams(**{"max_tokens": None, **self.sampling})

    def set(self, name: str, text: str) -> None:
        """Sets one setting from text, or takes it back where the text is empty; raises InvalidRequest."""
        if name not in KINDS:
            raise InvalidRequest(f"there is no setting {name!r}; there are {', '.join(KINDS)}", param=name)
        changed = {key: value for key, value in self.sampling.items() if key != name}
        if text:
            try:
                changed[name] = KINDS[name](text.encode().decode("unicode_escape") if name == "stop" else text)
            except ValueError:
                raise InvalidRequest(f"{name}: {text!r} is not a number", param=name) from None
        Dialogue(changed).params()  # checks the ranges
        self.sampling = changed

    def take_back(self) -> str | None:
        """Removes the last question and what followed it; the question, or None where there was none."""
        for i in reversed(range(len(self.messages))):
            if self.messages[i]["role"] == "user":
                question = str(self.messages[i]["content"])
                del self.messages[i:]
                return question
        return None

    def to_json(self) -> str:
        saved = {"format": "aengine-chat", "sampling": self.sampling, "messages": self.messages}
        return json.dumps(saved, ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Dialogue:
        try:
            saved = json.loads(text)
            messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in saved["messages"]]
            sampling = {name: value for name, value in saved["sampling"].items() if name in KINDS}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InvalidRequest("the file is not a saved conversation", param="file") from None
        loaded = cls(sampling, messages)
        loaded.params()
        return loaded
