"""How the answers to one chat request are read, and what holds the model to their form.

Owns: `AnswerForm`, made from a body, the chat template and the settings; the parser of each choice; the grammar.
Does not know: HTTP, wire formats, the formats of calls.
Invariants: a form is decided before anything is submitted, so that every fault is a 4xx; without tools and thoughts
there is no parser, and text passes as it is.

With thoughts and a grammar (of `response_format` and its like, or of tools), the grammar holds behind the mark that
ends the thoughts. A forced call takes the place of an answer, so that it alone is enforced; where calls are left to
the model and its answer has a grammar, it writes either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec.structs import replace

from aengine.config import ServerConfig
from aengine.server.parsers.cutter import Cutter
from aengine.server.parsers.enforce import enforced, tool_grammar
from aengine.server.parsers.mark_tokens import MarkText, mark_tokens
from aengine.server.parsers.regions import RegionParser, RegionStream
from aengine.server.parsers.thinking import ThinkMarks, ThoughtCount, find_marks, prompt_opens
from aengine.server.pieces import AnswerParser, CallArguments, CallStart, Piece, Reasoning, Text
from aengine.server.tools import ToolFields, ToolUse, tool_use
from aengine.types import FinishReason, SamplingParams


class AnswerFields(ToolFields, Protocol):
    """The fields of a body that say what an answer consists of."""

    @property
    def parallel_tool_calls(self) -> bool | None: ...
    @property
    def include_reasoning(self) -> bool | None: ...


class TextFacts(MarkText, Protocol):
    """What is asked of the model's tokenizer."""

    @property
    def chat_template(self) -> str | None: ...
    @property
    def has_response_template(self) -> bool: ...
    def response_stream(self, prompt: str, tools: list[dict[str, Any]] | None) -> RegionStream | None: ...


@dataclass(frozen=True, slots=True)
class AnswerForm:
    use: ToolUse
    think: ThinkMarks | None
    parallel: bool = True
    show_reasoning: bool = True
    tools: list[dict[str, Any]] | None = None  # as the client wrote them
    regions: bool = False  # the checkpoint's response template cuts the answer

    async def sampling(self, sampling: SamplingParams, prompt_ids: Sequence[int], text: TextFacts) -> SamplingParams:
        """`sampling` with the grammar of this form. Special tokens are not skipped where marks are such."""
        if self._plain:
            return sampling
        marks = await mark_tokens(self._marks(), text)
        if self.regions or any(mark.special for mark in marks.values()):
            sampling = replace(sampling, skip_special_tokens=False)
        if not self.use.forced and sampling.grammar is None:
            return sampling
        ids = {text: mark.id for text, mark in marks.items() if mark.id is not None}
        calls = None
        if self.use.format is not None:
            calls = tool_grammar(self.use.format, self.use.offered, parallel=self._several, token_ids=ids)
        grammar = enforced(
            calls=calls,
            answer=None if self.use.forced else sampling.grammar,
            think=self.think,
            opened=prompt_opens(self.think, prompt_ids, text),
            token_ids=ids,
        )
        return replace(sampling, grammar=grammar)

    @property
    def _several(self) -> bool:
        return self.parallel and not self.use.one

    def _marks(self) -> tuple[str, ...]:
        format, think = self.use.format, self.think
        calls = () if format is None else (*format.marks, *format.tokens)
        return calls if think is None else (*calls, think.open, think.close)

    @property
    def _plain(self) -> bool:
        return self.use.format is None and self.think is None and not self.regions

    async def parsers(self, choices: int, prompt_ids: Sequence[int], text: TextFacts) -> list[AnswerParser] | None:
        """One per choice; None: the text is the answer."""
        if self._plain:
            return None
        opened = prompt_opens(self.think, prompt_ids, text)
        prompt = await text.decode(prompt_ids) if self.regions else ""
        made = [
            self._parser(opened, text.response_stream(prompt, self.tools) if self.regions else None)
            for _ in range(choices)
        ]
        return made if self.show_reasoning else [WithoutReasoning(parser) for parser in made]

    def _parser(self, opened: bool, regions: RegionStream | None) -> AnswerParser:
        if regions is not None:
            return RegionParser(regions, calls=bool(self.use.offered), parallel=self._several)
        return Cutter(
            think=self.think,
            opened=opened,
            format=self.use.format,
            tools={tool.name: tool.parameters for tool in self.use.offered},
            parallel=self._several,
            enforced=self.use.forced,
        )

    def thoughts(self, choices: int, prompt_ids: Sequence[int], text: TextFacts) -> list[ThoughtCount] | None:
        """Counts of the choices' reasoning tokens; None: the model does not think."""
        if self.think is None:
            return None
        opened = prompt_opens(self.think, prompt_ids, text)
        return [ThoughtCount(self.think, opened, text) for _ in range(choices)]


def answer_form(body: AnswerFields, text: TextFacts, config: ServerConfig) -> AnswerForm:
    """Raises InvalidRequest for tools or a tool_choice that are malformed."""
    template = body.chat_template or text.chat_template
    use = tool_use(body, text.chat_template, config.tool_parser)
    automatic = (config.tool_parser, config.reasoning_parser) == ("auto", "auto") and body.chat_template is None
    return AnswerForm(
        use=use,
        think=find_marks(config.reasoning_parser, template),
        parallel=body.parallel_tool_calls is not False,
        show_reasoning=body.include_reasoning is not False,
        tools=body.tools,
        regions=automatic and text.has_response_template and not use.forced,
    )


class PlainParser:
    """All of it is text for the user."""

    broken = False

    def feed(self, text: str) -> Sequence[Piece]:
        return (Text(text),) if text else ()

    def finish(self) -> Sequence[Piece]:
        return ()


class WithoutReasoning:
    """Leaves out what another parser found to be reasoning."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser

    def feed(self, text: str) -> Sequence[Piece]:
        return [piece for piece in self._parser.feed(text) if not isinstance(piece, Reasoning)]

    def finish(self) -> Sequence[Piece]:
        return [piece for piece in self._parser.finish() if not isinstance(piece, Reasoning)]

    @property
    def broken(self) -> bool:
        return self._parser.broken


def finish_reason(reason: str, parser: AnswerParser, *, called: bool) -> str:
    """A choice that ended by itself after a call ended for the call; not when a stop string cut that call short."""
    return "tool_calls" if called and reason == FinishReason.STOP.value and not parser.broken else reason


def message_fields(pieces: Iterable[Piece]) -> dict[str, Any]:
    """The fields of a whole assistant message: content, refusal, and where there are any reasoning and tool_calls."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            calls.append({"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}})
        elif isinstance(piece, Reasoning):
            thoughts.append(piece.text)
        elif isinstance(piece, CallArguments):
            calls[piece.index]["function"]["arguments"] += piece.text
        else:
            texts.append(piece.text)
    fields: dict[str, Any] = {"content": "".join(texts) if texts or not calls else None, "refusal": None}
    if thoughts:
        fields["reasoning"] = fields["reasoning_content"] = "".join(thoughts)
    if calls:
        fields["tool_calls"] = calls
    return fields
