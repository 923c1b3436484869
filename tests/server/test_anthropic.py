"""`/v1/messages`: inputs, refusals, the message, its events, tokens counted."""

from __future__ import annotations

import asyncio
import json

import pytest
from server_fakes import FakeEngine
from test_responses import scripted  # noqa: F401
from test_tools import engine_with

from aengine.errors import InvalidRequest
from aengine.server.sse import LOOKS
from aengine.types import FinishReason, OutputDelta

URL = "/v1/messages"
TOOL = {"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {}}}
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def typed_envelope():
    async def check(response, status, *, param=None):
        body = await response.json()
        assert response.status == status, body
        assert set(body) == {"type", "error"}
        assert body["type"] == "error"
        assert set(body["error"]) == {"message", "type", "param", "code"}
        if param is not None:
            assert body["error"]["param"] == param
        assert response.headers["request-id"] == response.headers["x-request-id"]
        return body["error"]

    return check


def typed_events(text):
    frames = [frame.split("\n") for frame in text.removesuffix("\n\n").split("\n\n")]
    events = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in frames]
    assert all(name == data["type"] for name, data in events)
    return events


async def ask(client, **fields):
    response = await client.post(URL, json={"messages": HI, "max_tokens": 50, **fields})
    assert response.status == 200, await response.text()
    return typed_events(await response.text()) if fields.get("stream") else await response.json()


async def test_shape_of_a_message(serve):
    client, _ = await serve()
    answer = await ask(client)
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "fake-model",
        "content": [{"type": "text", "text": "Hello!"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 17,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": 7,
        },
    }


async def test_blocks_become_messages(serve):
    client, engine = await serve()
    system = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    use = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "3"}]}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "redacted_thinking", "data": "zzz"},
                {"type": "text", "text": "Let me"},
                use,
            ],
        },
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
    ]
    await ask(client, system=system, messages=turns)
    rendered = engine.text.calls[0][0]
    assert [m["role"] for m in rendered] == ["system", "user", "assistant", "tool", "user"]
    assert [m["content"] for m in rendered] == ["a\nb", "x\ny", "Let me", "3", "and?"]
    assert rendered[2]["reasoning_content"] == "hm"
    assert rendered[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert (rendered[3]["tool_call_id"], rendered[3]["name"]) == ("t1", "add")


async def test_fields_become_those_of_a_chat(serve):
    client, engine = await serve()
    response = await client.post(
        URL,
        json={
            "messages": [*HI, {"role": "assistant", "content": "Sure"}],
            "max_tokens": 9,
            "temperature": 0.5,
            "top_k": 4,
            "stop_sequences": ["END"],
            "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"effort": "low"},
            "metadata": {"user_id": "u"},
            "service_tier": "auto",
        },
        headers={"anthropic-version": "2023-06-01", "anthropic-beta": "x"},
    )
    assert response.status == 200
    assert response.headers["x-aengine-ignored"] == "service_tier, tools.web_search_20250305"
    sampling = engine.submitted[0]["sampling"]
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.stop) == (9, 0.5, 4, ("END",))
    call = engine.text.calls[0][1]
    function = {"name": "add", "description": "adds", "parameters": TOOL["input_schema"]}
    assert call["tools"] == [{"type": "function", "function": function}]
    assert (call["continue_final_message"], call["add_generation_prompt"]) == (True, False)
    assert call["kwargs"] == {"enable_thinking": True, "reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]},
            "messages[0].content[0].name",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"system": "x", "messages": [*HI, {"role": "user", "content": [{"type": "image"}]}]},
            "messages[1].content[0].source",
        ),
        ({"system": [{"type": "video"}]}, "system[0].type"),
        ({"tools": [{"description": "no name"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "perhaps"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"top_p": 2}, "top_p"),
        ({"output_config": {"format": {"type": "poem"}}}, "output_config.format"),
    ],
)
async def test_refusals_name_the_field_that_was_sent(serve, typed_envelope, fields, param):
    client, engine = await serve()
    body = {"messages": HI, "max_tokens": 5, **fields}
    await typed_envelope(await client.post(URL, json=body), 400, param=param)
    assert not engine.submitted


async def test_images(serve, typed_envelope):
    engine = FakeEngine()
    client, _ = await serve(engine)
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    turns = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "?"}]}]
    body = {"system": "s", "messages": turns, "max_tokens": 5}
    error = await typed_envelope(await client.post(URL, json=body), 400, param="messages[0].content[0]")
    assert "text only" in error["message"]
    engine.model.takes_images = True
    await ask(client, messages=turns)
    assert engine.submitted[0]["images"][0].digest == b"data:image/png;base64,AAAA"
    turns[0]["content"][0]["source"] = {"type": "url", "url": "https://example.org/x.png"}
    await typed_envelope(await client.post(URL, json=body), 400)


async def test_events(serve, scripted):  # noqa: F811
    client, _ = await serve(FakeEngine(reply=["rr", "t", "ca", "b"]))
    events = await ask(client, stream=True, tools=[TOOL])
    assert [name for name, _ in events[:2]] == ["message_start", "ping"]
    assert events[0][1]["message"]["usage"]["output_tokens"] == 0
    assert events[0][1]["message"]["content"] == []
    assert [(name, data.get("index")) for name, data in events[2:-2]] == [
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_delta", 2),
        ("content_block_delta", 2),
        ("content_block_stop", 2),
    ]
    starts = [data["content_block"] for name, data in events if name == "content_block_start"]
    assert starts == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "call_1", "name": "add", "input": {}},
    ]
    deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
    assert deltas[0] == {"type": "thinking_delta", "thinking": "hm "}
    assert deltas[2] == {"type": "text_delta", "text": "Sure"}
    assert json.loads("".join(d["partial_json"] for d in deltas[3:])) == {"a": 1}
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2][1]["usage"]["output_tokens"] == 7
    assert events[-1] == ("message_stop", {"type": "message_stop"})
    whole = await ask(client, tools=[TOOL])
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["content"][2]["input"] == {"a": 1}
    assert whole["stop_reason"] == "tool_use"


async def test_arguments_that_a_limit_cut_off(serve, scripted):  # noqa: F811
    client, _ = await serve(FakeEngine(reply=["c", "a", "b"]))
    answer = await ask(client, max_tokens=2)
    assert answer["stop_reason"] == "max_tokens"
    assert answer["content"][0]["input"] == {"_raw": '{"a":'}


async def test_stop_sequences(serve, monkeypatch):
    def stopped(self, index, text, tokens, finish=None, error=None):
        reason = self.engine.model.stopped if finish else None
        return OutputDelta(index, text, tokens, None, finish, reason, error)

    monkeypatch.setattr("server_fakes.FakeStream._delta", stopped)
    engine = FakeEngine()
    client, _ = await serve(engine)
    engine.model.stopped = "END"
    answer = await ask(client, stop_sequences=["x", "END"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END")
    engine.model.stopped = "the template's own"
    assert (await ask(client, stop_sequences=["x"]))["stop_reason"] == "end_turn"


async def test_keep_alive_is_a_ping(serve, keepers):
    client, engine = await serve(FakeEngine(gate=asyncio.Semaphore(0)))
    asked = asyncio.create_task(ask(client, stream=True))
    await keepers.look(LOOKS + 2 * (LOOKS + 1))
    for _ in range(9):
        engine.gate.release()
    names = [name for name, _ in await asked]
    assert names[0] == "message_start"
    assert names.count("message_start") == 1
    assert names.count("ping") == 3  # one belongs to the opening


async def test_a_failure_behind_the_headers_is_an_event(serve):
    client, _ = await serve(FakeEngine(finish=FinishReason.ERROR, error="NaN logits"))
    name, data = (await ask(client, stream=True))[-1]
    assert (name, data["error"]["code"]) == ("error", "step_failed")


async def test_errors_are_typed(serve, typed_envelope):
    client, _ = await serve(api_key="k")
    await typed_envelope(await client.post(URL, json={}), 401)
    for headers in ({"x-api-key": "k"}, {"Authorization": "Bearer k"}):
        assert (await client.post(URL, json={"messages": HI, "max_tokens": 5}, headers=headers)).status == 200
        await typed_envelope(await client.post(URL, json=[], headers=headers), 400)
    wrong = {"x-api-key": "wrong", "Authorization": "Bearer wrong"}
    await typed_envelope(await client.post(URL, json={}, headers=wrong), 401)
    good = {"x-api-key": "k"}
    unknown = {"messages": HI, "max_tokens": 5, "model": "other"}
    await typed_envelope(await client.post(URL, json=unknown, headers=good), 404, param="model")
    await typed_envelope(await client.get(URL, headers=good), 405)
    assert (await client.head("/")).status == 200


async def test_counted_tokens_are_those_charged(serve, typed_envelope):
    client, _ = await serve()
    body = {"messages": HI, "system": "s", "tools": [TOOL]}
    counted = await (await client.post(f"{URL}/count_tokens", json=body)).json()
    usage = (await ask(client, **body))["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    await typed_envelope(await client.post(f"{URL}/count_tokens", json={}), 400, param="messages")
    for wrong, param in (({"top_p": 2}, "top_p"), ({"output_config": {"format": {}}}, "output_config.format")):
        await typed_envelope(await client.post(f"{URL}/count_tokens", json=body | wrong), 400, param=param)


async def test_tool_calls_of_a_template(serve):
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    text = f"<think>hm</think>I add.\n{call}"
    pieces = [text[i : i + 7] for i in range(0, len(text), 7)]
    client, engine = await serve(engine_with(pieces, "<tool_call></think> {{ tools }}"))
    answer = await ask(client, tools=[TOOL], max_tokens=500)
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
    assert (answer["content"][2]["name"], answer["content"][2]["input"]) == ("add", {"a": 1})
    assert answer["stop_reason"] == "tool_use"
    for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
        await ask(client, tools=[TOOL], tool_choice=choice, max_tokens=500)
        assert "add" in engine.submitted[-1]["sampling"].grammar.source
    turns = [*HI, {"role": "assistant", "content": answer["content"]}]
    result = {"type": "tool_result", "tool_use_id": answer["content"][2]["id"], "content": "3"}
    await ask(client, tools=[TOOL], messages=[*turns, {"role": "user", "content": [result]}], max_tokens=500)
    assert engine.text.calls[-1][0][-1]["name"] == "add"


async def test_formats_become_grammars(serve, typed_envelope):
    client, engine = await serve()
    form = {"type": "json_schema", "schema": {"type": "object"}}
    await ask(client, output_config={"format": form})
    assert engine.submitted[-1]["sampling"].grammar.kind == "json_schema"
    await ask(client, structured_outputs={"choice": ["a", "b"]})
    assert engine.submitted[-1]["sampling"].grammar.kind == "choice"
    body = {"messages": HI, "max_tokens": 5, "output_config": {"format": form}}
    both = body | {"response_format": {"type": "json_object"}}
    await typed_envelope(await client.post(URL, json=both), 400, param="output_config.format")
    engine.grammar_error = InvalidRequest("$.properties: no such keyword", param="grammar")
    await typed_envelope(await client.post(URL, json=body), 400, param="output_config.format")
