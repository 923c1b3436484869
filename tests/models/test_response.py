"""Response templates: regions of an answer as a checkpoint describes them."""

from __future__ import annotations

import json

import pytest

from aengine.models.response import Region, ResponseTemplate, read_response_template

TEMPLATE = {
    "start_anchor": "<|model|>",
    "fields": {
        "reasoning_content": {"open": "<|thought|>", "close": "<|/thought|>"},
        "tool_calls": {
            "open_pattern": r"<\|call\|>(?P<name>\w+) ",
            "close": "<|/call|>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}
PROMPT = "<|user|><|call|>old <|model|><|thought|>"
ANSWER = 'hm<|/thought|>ok <|call|>now {"a": 1}<|/call|><|call|>now {"a": }<|/call|> x'


@pytest.fixture(scope="module")
def template():
    return read_response_template({"response_template": TEMPLATE})


@pytest.mark.parametrize("step", [1, 6, 99])
def test_regions(template, step):
    stream = template.stream(PROMPT, [])
    feeds = [ANSWER[i : i + step] for i in range(0, len(ANSWER), step)]
    regions = [region for feed in feeds for region in stream.feed(feed)] + stream.finish()
    call = {"type": "function", "function": {"name": "now", "arguments": {"a": 1}}}
    assert [region for region in regions if region.whole] == [
        Region("reasoning_content", value="hm", whole=True),
        Region("content", value="ok", whole=True),
        Region("tool_calls", value=call, whole=True),
        Region("tool_calls", text='{"a": }', whole=True, failed=True),
        Region("content", value="x", whole=True),
    ]
    shown = "".join(region.text for region in regions if not region.whole)
    assert shown == 'hmok {"a": 1}{"a": } x'


def test_arguments_get_the_types_of_the_schema(template):
    tool = {"function": {"name": "now", "parameters": {"properties": {"a": {"type": "integer"}}}}}
    stream = template.stream("<|model|>", [tool])
    (whole,) = [region for region in stream.feed('<|call|>now {"a": "12"}<|/call|>') if region.whole]
    assert whole.value["function"]["arguments"] == {"a": 12}


def test_a_template_that_cannot_be_used_is_left_out(caplog):
    assert read_response_template({}) is None
    assert read_response_template({"response_template": json.loads('{"version": 9}')}) is None
    assert "response_template" in caplog.text
    with pytest.raises(ValueError, match="version"):
        ResponseTemplate({"version": 9})
