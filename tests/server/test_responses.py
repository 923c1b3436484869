"""`/v1/responses`: inputs, refusals, the response, its events."""

from __future__ import annotations

import json

import pytest
from server_fakes import FakeEngine
from test_tools import engine_with

from aengine.errors import EngineDead, InvalidRequest
from aengine.server.pieces import CallArguments, CallStart, Reasoning, Text
from aengine.types import FinishReason

URL = "/v1/responses"
TOOL = {"type": "function", "name": "add", "description": "adds", "parameters": {"type": "object"}, "strict": True}
PIECES = {
    "r": Reasoning("hm "),
    "s": Text("\n"),
    "t": Text("Sure"),
    "c": CallStart(0, "call_1", "add"),
    "a": CallArguments(0, '{"a":'),
    "b": CallArguments(0, "1}"),
    "d": CallStart(1, "call_2", "sub"),
}


class Scripted:
    """A parser for which each letter of the text is one piece."""

    def feed(self, text):
        return [PIECES[letter] for letter in text]

    def finish(self):
        return ()


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setattr("aengine.server.chat.StartedChat.parser", property(lambda _: Scripted()))


def named_events(text):
    """[(name, data)] of a stream; checks its framing and its numbers."""
    frames = [frame.split("\n") for frame in text.removesuffix("\n\n").split("\n\n")]
    events = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in frames]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert all(name == data["type"] for name, data in events)
    return events


async def ask(client, **fields):
    response = await client.post(URL, json={"input": "hi", **fields})
    assert response.status == 200, await response.text()
    return named_events(await response.text()) if fields.get("stream") else await response.json()


async def test_shape_of_a_response(serve):
    client, engine = await serve()
    answer = await ask(client, instructions="be brief", max_output_tokens=50, metadata={"a": "b"}, store=True)
    assert answer["id"].startswith("resp_")
    assert (answer["object"], answer["status"], answer["store"]) == ("response", "completed", False)
    assert (answer["model"], answer["instructions"], answer["metadata"]) == ("fake-model", "be brief", {"a": "b"})
    assert answer["output"] == [
        {
            "id": f"msg_{answer['id'][5:]}_0",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hello!", "annotations": [], "logprobs": []}],
        }
    ]
    assert answer["usage"] == {
        "input_tokens": 37,
        "input_tokens_details": {"cached_tokens": 3},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 44,
    }
    assert engine.text.calls[0][0] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    assert engine.submitted[0]["sampling"].max_tokens == 50


async def test_items_become_messages(serve):
    client, engine = await serve()
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "2+3?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "easy"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me add"}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":2}', "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "sub", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": "5"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "6"}]},
        {"role": "assistant", "content": "5"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}], "encrypted_content": "xyz"},
    ]
    await ask(client, input=items)
    rendered = engine.text.calls[0][0]
    assert [m["role"] for m in rendered] == ["system", "user", "assistant", "tool", "tool", "assistant", "assistant"]
    assert rendered[2]["reasoning_content"] == "easy"
    assert rendered[2]["content"] == "Let me add"
    assert [call["function"]["name"] for call in rendered[2]["tool_calls"]] == ["add", "sub"]
    assert [(m["tool_call_id"], m["name"], m["content"]) for m in rendered[3:5]] == [
        ("c2", "sub", "5"),
        ("c1", "add", "6"),
    ]
    assert rendered[6]["reasoning_content"] == "short"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "video"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "f"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "call_id": "f"}]}, "input[0].output"),
        (
            {"instructions": "x", "input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"background": True}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [{"name": []}], "mode": "x"}}, "tool_choice.mode"),
        ({"text": {"format": {"type": "poem"}}}, "text.format"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
    ],
)
async def test_refusals_name_the_field_that_was_sent(serve, envelope, fields, param):
    client, engine = await serve()
    await envelope(await client.post(URL, json={"input": "hi", **fields}), 400, param=param)
    assert not engine.submitted


@pytest.mark.parametrize(
    ("ours", "sent"), [("prompt", "input"), ("max_tokens", "max_output_tokens"), ("logprobs", "top_logprobs")]
)
async def test_errors_of_the_engine_name_the_field_that_was_sent(serve, envelope, ours, sent):
    client, _ = await serve(FakeEngine(refuses=[InvalidRequest(f"{ours} is wrong", param=ours)]))
    error = await envelope(await client.post(URL, json={"input": "hi"}), 400, param=sent)
    assert error["message"] == f"{sent} is wrong"


async def test_nothing_is_stored(serve, envelope):
    client, _ = await serve()
    await envelope(await client.get(f"{URL}/resp_1"), 404, code="not_found", param="response_id")


async def test_hosted_tools_are_named_as_ignored(serve):
    client, engine = await serve()
    tools = [TOOL, {"type": "web_search"}, {"type": "local_shell"}]
    response = await client.post(URL, json={"input": "hi", "tools": tools})
    assert response.status == 200
    assert response.headers["x-aengine-ignored"] == "tools.web_search, tools.local_shell"
    function = {key: value for key, value in TOOL.items() if key != "type"}
    assert engine.text.calls[0][1]["tools"] == [{"type": "function", "function": function}]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "sub"}]}
    await ask(client, tools=tools, tool_choice=allowed)
    assert engine.text.calls[1][1]["tools"] is None


async def test_events_of_a_text(serve):
    client, engine = await serve()
    response = await client.post(URL, json={"input": "hi", "stream": True})
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    text = await response.text()
    assert "[DONE]" not in text
    events = named_events(text)
    assert [name.removeprefix("response.") for name, _ in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 3,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(data["delta"] for _, data in events[4:7]) == events[7][1]["text"] == "Hello!"
    assert {data["item_id"] for _, data in events[3:9]} == {events[2][1]["item"]["id"]}
    assert events[2][1]["item"]["content"] == []
    assert events[0][1]["response"]["output"] == []
    assert events[-1][1]["response"]["output"] == [events[-2][1]["item"]]
    assert events[-1][1]["response"]["usage"]["output_tokens"] == 7
    assert not engine.open


async def test_streamed_and_whole_responses_agree(serve, scripted):
    client, _ = await serve(FakeEngine(reply=["rrs", "t", "sca", "b", "d"]))
    whole = await ask(client, tools=[TOOL])
    events = await ask(client, tools=[TOOL], stream=True)
    last = events[-1][1]["response"]
    assert [{**item, "id": None} for item in last["output"]] == [{**item, "id": None} for item in whole["output"]]
    kinds = [(item["type"], item["status"]) for item in whole["output"]]
    assert kinds == [(kind, "completed") for kind in ("reasoning", "message", "function_call", "function_call")]
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm hm "}]
    assert whole["output"][1]["content"][0]["text"] == "\nSure\n"
    calls = [(call["call_id"], call["name"], call["arguments"]) for call in whole["output"][2:]]
    assert calls == [("call_1", "add", '{"a":1}'), ("call_2", "sub", "")]
    names = [name.removeprefix("response.") for name, _ in events]
    start = names.index("function_call_arguments.delta") - 1
    assert names[start : start + 5] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert events[start][1]["item"]["arguments"] == ""
    assert events[start + 3][1]["arguments"] == '{"a":1}'
    assert names.count("reasoning_text.delta") == 2
    assert names.count("output_item.added") == names.count("output_item.done") == 4


async def test_a_limit_makes_it_incomplete(serve):
    client, _ = await serve()
    answer = await ask(client, max_output_tokens=4)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"
    events = await ask(client, max_output_tokens=4, stream=True)
    assert events[-1][0] == "response.incomplete"


async def test_logprobs(serve):
    client, _ = await serve(FakeEngine(reply=["A", "b"]))
    fields = {"top_logprobs": 2, "include": ["message.output_text.logprobs", "reasoning.encrypted_content"]}
    part = (await ask(client, **fields))["output"][0]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]] == ["A", "b", "</s>"]
    assert [top["token"] for top in part["logprobs"][0]["top_logprobs"]] == ["B", "A"]
    events = await ask(client, **fields, stream=True)
    assert [e["logprobs"][0]["token"] for name, e in events if name == "response.output_text.delta"] == ["A", "b"]


async def test_an_empty_answer_has_a_message(serve):
    client, _ = await serve(FakeEngine(reply=[]))
    answer = await ask(client)
    assert [item["content"][0]["text"] for item in answer["output"]] == [""]


@pytest.mark.parametrize(
    ("engine", "code"),
    [
        (FakeEngine(finish=FinishReason.ERROR, error="NaN logits"), "step_failed"),
        (FakeEngine(raises=EngineDead("boom")), "engine_dead"),
        (FakeEngine(raises=ValueError("secret detail")), "server_error"),
    ],
)
async def test_a_failure_behind_the_headers_is_an_event(serve, engine, code):
    client, _ = await serve(engine)
    events = await ask(client, stream=True)
    name, data = events[-1]
    assert (name, data["response"]["status"]) == ("response.failed", "failed")
    assert data["response"]["error"]["code"] == code
    assert "secret" not in data["response"]["error"]["message"]


async def test_chat_fields_beyond_openai(serve):
    client, engine = await serve()
    await ask(client, top_k=3, seed=5, min_p=0.1, priority=2, cache_salt="s", reasoning={"effort": "low"})
    got = engine.submitted[0]
    sampling = got["sampling"]
    assert (sampling.top_k, sampling.seed, sampling.min_p) == (3, 5, 0.1)
    assert (got["priority"], got["cache_salt"]) == (2, "s")
    assert engine.text.calls[0][1]["kwargs"] == {"reasoning_effort": "low"}


async def test_text_format_text_is_fine(serve):
    client, _ = await serve()
    assert (await ask(client, text={"format": {"type": "text"}}))["text"] == {"format": {"type": "text"}}


async def test_tool_calls_of_a_template(serve):
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    text = f"<think>hm</think>I add.\n{call}"
    pieces = [text[i : i + 7] for i in range(0, len(text), 7)]
    client, engine = await serve(engine_with(pieces, "<tool_call></think> {{ tools }}"))
    events = await ask(client, tools=[TOOL], stream=True)
    output = events[-1][1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert output[0]["content"][0]["text"] == "hm"
    assert output[1]["content"][0]["text"].strip() == "I add."
    assert json.loads(output[2]["arguments"]) == {"a": 1}
    streamed = [e["delta"] for name, e in events if name == "response.function_call_arguments.delta"]
    assert "".join(streamed) == output[2]["arguments"]
    assert events[-1][1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] > 1
    await ask(client, tools=[TOOL], tool_choice={"type": "function", "name": "add"}, parallel_tool_calls=False)
    assert "add" in engine.submitted[-1]["sampling"].grammar.source


async def test_formats_become_grammars(serve, envelope):
    client, engine = await serve()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    for fields, kind in (
        ({"text": {"format": {"type": "json_object"}}}, "json_object"),
        ({"text": {"format": form}}, "json_schema"),
        ({"response_format": {"type": "json_object"}}, "json_object"),
        ({"structured_outputs": {"regex": "a+"}}, "regex"),
        ({"guided_choice": ["a"]}, "choice"),
    ):
        await ask(client, **fields)
        assert engine.submitted[-1]["sampling"].grammar.kind == kind
    wrong = {"type": "json_schema", "name": "n"}
    await envelope(await client.post(URL, json={"input": "x", "text": {"format": wrong}}), 400, param="text.format")
    both = {"input": "x", "text": {"format": form}, "response_format": {"type": "json_object"}}
    await envelope(await client.post(URL, json=both), 400, param="text.format")
    engine.grammar_error = InvalidRequest("$.properties: no such keyword", param="grammar")
    error = await envelope(
        await client.post(URL, json={"input": "x", "text": {"format": form}}), 400, param="text.format"
    )
    assert "$.properties" in error["message"]
