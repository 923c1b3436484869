"""Messages under construction, for the endpoints whose input is not a list of chat messages.

Owns: which reasoning, text and calls of an assistant make up one message, the names of answered calls, and where in
the body each message came from.
Does not know: any wire format, templates.
Invariants: messages keep the order of the input; `places[i]` is the path of what began message i.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aengine.errors import InvalidRequest
from aengine.server.schemas import ChatBody, ContentPart, FunctionCall, Message, ToolCall

Content = str | list[ContentPart] | None

_PLACE = re.compile(r"messages\[(\d+)\]")
_SCHEMA = re.compile(r"tools\[(\d+)\]\.function\.parameters")


@dataclass(slots=True)
class _Draft:
    role: str
    content: Content = None
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    call_id: str | None = None
    name: str | None = None

    def message(self) -> Message:
        return Message(
            role=self.role,
            content=self.content,
            name=self.name,
            tool_calls=self.calls or None,
            tool_call_id=self.call_id,
            reasoning_content="\n".join(self.thoughts) or None,
        )


class Drafts:
    """Collects a conversation piece by piece."""

    def __init__(self) -> None:
        self.places: list[str] = []
        self._drafts: list[_Draft] = []
        self._names: dict[str, str] = {}

    def messages(self) -> list[Message]:
        return [draft.message() for draft in self._drafts]

    def say(self, place: str, role: str, content: Content) -> None:
        """A message; text of the assistant joins the reasoning before it."""
        draft = self._answer(place) if role == "assistant" else self._new(place, role)
        if draft.content is not None or draft.calls:
            draft = self._new(place, role)
        draft.content = content

    def think(self, place: str, text: str) -> None:
        draft = self._answer(place)
        if draft.content is not None or draft.calls:
            draft = self._new(place, "assistant")
        draft.thoughts.append(text)

    def call(self, place: str, id: str | None, name: str, arguments: str) -> None:
        self._answer(place).calls.append(
            ToolCall(function=FunctionCall(name=name, arguments=arguments), id=id, type="function")
        )
        if id is not None:
            self._names[id] = name

    def result(self, place: str, id: str | None, content: Content) -> None:
        draft = self._new(place, "tool")
        draft.content, draft.call_id = content, id
        draft.name = None if id is None else self._names.get(id)

    def _answer(self, place: str) -> _Draft:
        if self._drafts and self._drafts[-1].role == "assistant":
            return self._drafts[-1]
        return self._new(place, "assistant")

    def _new(self, place: str, role: str) -> _Draft:
        self._drafts.append(_Draft(role))
        self.places.append(place)
        return self._drafts[-1]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """`places`: where in the body sent each message comes from; `schemas`: where each tool's schema stands; `ignored`:
    what was left out, for the header."""

    body: ChatBody
    places: list[str]
    schemas: Sequence[str] = ()
    ignored: tuple[str, ...] = ()


def as_sent(error: InvalidRequest, chat: ChatRequest, names: Mapping[str, str]) -> InvalidRequest:
    """The same error in the client's words: messages[i] and the schemas of tools[i] by their places, other fields by
    `names` (ours to theirs)."""
    if error.param is None:
        return error
    ours = error.param
    for pattern, places in ((_PLACE, chat.places), (_SCHEMA, chat.schemas)):
        found = pattern.match(ours)
        if found is not None and int(found[1]) < len(places):
            head, theirs = found[0], places[int(found[1])]
            break
    else:
        head = next((name for name in names if re.match(rf"{re.escape(name)}(?![\w])", ours)), "")
        theirs = names.get(head, "")
    if head:
        error.param = theirs + ours[len(head) :]
        error.message = error.message.replace(head, theirs, 1)
    return error
