"""Chats that are not streamed: messages, fields, tools, the shape of the answer."""

from __future__ import annotations

import json

import pytest
from server_fakes import FakeEngine

from aengine.errors import InvalidRequest

URL = "/v1/chat/completions"


async def test_shape_of_an_answer(serve, chat_body):
    client, _ = await serve()
    answer = await (await client.post(URL, json=chat_body())).json()
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer.pop("system_fingerprint").startswith("fp_")
    assert answer == {
        "object": "chat.completion",
        "model": "fake-model",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello!", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 20,
            "completion_tokens": 7,
            "total_tokens": 27,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


async def test_n_choices_and_length(serve, chat_body):
    client, engine = await serve()
    answer = await (await client.post(URL, json=chat_body(n=3, max_tokens=4))).json()
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert {c["message"]["content"] for c in answer["choices"]} == {"Hell"}
    assert {c["finish_reason"] for c in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 12
    assert not engine.open


async def test_extras(serve, chat_body):
    client, _ = await serve()
    body = chat_body(logprobs=True, top_logprobs=2, prompt_logprobs=2, return_token_ids=True)
    answer = await (await client.post(URL, json=body)).json()
    choice = answer["choices"][0]
    assert choice["token_ids"] == [*b"Hello!", 257]
    assert len(choice["logprobs"]["content"]) == 7
    assert answer["prompt_token_ids"] == list(b"<user>hi\n<assistant>")
    assert answer["prompt_logprobs"][0] is None
    assert answer["prompt_logprobs"][1] == {
        "118": {"logprob": -0.25, "rank": 1, "decoded_token": "v"},
        "117": {"logprob": -1.5, "rank": 2, "decoded_token": "u"},
    }


async def test_messages_reach_the_template_as_plain_dicts(serve, chat_body):
    client, engine = await serve()
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "{oops"}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call, broken], "refusal": None, "audio": None},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "system", "content": ""},
    ]
    response = await client.post(URL, json=chat_body(messages=messages))
    assert response.status == 200, await response.text()
    rendered, _ = engine.text.calls[0]
    assert [m["role"] for m in rendered] == ["system", "user", "assistant", "tool", "system"]
    assert rendered[1]["content"] == "a\nb"
    assert rendered[1]["name"] == "ann"
    assert rendered[2]["content"] == ""
    assert rendered[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert rendered[2]["tool_calls"][1]["function"]["arguments"] == "{oops"
    assert rendered[3]["tool_call_id"] == "c1"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ("hi", "messages[0]"),
    ],
)
async def test_wrong_message_names_its_field(serve, chat_body, envelope, message, param):
    client, engine = await serve()
    await envelope(await client.post(URL, json=chat_body(messages=[message])), 400, param=param)
    assert not engine.submitted


async def test_template_fields(serve, chat_body):
    client, engine = await serve(client_chat_templates=True)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure"}]
    extra = {"chat_template_kwargs": {"x": 1}, "reasoning_effort": "low", "chat_template": "T"}
    await client.post(URL, json=chat_body(messages=messages, continue_final_message=True, **extra))
    assert engine.text.calls[0][1] == {
        "tools": None,
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template": "T",
        "kwargs": {"x": 1, "reasoning_effort": "low"},
    }
    await client.post(URL, json=chat_body(add_generation_prompt=False, add_special_tokens=True))
    assert engine.streams[-1].prompt_ids == [256, *b"<user>hi\n"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs"),
        ({"tools": [{"type": "web"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"tool_choice": "always", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ],
)
async def test_wrong_template_fields(serve, chat_body, envelope, fields, param):
    client, _ = await serve()
    await envelope(await client.post(URL, json=chat_body(**fields)), 400, param=param)


async def test_36_tools_are_rendered_and_answered(serve, chat_body):
    client, engine = await serve()
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": {}}} for i in range(36)]
    assert (await client.post(URL, json=chat_body(tools=tools, tool_choice="auto"))).status == 200
    assert len(engine.text.calls[0][1]["tools"]) == 36
    assert (await client.post(URL, json=chat_body(tools=tools, tool_choice="none"))).status == 200
    assert engine.text.calls[1][1]["tools"] is None
    assert (await client.post(URL, json=chat_body(tools=[], tool_choice=None))).status == 200


async def test_sampling_fields_arrive(serve, chat_body):
    client, engine = await serve()
    fields = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.1,
        "seed": 2**63,
        "stop_token_ids": [7],
        "bad_words": ["no"],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "min_tokens": 2,
        "logit_bias": {"5": -100, "6": 1.5},
        "allowed_token_ids": [1, 2],
    }
    body = chat_body(**fields, stop=["a", "b"], max_tokens=9, priority=-2, cache_salt="s")
    assert (await client.post(URL, json=body)).status == 200
    got = engine.submitted[0]
    assert (got["priority"], got["cache_salt"]) == (-2, "s")
    sampling = got["sampling"]
    for name, value in fields.items():
        expected = {int(k): v for k, v in value.items()} if name == "logit_bias" else value
        expected = tuple(expected) if isinstance(expected, list) else expected
        assert getattr(sampling, name) == expected, name
    assert sampling.stop == ("a", "b")
    assert sampling.max_tokens == 9


async def test_null_means_default(serve, chat_body):
    client, engine = await serve()
    names = ["temperature", "top_p", "n", "seed", "stop", "max_tokens", "stream", "logit_bias", "tools"]
    names += ["response_format", "user", "guided_json"]
    assert (await client.post(URL, json=chat_body(**dict.fromkeys(names)))).status == 200
    sampling = engine.submitted[0]["sampling"]
    assert (sampling.temperature, sampling.max_tokens, sampling.n) == (1.0, None, 1)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 5, "max_completion_tokens": 3}, 3),
        ({}, None),
    ],
)
async def test_both_length_limits_hold(serve, chat_body, fields, expected):
    client, engine = await serve()
    await client.post(URL, json=chat_body(**fields))
    assert engine.submitted[0]["sampling"].max_tokens == expected


async def test_response_format_text_is_fine(serve, chat_body):
    client, _ = await serve()
    assert (await client.post(URL, json=chat_body(response_format={"type": "text"}))).status == 200


async def test_served_names_and_absent_model(serve, chat_body):
    client, _ = await serve()
    alias = await (await client.post(URL, json=chat_body(model="fake-alias"))).json()
    absent = await (await client.post(URL, json={"messages": [{"role": "user", "content": "x"}]})).json()
    assert (alias["model"], absent["model"]) == ("fake-alias", "fake-model")


@pytest.mark.parametrize(
    ("engine_param", "fields", "sent"),
    [
        ("logprobs", {"logprobs": True, "top_logprobs": 20}, "top_logprobs"),
        ("prompt", {}, "messages"),
        ("max_tokens", {"max_completion_tokens": 5}, "max_completion_tokens"),
        ("max_tokens", {"max_tokens": 5}, "max_tokens"),
    ],
)
async def test_engine_errors_name_the_field_that_was_sent(serve, chat_body, envelope, engine_param, fields, sent):
    client, _ = await serve(FakeEngine(refuses=[InvalidRequest(f"{engine_param} is wrong", param=engine_param)]))
    await envelope(await client.post(URL, json=chat_body(**fields)), 400, param=sent)


async def test_truncation_only_when_asked(serve, chat_body, envelope):
    engine = FakeEngine()
    engine.model.max_model_len = 30
    client, _ = await serve(engine)
    long = [{"role": "user", "content": "x" * 50}]
    error = await envelope(
        await client.post(URL, json=chat_body(messages=long)), 400, param="messages", code="context_length_exceeded"
    )
    assert "30" in error["message"]
    assert "69" in error["message"]
    for keep, expected in ((12, 12), (-1, 20)):
        body = chat_body(messages=long, truncate_prompt_tokens=keep, max_tokens=10)
        answer = await (await client.post(URL, json=body)).json()
        assert answer["usage"]["prompt_tokens"] == expected
    await envelope(
        await client.post(URL, json=chat_body(truncate_prompt_tokens=0)), 400, param="truncate_prompt_tokens"
    )


async def test_a_body_of_several_mib(serve, chat_body):
    engine = FakeEngine()
    engine.model.max_model_len = 10**8
    client, _ = await serve(engine)
    data = json.dumps(chat_body(messages=[{"role": "user", "content": "x" * (4 << 20)}]))
    answer = await (await client.post(URL, data=data)).json()
    assert answer["usage"]["prompt_tokens"] > 4 << 20
