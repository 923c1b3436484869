"""A conversation as data: what was said, how answers are sampled, what it took so far.

Owns: the messages, sampling settings by name, totals, the form in which a conversation is saved.
Does not know: terminals, engines.
Invariants: messages are an optional system message, then questions and answers in turn, and begin again or grow by both
at once; a saved conversation is JSON that `from_json` either takes whole or refuses with an InvalidRequest.
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

    def instruct(self, system: str) -> None:
        """Another system message, "": none, for what was said so far."""
        said = self.messages if self.system is None else self.messages[1:]
        self.begin(system)
        self.messages += said

    def params(self) -> SamplingParams:
        return SamplingParams(**{"max_tokens": None, **self.sampling})

    def set(self, name: str, text: str) -> None:
        """Sets one setting from text, or takes it back where the text is empty; raises InvalidRequest."""
        if name not in KINDS:
            raise InvalidRequest(f"there is no setting {name!r}; there are {', '.join(KINDS)}", param=name)
        changed = {key: value for key, value in self.sampling.items() if key != name}
        if text:
            changed[name] = _value(name, text)
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
    def from_json(cls, data: bytes) -> Dialogue:
        """Raises InvalidRequest, which says what is wrong with it."""
        try:
            saved = json.loads(data)
            messages, sampling = saved["messages"], dict(saved["sampling"])
        except RecursionError:
            raise InvalidRequest("it is nested too deeply") from None
        except ValueError as error:  # not JSON, or not UTF-8
            raise InvalidRequest(str(error)) from None
        except (KeyError, TypeError):
            raise InvalidRequest("it has no messages and sampling") from None
        loaded = cls({name: _checked(name, value) for name, value in sampling.items() if name in KINDS})
        loaded.messages = [_message(i, message) for i, message in enumerate(_list(messages))]
        _in_turn([message["role"] for message in loaded.messages])
        loaded.params()
        return loaded


def _value(name: str, text: str) -> float | str:
    """What a person typed, as a setting's value."""
    kind = KINDS[name]
    try:
        if kind is str:  # \n and the like; what is not Latin-1 becomes an escape first, and comes back as it was
            unescaped = text.encode("latin-1", "backslashreplace").decode("unicode_escape")
            unescaped.encode()
            return unescaped
        return int(text) if kind is int else float(text)
    except ValueError:
        expected = {str: "a text with escapes such as \\n", int: "a whole number", float: "a number"}[kind]
        raise InvalidRequest(f"{name}: {text[:80]!r} is not {expected}", param=name) from None


def _checked(name: str, value: object) -> object:
    kinds = {float: (int, float), int: (int,), str: (str,)}[KINDS[name]]
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise InvalidRequest(f"{name} is {str(value)[:80]!r}")
    return value


def _list(messages: object) -> list[Any]:
    if not isinstance(messages, list):
        raise InvalidRequest("its messages are no list")
    return messages


def _message(i: int, message: object) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, dict) else None
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(role, str) or not isinstance(content, str):
        raise InvalidRequest(f"message {i} has no role and text")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"message {i} has half a character at {error.start}") from None
    return {"role": role, "content": content}


def _in_turn(roles: list[str]) -> None:
    """Raises InvalidRequest where they are not a system message, if any, then questions and answers."""
    start = 1 if roles[:1] == ["system"] else 0
    for i, role in enumerate(roles[start:]):
        expected = ("user", "assistant")[i % 2]
        if role != expected:
            raise InvalidRequest(f"message {start + i} is of {role[:40]!r}, not of {expected!r}")
    if (len(roles) - start) % 2:
        raise InvalidRequest(f"message {len(roles) - 1}, a question, has no answer")
