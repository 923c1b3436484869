"""Parsers of answers: each format on outputs as models write them, cut in any way."""

from __future__ import annotations

import itertools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aengine.server.parsers import HERMES, LLAMA3_JSON, MISTRAL, QWEN, Cutter, find_format, find_marks, prompt_opens
from aengine.server.parsers.thinking import BRACKETS, THINK, ThoughtCount
from aengine.server.pieces import CallArguments, CallStart, Reasoning, Text

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = {"weather": WEATHER, "now": {}}


def joined(pieces):
    """[("text", ..) | ("think", ..) | ("call", name, arguments)], neighbours of one kind joined."""
    out = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            assert piece.index == sum(entry[0] == "call" for entry in out)
            out.append(["call", piece.name, ""])
        elif isinstance(piece, CallArguments):
            assert piece.index == sum(entry[0] == "call" for entry in out) - 1
            out[-1][2] += piece.text
        else:
            kind = "text" if isinstance(piece, Text) else "think"
            if out and out[-1][0] == kind:
                out[-1][1] += piece.text
            else:
                out.append([kind, piece.text])
    return [tuple(entry) for entry in out]


def parse(feeds, **form):
    cutter = Cutter(**{"tools": TOOLS, **form})
    pieces = [piece for feed in feeds for piece in cutter.feed(feed)]
    return joined([*pieces, *cutter.finish()])


ROME, NOW = ("call", "weather", '{"city": "Rome"}'), ("call", "now", "{}")
CASES = {
    "hermes: text, two calls": (
        HERMES,
        'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        [("text", "Let me see."), ROME, NOW],
    ),
    "hermes: the closing mark inside a string": (
        HERMES,
        '<tool_call>{"name": "weather", "arguments": {"city": "a</tool_call>\\"b"}}</tool_call>',
        [("call", "weather", '{"city": "a</tool_call>\\"b"}')],
    ),
    "hermes: arguments first, no closing mark": (
        HERMES,
        '<tool_call>{"arguments": {"city": "Rome"}, "name": "weather"}',
        [ROME],
    ),
    "hermes: arguments encoded twice, or none": (
        HERMES,
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>'
        '<tool_call>{"name": "now"}</tool_call>',
        [ROME, NOW],
    ),
    "hermes: a list in one mark": (
        HERMES,
        '<tool_call>[{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "now", "parameters": {}}]'
        "</tool_call>",
        [ROME, NOW],
    ),
    "hermes: bare line breaks in a string": (
        HERMES,
        '<tool_call>{"name": "weather", "arguments": {"city": "Ro\nme"}}</tool_call>',
        [("call", "weather", '{"city": "Ro\\nme"}')],
    ),
    "hermes: marks that come to nothing": (
        HERMES,
        "a <tool_ca b <tool_call> c < 3 <tool_call><tool_c",
        [("text", "a <tool_ca b <tool_call> c < 3 <tool_call><tool_c")],
    ),
    "hermes: malformed JSON is text, and the next call is one": (
        HERMES,
        'so: <tool_call>{"name": "now", "arguments": {"a": }}</tool_call>\n<tool_call>{"name": "now"}</tool_call>',
        [("text", 'so: <tool_call>{"name": "now", "arguments": {"a": }}</tool_call>'), NOW],
    ),
    "hermes: cut off": (
        HERMES,
        'x <tool_call>{"name": "now", "argum',
        [("text", 'x <tool_call>{"name": "now", "argum')],
    ),
    "hermes: wrong brackets": (HERMES, '<tool_call>{"name": ]} ', [("text", '<tool_call>{"name": ]} ')]),
    "qwen: tags, typed by the schema": (
        QWEN,
        "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        [("call", "weather", '{"city": "12", "days": 3}')],
    ),
    "qwen: without the outer mark, text behind": (
        QWEN,
        'I call <function=now>\n<parameter=deep>\n{"a": [1]}\n</parameter>\n</function> done',
        [("text", "I call"), ("call", "now", '{"deep": {"a": [1]}}'), ("text", "done")],
    ),
    "qwen: JSON calls too": (QWEN, '<tool_call>{"name": "now", "arguments": {}}</tool_call>', [NOW]),
    "qwen: a function that never ends": (QWEN, "ok <function=now>\n<par", [("text", "ok <function=now>\n<par")]),
    "llama: bare calls": (
        LLAMA3_JSON,
        '{"name": "weather", "parameters": {"city": "Rome"}}; {"name": "now", "parameters": {}}',
        [ROME, NOW],
    ),
    "llama: marked": (
        LLAMA3_JSON,
        '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}',
        [NOW],
    ),
    "llama: JSON that is an answer": (
        LLAMA3_JSON,
        '{"name": "Bob", "parameters": {}} is he',
        [("text", '{"name": "Bob", "parameters": {}} is he')],
    ),
    "llama: code": (LLAMA3_JSON, "<|python_tag|>print(1)", [("text", "<|python_tag|>print(1)")]),
    "mistral: an array": (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "now", "arguments": {}}]',
        [ROME, NOW],
    ),
    "mistral: named": (
        MISTRAL,
        'Sure.[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}',
        [("text", "Sure."), ROME, NOW],
    ),
    "mistral: without the arguments' mark": (MISTRAL, '[TOOL_CALLS]weather{"city": "Rome"}', [ROME]),
    "mistral: prose": (MISTRAL, "[TOOL_CALLS] well, {so}", [("text", "[TOOL_CALLS] well, {so}")]),
}
THOUGHTS = {
    "written": (False, "<think>\nhm, <tool_call>\n</think>\n\nyes", [("think", "hm, <tool_call>"), ("text", "yes")]),
    "opened by the prompt": (True, "hm\n\nso </think> yes </think>", [("think", "hm\n\nso"), ("text", "yes </think>")]),
    "opened twice": (True, "<think>hm</think>yes", [("think", "hm"), ("text", "yes")]),
    "none": (False, " a <think> b", [("text", " a <think> b")]),
    "cut off": (True, "hm </thi", [("think", "hm </thi")]),
    "empty": (False, "<think>\n\n</think>\n\nyes", [("text", "yes")]),
    "then a call": (
        False,
        '<think>a</think>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        [("think", "a"), NOW],
    ),
}


@pytest.mark.parametrize(("format", "text", "expected"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("step", [None, 1, 3, 7])
def test_formats(format, text, expected, step):
    feeds = [text] if step is None else [text[i : i + step] for i in range(0, len(text), step)]
    assert parse(feeds, format=format) == expected
    assert parse(feeds, format=format, think=THINK) == expected
    for entry in expected:
        assert entry[0] != "call" or isinstance(json.loads(entry[2]), dict)


@pytest.mark.parametrize(("opened", "text", "expected"), THOUGHTS.values(), ids=THOUGHTS)
@pytest.mark.parametrize("step", [None, 1, 4])
def test_thoughts(opened, text, expected, step):
    feeds = [text] if step is None else [text[i : i + step] for i in range(0, len(text), step)]
    assert parse(feeds, think=THINK, opened=opened, format=HERMES) == expected


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<function=now>", "<function=", "</function>", "<parameter=city>", "</parameter>",
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<think>", "</think>",
    '{"name": "now", "arguments": {}}', '{"name": "weather", "parameters": {"city": "', '"}}', "{", "}",
    "[", "]", '"', "\\", ";", " ", "\n", "é", "<", "now",
]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    cuts=st.lists(st.integers(0, 300), max_size=8),
    format=st.sampled_from([None, HERMES, QWEN, LLAMA3_JSON, MISTRAL]),
    think=st.sampled_from([None, THINK]),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_how_a_text_is_cut_changes_nothing(parts, cuts, format, think, flags):
    text = "".join(parts)
    form = dict(zip(("opened", "parallel", "enforced"), flags, strict=True)) | {"format": format, "think": think}
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    whole = parse([text], **form)
    assert parse([text[a:b] for a, b in itertools.pairwise(bounds)], **form) == whole
    assert parse(list(text), **form) == whole
    if form["enforced"]:
        assert not any(entry[0] == "text" for entry in whole)
    else:
        if not any(entry[0] == "call" for entry in whole) and not think:
            assert "".join(entry[1] for entry in whole) == text
        assert all(isinstance(json.loads(entry[2]), dict) for entry in whole if entry[0] == "call")


def test_an_enforced_call_streams_as_it_comes():
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
    cutter = Cutter(format=HERMES, tools=TOOLS, enforced=True)
    feeds = [cutter.feed(char) for char in text]
    arguments = [piece.text for pieces in feeds for piece in pieces if isinstance(piece, CallArguments)]
    assert arguments == list('{"city": "Rome", "days": 3}')
    assert sum(isinstance(piece, CallStart) for pieces in feeds for piece in pieces) == 1
    held = Cutter(format=HERMES, tools=TOOLS)
    assert not any(piece for char in text[:-20] for piece in held.feed(char))


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (HERMES, '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'),
        (LLAMA3_JSON, '{"name": "weather", "parameters": {"city": "Rome"}}'),
        (MISTRAL, '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}'),
        (QWEN, "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"),
    ],
)
def test_an_enforced_call_that_was_cut_short_is_never_text(format, text):
    for end in range(len(text)):
        cutter = Cutter(format=format, tools=TOOLS, enforced=True)
        shown = any(isinstance(piece, CallStart) for piece in [*cutter.feed(text[:end]), *cutter.finish()])
        whole = any(entry[0] == "call" for entry in parse([text[:end]], format=format))
        assert cutter.broken == (shown and not whole)
        for feeds in ([text[:end]], list(text[:end])):
            assert all(entry[0] == "call" for entry in parse(feeds, format=format, enforced=True))


def test_text_and_thoughts_are_not_held_longer_than_needed():
    cutter = Cutter(format=HERMES, think=THINK)
    assert [cutter.feed(feed) for feed in ("<think>", "so", " it", "</", "think>", "\n\n", "Yes", " <", "b>")] == [
        [], [Reasoning("so")], [Reasoning(" it")], [], [], [], [Text("Yes")], [], [Text(" <b>")],
    ]  # fmt: skip


def test_only_one_call_where_calls_are_not_parallel():
    text = '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "weather"}</tool_call>'
    assert parse([text], format=HERMES, parallel=False) == [NOW]


def test_ids_differ_and_fit_the_template():
    text = "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}"
    ids = [piece.id for piece in Cutter(format=MISTRAL).feed(text) if isinstance(piece, CallStart)]
    assert len(set(ids)) == 2
    assert all(len(id) == 9 and id.isalnum() for id in ids)
    (start, _) = Cutter(format=HERMES).feed('<tool_call>{"name": "now"}</tool_call> ')
    assert start.id.startswith("call_")


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 20_000,
        "<tool_call>{" * 20_000,
        '<tool_call>{"a' * 20_000,
        "<function=a><parameter=b>" * 10_000 + "</function>",
        "<tool_call>" + '{"a":' * 40_000,
        "<tool_call>" + "[" * 100_000 + "]" * 100_000,
    ],
)
def test_hostile_texts_take_linear_time(text):
    def least_s(part):
        """Processor time, the least of three."""
        took_s = []
        for _ in range(3):
            start = time.process_time()
            parse([part], format=QWEN)
            took_s.append(time.process_time() - start)
        return min(took_s)

    end = "</function>" if text.endswith("</function>") else ""
    out = parse([text], format=QWEN)
    assert least_s(text) < 4 * 8 * (
        least_s(text[: len(text) // 8] + end) + 1e-3
    )  # 64 times as much if it were quadratic
    assert [entry[0] for entry in out] == ["call" if text.endswith("</function>") else "text"]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }} tools", "hermes"),
        ("<tool_call>\n<function=x> tools", "qwen"),
        ("[TOOL_CALLS] tools", "mistral"),
        ('<|start_header_id|> "parameters" tools', "llama3_json"),
        ("tools", None),
        (None, None),
    ],
)
def test_the_template_tells_the_format(template, name):
    found = find_format("auto", template)
    assert (found and found.name) == name
    assert find_format("none", template) is None
    assert find_format("qwen", template) is QWEN


def test_the_template_tells_the_marks_of_thoughts():
    assert find_marks("auto", "x.split('</think>')") is THINK
    assert find_marks("auto", "[THINK] [/THINK]") is BRACKETS
    assert find_marks("auto", "hi") is None
    assert find_marks("none", "</think>") is None
    assert find_marks("think", None) is THINK


class Bytes:
    def token_bytes(self, id):
        return bytes([id])


def test_whether_the_prompt_opens_thoughts():
    for prompt, opens in (("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("<think> x", False)):
        assert prompt_opens(THINK, prompt.encode(), Bytes()) is opens
    assert not prompt_opens(None, b"<think>", Bytes())


@pytest.mark.parametrize(
    ("text", "opened", "tokens"),
    [
        ("<think>ab</think>xyz", False, 17),
        ("ab</think>xyz", True, 10),
        ("abc", True, 3),
        ("abc", False, 0),
        ("<th", False, 0),
    ],
)
@pytest.mark.parametrize("step", [1, 5, 99])
def test_thoughts_are_counted_in_tokens(text, opened, tokens, step):
    count, data = ThoughtCount(THINK, opened, Bytes()), text.encode()
    for i in range(0, len(data), step):
        count.add(data[i : i + step])
    assert count.tokens == tokens
