"""Response templates: a checkpoint's own description of how its answers are made up.

Owns: the reading of `response_template` in tokenizer_config.json, and streams of its regions.
Does not know: requests, wire formats.
Invariants: transformers, which reads them, is imported only where a checkpoint has one (2 to 3 s, while it loads). A
region that cannot be read is told with its text, and never raises.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Region:
    """Of a field of the answer: more of its `text`; or, once it is `whole`, its `value`, or `failed` and its text."""

    field: str
    text: str = ""
    value: Any = None
    whole: bool = False
    failed: bool = False


class ResponseTemplate:
    """A checked template. Raises ValueError for one that transformers does not take."""

    def __init__(self, source: Mapping[str, Any]) -> None:
        from transformers.utils.chat_parsing import ResponseParser
        from transformers.utils.chat_parsing.response_templates import load_response_template

        class Forgiving(ResponseParser):  # type: ignore[misc]
            """Tells of a region that cannot be read and goes on behind it."""

            def _close_current(self, events: list[dict[str, Any]]) -> None:
                field, text = self._current, self._body
                try:
                    super()._close_current(events)
                except (ValueError, KeyError, TypeError, RecursionError):
                    events.append({"type": "region_failed", "field": field, "text": text})
                    self._reset_to_implicit()

        self._template = load_response_template(dict(source))
        self._make = Forgiving

    def stream(self, prompt: str, tools: Sequence[Mapping[str, Any]] | None) -> ResponseStream:
        """The regions of one answer to `prompt`, which may end inside one of them."""
        return ResponseStream(self._make(self._template, prompt, tools=list(tools or ())))


class ResponseStream:
    def __init__(self, parser: Any) -> None:
        self._parser = parser

    def feed(self, text: str) -> list[Region]:
        return _regions(self._parser.feed(text))

    def finish(self) -> list[Region]:
        events: list[dict[str, Any]] = []
        self._parser._process(events, eos=True)  # finalize() raises for fields that an answer lacks
        return _regions(events)


def read_response_template(settings: Mapping[str, Any]) -> ResponseTemplate | None:
    """Of a tokenizer_config.json; a template that cannot be used is logged and left out."""
    source = settings.get("response_template")
    if not isinstance(source, dict):
        return None
    try:
        return ResponseTemplate(source)
    except (ValueError, KeyError, TypeError, ImportError) as error:
        log.warning("response_template of the tokenizer cannot be used: %s", error)
        return None


def _regions(events: Sequence[Mapping[str, Any]]) -> list[Region]:
    out = []
    for event in events:
        if event["type"] == "region_chunk":
            out.append(Region(event["field"], text=event["text"]))
        elif event["type"] == "region_close":
            out.append(Region(event["field"], value=event["value"], whole=True))
        elif event["type"] == "region_failed":
            out.append(Region(event["field"], text=event["text"], whole=True, failed=True))
    return out
