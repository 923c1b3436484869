"""How the answers to one chat request are read, and what holds the model to their form.

Owns: `AnswerForm`, made from a body, the chat template and the settings; the reader of each choice; the grammar.
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
from aengine.server.parsers.thinking import ThinkMarks, ThoughtCount, find_marks, prompt_opens
from aengine.server.pieces import AnswerParser, CallStart, Piece, Reasoning
from aengine.server.tools import ToolFields, ToolUse, tool_use
from aengine.types import FinishReason, OutputDelta, SamplingParams


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


@dataclass(frozen=True, slots=True)
class AnswerForm:
    use: ToolUse
    think: ThinkMarks | None
    parallel: bool = True
    show_reasoning: bool = True

    async def sampling(self, sampling: SamplingParams, prompt_ids: Sequence[int], text: TextFacts) -> SamplingParams:
        """`sampling` with the grammar of this form. Special tokens are not skipped where marks are such."""
        if self.use.format is None and self.think is None:
            return sampling
        marks = await mark_tokens(self._marks(), text)
        if any(mark.special for mark in marks.values()):
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

    def parser(self, opened: bool) -> AnswerParser | None:
        """A new parser for one choice. `opened`: the prompt ended inside the thoughts."""
        if self.use.format is None and self.think is None:
            return None
        return Cutter(
            think=self.think,
            opened=opened,
            format=self.use.format,
            tools={tool.name: tool.parameters for tool in self.use.offered},
            parallel=self._several,
            enforced=self.use.forced,
        )

    def readers(self, choices: int, prompt_ids: Sequence[int], text: TextFacts) -> list[ChoiceReader] | None:
        """One per choice; None: the text is the answer."""
        opened = prompt_opens(self.think, prompt_ids, text)
        made = [self.parser(opened) for _ in range(choices)]
        return [
            ChoiceReader(parser, self._count(opened, text), show_reasoning=self.show_reasoning)
            for parser in made
            if parser is not None
        ] or None

    def _count(self, opened: bool, text: TextFacts) -> ThoughtCount | None:
        return None if self.think is None else ThoughtCount(self.think, opened, text)


def answer_form(body: AnswerFields, text: TextFacts, config: ServerConfig) -> AnswerForm:
    """Raises InvalidRequest for tools or a tool_choice that are malformed."""
    template = body.chat_template or text.chat_template
    return AnswerForm(
        use=tool_use(body, text.chat_template, config.tool_parser),
        think=find_marks(config.reasoning_parser, template),
        parallel=body.parallel_tool_calls is not False,
        show_reasoning=body.include_reasoning is not False,
    )


def answer_parser(form: AnswerForm, prompt_ids: Sequence[int], text: TextFacts) -> AnswerParser | None:
    """The parser of one choice; None: the text is the answer. Every choice needs its own."""
    return form.parser(prompt_opens(form.think, prompt_ids, text))


class ChoiceReader:
    """Reads the deltas of one choice: its pieces, its thoughts' tokens, whether it called a tool."""

    def __init__(self, parser: AnswerParser, thoughts: ThoughtCount | None, *, show_reasoning: bool) -> None:
        self.called = False
        self._parser = parser
        self._thoughts = thoughts
        self._show_reasoning = show_reasoning

    @property
    def thought_tokens(self) -> int | None:
        """None: the model has no thoughts to count."""
        return None if self._thoughts is None else self._thoughts.tokens

    def read(self, delta: OutputDelta) -> list[Piece]:
        return self.read_text(delta.text, delta.token_ids, last=delta.finish_reason is not None)

    def read_text(self, text: str, token_ids: Sequence[int], *, last: bool) -> list[Piece]:
        pieces = list(self._parser.feed(text)) if text else []
        if self._thoughts is not None:
            self._thoughts.add(token_ids)
        if last:
            pieces += self._parser.finish()
            if self._thoughts is not None:
                self._thoughts.finish()
        self.called = self.called or any(isinstance(piece, CallStart) for piece in pieces)
        return pieces if self._show_reasoning else [piece for piece in pieces if not isinstance(piece, Reasoning)]

    def finish_reason(self, reason: str) -> str:
        """A choice that ended by itself after a call ended for the call."""
        return "tool_calls" if self.called and reason == FinishReason.STOP.value else reason


def thought_tokens(readers: Iterable[ChoiceReader]) -> int | None:
    """Of all choices; None: nothing to count."""
    counts = [count for reader in readers if (count := reader.thought_tokens) is not None]
    return sum(counts) if counts else None


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
        elif hasattr(piece, "index"):
            calls[piece.index]["function"]["arguments"] += piece.text
        else:
            texts.append(piece.text)
    fields: dict[str, Any] = {"content": "".join(texts) if texts or not calls else None, "refusal": None}
    if thoughts:
        fields["reasoning"] = fields["reasoning_content"] = "".join(thoughts)
    if calls:
        fields["tool_calls"] = calls
    return fields
