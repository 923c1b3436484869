"""Parsers: a model's text, cut into text, reasoning and tool calls while it streams.

Owns: the formats models write calls and reasoning in, and how each is read and enforced.
Does not know: HTTP, the engine, how pieces are shown.
Invariants: nothing a model writes makes a parser raise; what is no call is text, to the last character; how the text
was cut into feeds changes nothing but where the pieces are cut. Work is linear in the text.
"""

from __future__ import annotations

from aengine.server.parsers.cutter import Cutter
from aengine.server.parsers.formats import HERMES, LLAMA3_JSON, MISTRAL, QWEN, CallFormat, find_format
from aengine.server.parsers.thinking import ThinkMarks, find_marks, prompt_opens

__all__ = [
    "HERMES",
    "LLAMA3_JSON",
    "MISTRAL",
    "QWEN",
    "CallFormat",
    "Cutter",
    "ThinkMarks",
    "find_format",
    "find_marks",
    "prompt_opens",
]
