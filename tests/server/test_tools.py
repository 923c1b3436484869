"""Tools and reasoning over HTTP: requests, the grammar that is submitted, answers whole and streamed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
from llguidance import LLMatcher, LLTokenizer
from server_fakes import FakeEngine
from tokenizers import AddedToken, Tokenizer, decoders, models

from aengine.models.detokenize import byte_alphabet
from aengine.server.answers import AnswerForm
from aengine.server.parsers.declared import declared_only
from aengine.server.parsers.enforce import Tool
from aengine.server.parsers.formats import HERMES, LLAMA3_JSON, MISTRAL, MISTRAL_ARRAY, QWEN
from aengine.server.parsers.thinking import THINK
from aengine.server.tools import ToolUse
from aengine.types import Grammar, SamplingParams

URL = "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def engine_with(reply, template="<tool_call> {{ tools }}"):
    engine = FakeEngine(reply=reply)
    engine.text.chat_template = template
    return engine


def chunks(text, step=5):
    return [text[i : i + step] for i in range(0, len(text), step)]


async def test_golden_stream(serve, chat_body):
    client, _ = await serve(engine_with(chunks("I look.\n" + CALL + "\n" + CALL.replace("Rome", "Pisa"))))
    text = await (await client.post(URL, json=chat_body(tools=[WEATHER], stream=True))).text()
    choices = [json.loads(frame[6:])["choices"][0] for frame in text.split("\n\n")[:-2]]
    ids = re.findall(r'"id":"(call_[0-9a-f]{24})"', text)
    assert len(set(ids)) == 2
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "I loo"},
        {"content": "k."},
        {"tool_calls": [_start(0, ids[0])]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "Rome"}'}}]},
        {"tool_calls": [_start(1, ids[1])]},
        {"tool_calls": [{"index": 1, "function": {"arguments": '{"city": "Pisa"}'}}]},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None] * 7 + ["tool_calls"]


def _start(index, id):
    return {"index": index, "id": id, "type": "function", "function": {"name": "weather", "arguments": ""}}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_forced_calls_stream_their_arguments(serve, chat_body, events, choice):
    client, engine = await serve(engine_with(chunks(CALL)))
    body = chat_body(tools=[WEATHER, NOW], tool_choice=choice, stream=True)
    deltas = [c["choices"][0]["delta"] for c in events(await (await client.post(URL, json=body)).text())[:-1]]
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["function"] == {"name": "weather", "arguments": ""}
    assert all(set(call) == {"index", "function"} for call in calls[1:])
    assert len(calls) > 3
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"city": "Rome"}
    grammar = engine.submitted[0]["sampling"].grammar
    assert grammar.kind == "lark"
    assert ("now" in grammar.source) is (choice == "required")
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar.source)) == ""


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_a_stop_string_cuts_short_is_no_reason_to_end(serve, chat_body, events, stream):
    client, _ = await serve(engine_with(chunks(CALL[: CALL.index("Rome")])))  # the fake engine says that it stopped
    response = await client.post(URL, json=chat_body(tools=[WEATHER], tool_choice="required", stream=stream))
    last = events(await response.text())[-2] if stream else await response.json()
    assert last["choices"][0]["finish_reason"] == "stop"


async def test_whole_answers(serve, chat_body):
    client, engine = await serve(engine_with([CALL]))
    answer = await (await client.post(URL, json=chat_body(tools=[WEATHER]))).json()
    message = answer["choices"][0]["message"]
    assert message.pop("tool_calls")[0]["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert message == {"role": "assistant", "content": None, "refusal": None}
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert engine.submitted[0]["sampling"].grammar is None
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        answer = await (await client.post(URL, json=chat_body(**fields))).json()
        assert answer["choices"][0]["message"]["content"] == CALL
        assert answer["choices"][0]["finish_reason"] == "stop"


async def test_a_limit_is_told_as_such(serve, chat_body):
    client, _ = await serve(engine_with([CALL]))
    body = chat_body(tools=[WEATHER], max_tokens=60)
    choice = (await (await client.post(URL, json=body)).json())["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", CALL[:60])
    forced = (await (await client.post(URL, json=body | {"tool_choice": "required"})).json())["choices"][0]
    assert forced["finish_reason"] == "length"
    assert forced["message"]["tool_calls"][0]["function"]["name"] == "weather"


async def test_parallel_calls_can_be_turned_off(serve, chat_body):
    client, engine = await serve(engine_with([CALL + CALL]))
    for choice in ("auto", "required"):
        body = chat_body(tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False)
        answer = await (await client.post(URL, json=body)).json()
        assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
    assert "{0,15}" not in engine.submitted[-1]["sampling"].grammar.source


async def test_every_choice_has_a_parser_of_its_own(serve, chat_body, events):
    client, _ = await serve(engine_with(chunks("<think>hm</think>" + CALL), "<tool_call></think> tools"))
    whole = await (await client.post(URL, json=chat_body(tools=[WEATHER], n=3))).json()
    assert [choice["message"]["reasoning"] for choice in whole["choices"]] == ["hm"] * 3
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in whole["choices"]}) == 3
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3 * 17}
    streamed = events(await (await client.post(URL, json=chat_body(tools=[WEATHER], n=2, stream=True))).text())
    for index in range(2):
        deltas = [c["choices"][0]["delta"] for c in streamed[:-1] if c["choices"][0]["index"] == index]
        assert "".join(delta.get("reasoning", "") for delta in deltas) == "hm"
        assert sum("tool_calls" in delta for delta in deltas) == 2


async def test_reasoning(serve, chat_body, events):
    client, engine = await serve(engine_with(chunks("hm, so\n</think>\n\nYes."), "</think>"))
    engine.text.render_chat = _thinking(engine.text)
    body = chat_body(stream=True, stream_options={"include_usage": True})
    streamed = events(await (await client.post(URL, json=body)).text())
    deltas = [c["choices"][0]["delta"] for c in streamed[1:-2]]
    thoughts = [delta for delta in deltas if "reasoning" in delta]
    assert all(delta["reasoning"] == delta["reasoning_content"] for delta in thoughts)
    assert "".join(delta["reasoning"] for delta in thoughts) == "hm, so"
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
    assert streamed[-2]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 15}
    whole = await (await client.post(URL, json=chat_body())).json()
    message = whole["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("hm, so", "hm, so", "Yes.")
    quiet = await (await client.post(URL, json=chat_body(include_reasoning=False))).json()
    assert quiet["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    plain = await (await client.post(URL, json=chat_body(chat_template_kwargs={"enable_thinking": False}))).json()
    assert plain["choices"][0]["message"]["content"] == "hm, so\n</think>\n\nYes."
    response = await (await client.post("/v1/responses", json={"input": "hi"})).json()
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 15}


def _thinking(text):
    """A template that opens the thoughts, unless it is told not to."""
    render = text.render_chat

    async def rendered(messages, **call):
        thinks = (call["kwargs"] or {}).get("enable_thinking", True)
        return await render(messages, **call) + ("<think>\n" if thinks else "<think>\n\n</think>\n\n")

    return rendered


async def test_settings_turn_parsers_off(serve, chat_body):
    reply = "<think>a</think>" + CALL
    client, _ = await serve(
        engine_with([reply], "</think><tool_call> tools"), tool_parser="none", reasoning_parser="none"
    )
    answer = await (await client.post(URL, json=chat_body(tools=[WEATHER]))).json()
    assert answer["choices"][0]["message"]["content"] == reply
    assert "completion_tokens_details" not in answer["usage"]


async def test_special_marks_are_not_skipped(serve, chat_body):
    engine = engine_with(["ok"], "[TOOL_CALLS] tools")
    plain = engine.text.token_bytes
    engine.text.token_bytes = lambda id: b"[TOOL_CALLS]" if id == 257 else plain(id)
    encode = engine.text.encode
    engine.text.encode = lambda text, **options: _single(encode, text, options)
    client, _ = await serve(engine)
    await client.post(URL, json=chat_body(tools=[NOW]))
    await client.post(URL, json=chat_body())
    await client.post(URL, json=chat_body(tools=[NOW], tool_choice="required"))
    auto, without, required = (submitted["sampling"] for submitted in engine.submitted)
    assert not auto.skip_special_tokens
    assert without.skip_special_tokens
    assert "<[257]>" in required.grammar.source


async def _single(encode, text, options):
    return [257] if text == "[TOOL_CALLS]" else await encode(text, **options)


@dataclass
class Region:
    field: str
    text: str = ""
    value: object = None
    whole: bool = False
    failed: bool = False


class Regions:
    """Cuts `r:hm|c:ok|t:name|b:broken` at its bars."""

    FIELDS: ClassVar = {"r": "reasoning_content", "c": "content", "t": "tool_calls", "b": "tool_calls"}

    def feed(self, text):
        return [region for part in text.removesuffix("|").split("|") for region in self._regions(*part.split(":"))]

    def _regions(self, kind, text):
        field, call = self.FIELDS[kind], {"type": "function", "function": {"name": text, "arguments": {"a": 1}}}
        whole = {"text": text, "failed": True} if kind == "b" else {"value": call if kind == "t" else text.strip()}
        return [Region(field, text), Region(field, whole=True, **whole)]

    def finish(self):
        return []


async def test_a_checkpoints_response_template_goes_first(serve, chat_body):
    engine = engine_with(["r:\nhm\n|", "c: ok |", "t:now|", "b:{oops"])
    asked = []
    engine.text.has_response_template = True
    engine.text.response_stream = lambda prompt, tools: asked.append((prompt, tools)) or Regions()
    client, _ = await serve(engine)
    answer = await (await client.post(URL, json=chat_body(tools=[NOW]))).json()
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("ok{oops", "hm")
    assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": '{"a": 1}'}
    assert asked == [("<user>hi\n<assistant>", [NOW])]
    assert not engine.submitted[0]["sampling"].skip_special_tokens
    without = await (await client.post(URL, json=chat_body())).json()
    assert without["choices"][0]["message"]["content"] == "oknow{oops"
    await client.post(URL, json=chat_body(tools=[NOW], tool_choice="required"))
    assert len(asked) == 2  # a forced call is read as its grammar writes it


# ---- templates without tools


HISTORY = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
            {"id": "c2", "type": "function", "function": {"name": "now", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    {"role": "tool", "tool_call_id": "c2", "content": "noon"},
    {"role": "user", "content": "thanks"},
]


async def test_without_a_tool_template_tools_are_ignored_and_history_is_text(serve, chat_body):
    client, engine = await serve(engine_with(["ok " + CALL], "{{ messages }}"))
    response = await client.post(URL, json=chat_body(messages=HISTORY, tools=[WEATHER] * 36))
    assert response.headers["x-aengine-ignored"] == "tools"
    assert (await response.json())["choices"][0]["message"]["content"] == "ok " + CALL
    rendered, _ = engine.text.calls[0]
    assert [message["role"] for message in rendered] == ["user", "assistant", "user", "user"]
    assert rendered[1] == {
        "role": "assistant",
        "content": CALL + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    }
    assert rendered[2]["content"] == ("<tool_response>\nsun\n</tool_response>\n<tool_response>\nnoon\n</tool_response>")


@pytest.mark.parametrize("system", [True, False])
async def test_without_a_tool_template_forced_calls_are_explained(serve, chat_body, system):
    client, engine = await serve(engine_with([CALL], "{{ messages }}"))
    messages = [{"role": "system", "content": "Be brief."}] * system + [{"role": "user", "content": "hi"}]
    body = chat_body(messages=messages, tools=[WEATHER], tool_choice="required")
    response = await client.post(URL, json=body)
    assert "x-aengine-ignored" not in response.headers
    assert (await response.json())["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    rendered, _ = engine.text.calls[0]
    assert [message["role"] for message in rendered] == ["system", "user"]
    assert rendered[0]["content"].startswith("Be brief.") is system
    assert json.dumps(PARAMETERS) in rendered[0]["content"]
    ids = engine.streams[0].prompt_ids
    assert (await (await client.post(URL + "/render", json=body)).json())["token_ids"] == ids
    tokenized = await client.post("/tokenize", json=body | {"add_special_tokens": False})
    assert (await tokenized.json())["tokens"] == ids


async def test_a_parser_chosen_by_setting_needs_no_tool_template(serve, chat_body):
    client, engine = await serve(engine_with([CALL], "{{ messages }}"), tool_parser="hermes")
    answer = await (await client.post(URL, json=chat_body(tools=[WEATHER]))).json()
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert engine.text.calls[0][0][0]["role"] == "system"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        (
            {"tools": [NOW, {"type": "function", "function": {"name": "f", "parameters": "x"}}]},
            "tools[1].function.parameters",
        ),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "magic"}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": [NOW],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}},
            },
            "tool_choice",
        ),
    ],
)
async def test_malformed(serve, chat_body, envelope, fields, param):
    client, engine = await serve()
    await envelope(await client.post(URL, json=chat_body(**fields)), 400, param=param)
    assert not engine.submitted


async def test_allowed_tools_limit_a_forced_choice(serve, chat_body):
    client, engine = await serve(engine_with([CALL]))
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NOW]}}
    assert (await client.post(URL, json=chat_body(tools=[WEATHER, NOW], tool_choice=choice))).status == 200
    source = engine.submitted[0]["sampling"].grammar.source
    assert "now" in source
    assert "weather" not in source


# ---- grammars against a tokenizer


MARKS = ("<think>", "</think>", "<tool_call>", "[TOOL_CALLS]")


class MarkedText:
    """Bytes, and each mark as one special token."""

    chat_template = None
    has_response_template = False

    def __init__(self):
        vocabulary = byte_alphabet() | {"</s>": 256}
        self.backend = Tokenizer(models.BPE(vocabulary, [], unk_token=None))
        self.backend.decoder = decoders.ByteLevel()
        self.backend.add_special_tokens([AddedToken(mark, special=True) for mark in ("</s>", *MARKS)])
        self.grammars = LLTokenizer(self.backend.to_str(), eos_token=256)

    def ids(self, text):
        pieces = re.split("(" + "|".join(map(re.escape, MARKS)) + ")", text)
        whole = [[self.backend.token_to_id(piece)] if piece in MARKS else list(piece.encode()) for piece in pieces]
        return [id for piece in whole for id in piece]

    async def encode(self, text, *, add_special_tokens=True):
        return self.ids(text)

    async def decode(self, ids, *, skip_special_tokens=False):
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, id):
        return bytes([id]) if id < 256 else self.backend.id_to_token(id).encode()

    def admits(self, grammar, ids):
        matcher = LLMatcher(self.grammars, LLMatcher.grammar_from_lark(grammar.source))
        taken = matcher.try_consume_tokens(ids)
        assert not matcher.get_error()
        return taken == len(ids) and matcher.is_accepting()


@pytest.fixture(scope="module")
def marked():
    return MarkedText()


TWO = {
    "hermes": (HERMES, f"{CALL}\n{CALL}"),
    "qwen": (QWEN, CALL),
    "llama": (LLAMA3_JSON, '{"name": "weather", "parameters": {"city": "Rome"}}; {"name": "now", "parameters": {}}'),
    "mistral": (MISTRAL, '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]now[ARGS]{}'),
    "mistral array": (
        MISTRAL_ARRAY,
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "now", "arguments": {}}]',
    ),
}


@pytest.mark.parametrize(("format", "text"), TWO.values(), ids=TWO)
@pytest.mark.parametrize("thinks", [False, True])
async def test_what_is_enforced_is_what_is_read(marked, format, text, thinks):
    tools = (Tool("weather", PARAMETERS, strict=True), Tool("now", {"type": "object", "format": "odd"}))
    form = AnswerForm(ToolUse(tools, forced=True, format=format), THINK if thinks else None)
    sampling = await form.sampling(SamplingParams(), marked.ids("<think>\n"), marked)
    thought = "hm <\n</think>\n\n" if thinks else ""
    for ids in (marked.ids(thought + text), list((thought + text).encode())):  # marks as tokens, and spelt out
        assert marked.admits(sampling.grammar, ids)
    for wrong in ("Rome", "", text.replace("city", "town"), text.replace("weather", "x"), text[:-1]):
        assert not marked.admits(sampling.grammar, marked.ids(thought + wrong))
    (parser,) = await form.parsers(1, marked.ids("<think>\n"), marked)
    pieces = [*parser.feed(thought + text), *parser.finish()]
    kinds = [type(piece).__name__ for piece in pieces if type(piece).__name__ != "CallArguments"]
    assert kinds == ["Reasoning"] * thinks + ["CallStart"] * (1 + (format is not QWEN))


INNER = {"type": "object", "properties": {"x": {"type": "integer"}}}
CLOSED = {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (INNER, INNER | CLOSED),
        ({"type": "object", "properties": {}}, {"type": "object", "properties": {}} | CLOSED),
        (
            {"properties": {"a": {"type": "array", "items": INNER}}},
            {"properties": {"a": {"type": "array", "items": INNER | CLOSED}}} | CLOSED,
        ),
        ({"anyOf": [INNER, {"$ref": "#/$defs/d"}], "$defs": {"d": INNER}}, None),
        (INNER | {"additionalProperties": True}, INNER | {"additionalProperties": True}),
        (INNER | {"patternProperties": {"^a": {}}}, INNER | {"patternProperties": {"^a": {}}}),
        (INNER | {"required": ["x", "y"]}, INNER | {"required": ["x", "y"]}),
        (INNER | {"minProperties": 2}, INNER | {"minProperties": 2}),
        (INNER | {"anyOf": [INNER]}, INNER | {"anyOf": [INNER]}),
        ({"properties": {"a": {"allOf": [INNER, INNER]}}}, {"properties": {"a": {"allOf": [INNER, INNER]}}} | CLOSED),
        ({"type": "object"}, {"type": "object"}),
        (INNER | {"enum": [{"x": 1, "y": 2}]}, INNER | {"enum": [{"x": 1, "y": 2}]}),
        ({"anyOf": [INNER], "required": ["y"]}, {"anyOf": [INNER], "required": ["y"]}),
        ({"anyOf": [{"$ref": "#/$defs/d", "minProperties": 2}], "$defs": {"d": INNER}},) * 2,
    ],
)
def test_an_enforced_call_has_declared_properties_only(schema, closed):
    if closed is None:
        closed = {"anyOf": [INNER | CLOSED, {"$ref": "#/$defs/d"}], "$defs": {"d": INNER | CLOSED}}
    assert declared_only(schema) == closed


async def test_no_properties_are_invented_in_a_forced_call(marked):
    form = AnswerForm(
        ToolUse((Tool("weather", {"type": "object", "properties": {"city": {}}}),), True, format=HERMES), None
    )
    grammar = (await form.sampling(SamplingParams(), marked.ids("x"), marked)).grammar
    assert marked.admits(grammar, marked.ids(CALL))
    assert not marked.admits(grammar, marked.ids(CALL.replace('"Rome"', '"Rome", "more": 1')))


@pytest.mark.parametrize("kind", ["array", ["object", "null"], None])
async def test_strict_arguments_must_be_an_object(serve, chat_body, kind):
    client, _ = await serve()
    function = {"name": "f", "strict": True, "parameters": {"type": kind}}
    body = chat_body(tools=[{"type": "function", "function": function}], tool_choice="required")
    response = await client.post("/v1/chat/completions", json=body)
    error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, "tools[0].function.parameters.type")
    assert json.dumps(kind) in error["message"]


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar("json_object"), '{"a": 1}', "1"),
        (Grammar("json_schema", '{"type": "integer"}'), "12", "x"),
        (Grammar("regex", r"a/b\/[0-9]+"), "a/b/12", "a/b"),
        (Grammar("choice", '["yes", "no\\n", "a/b|\\t "]'), "no\n", "no"),
        (Grammar("choice", '["yes", "a/b|\\t ^"]'), "a/b|\t ^", "a/b"),
        (Grammar("choice", json.dumps([f"w{i}" for i in range(3000)])), "w2999", "w3000"),
        (Grammar("lark", 'start: x "}"\nx: /[a-c]+/'), "abc}", "abc"),
        (Grammar("lark", 'root ::= [a-c]+ "}"'), "abc}", "abc"),
    ],
)
async def test_an_answers_grammar_holds_behind_the_thoughts(marked, grammar, good, bad):
    thinking = AnswerForm(ToolUse(), THINK)
    wished = SamplingParams(grammar=grammar)
    opened = (await thinking.sampling(wished, marked.ids("<think>\n"), marked)).grammar
    free = (await thinking.sampling(wished, marked.ids("hi"), marked)).grammar
    for source, thought in ((opened, "hm</think>\n"), (free, "<think>hm</think>\n"), (free, "")):
        assert marked.admits(source, marked.ids(thought + good))
        assert not marked.admits(source, marked.ids(thought + bad))
    assert not marked.admits(opened, marked.ids(good))
    assert (await AnswerForm(ToolUse(), None).sampling(wished, [], marked)).grammar is grammar
    tools = ToolUse((Tool("weather", PARAMETERS),), format=HERMES)
    either = (await AnswerForm(tools, None).sampling(wished, [], marked)).grammar
    assert marked.admits(either, marked.ids(good))
    assert marked.admits(either, marked.ids(CALL))
    assert not marked.admits(either, marked.ids(bad))
