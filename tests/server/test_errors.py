"""Every fault of a request: a small 4xx or 5xx in the exact envelope, and the others go on."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_fakes import FakeEngine

from aengine.errors import ALL_RULED_OUT, EngineDead, InvalidRequest, QueueFull
from aengine.runner.native_sampler import fault_message
from aengine.server.body import decode_json
from aengine.server.envelope import error_response
from aengine.server.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from aengine.types import FinishReason

URL = "/v1/chat/completions"
field_names = st.sampled_from(["messages", "prompt", "tokens", "role", "content", "stop", "n", "x"]) | st.text()
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(field_names, inner, max_size=4),
    max_leaves=12,
)
DEEP = b"[" * 100_000 + b"]" * 100_000
HI = b'"messages":[{"role":"user","content":"hi"}]'


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b"null", None),
        (b'"x"', None),
        (b"\xff\xfe{", None),
        (b'{"messages":[{"role":"user","content":"\xff"}]}', None),
        (b'{"messages":[{"role":"user","content":"\\ud800x"}]}', None),
        (b"{" + HI + b',"temperature":NaN}', "temperature"),
        (b"{" + HI + b',"top_p":-Infinity}', "top_p"),
        (b"{" + HI + b',"temperature":1e999}', "temperature"),
        (b"{" + HI + b',"temperature":"hot"}', "temperature"),
        (b"{" + HI + b',"n":1.5}', "n"),
        (b"{" + HI + b',"n":true}', "n"),
        (b"{" + HI + b',"stop":[1]}', "stop[0]"),
        (b"{" + HI + b',"stream_options":{"include_usage":3}}', "stream_options.include_usage"),
        (b"{" + HI + b',"x":' + DEEP + b"}", None),
        (b'{"messages":' + DEEP + b"}", None),
        (b"{" + HI + b',"chat_template_kwargs":{"a":' + DEEP + b"}}", None),
        (b"{}", "messages"),
        (b'{"messages":[]}', "messages"),
        (b'{"messages":null}', "messages"),
    ],
    ids=range(22),
)
async def test_malformed_bodies(serve, envelope, body, param):
    client, engine = await serve()
    error = await envelope(await client.post(URL, data=body), 400, param=param)
    assert error["type"] == "invalid_request_error"
    assert not engine.submitted


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 2**70}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"seed": 2**65}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -3}, "max_completion_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"258": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [258]}, "allowed_token_ids"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 1025}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"priority": "high"}, "priority"),
        ({"messages": [{"role": "user", "content": ""}] * 16_385}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 1_025}, "tools"),
        ({"logit_bias": {str(i): 1 for i in range(16_385)}}, "logit_bias"),
    ],
)
async def test_values_out_of_range(serve, chat_body, envelope, fields, param):
    client, engine = await serve()
    await envelope(await client.post(URL, json=chat_body(**fields)), 400, param=param)
    assert not engine.submitted


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_anything_new": 1}, "guided_anything_new"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"grammar": "root ::= x"}, "grammar"),
        ({"regex": "x"}, "regex"),
        ({"logits_processors": ["x"]}, "logits_processors"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
    ],
)
@pytest.mark.parametrize("url", [URL, "/v1/completions"])
async def test_constraints_are_refused_never_dropped(serve, chat_body, envelope, fields, param, url):
    client, _ = await serve()
    body = chat_body(**fields) if url == URL else {"prompt": "x", **fields}
    await envelope(await client.post(url, json=body), 400, param=param)


async def test_errors_never_repeat_a_large_body(serve, chat_body, envelope):
    client, _ = await serve()
    big = "x" * 1_000_000
    role = chat_body(messages=[{"role": big, "content": ""}])
    for body in (role, chat_body(model=big), chat_body(tool_choice=big), chat_body(logit_bias={big: 1})):
        response = await client.post(URL, json=body)
        await envelope(response, response.status)
    await envelope(await client.post("/" + "y" * 5_000), 404)


async def test_too_many_fields(serve, chat_body, envelope):
    client, _ = await serve()
    many = {f"field{i}": 1 for i in range(100_000)}
    error = await envelope(await client.post(URL, json=chat_body(**many)), 400)
    assert "100002" in error["message"]


@given(st.binary(max_size=60) | json_values.map(json.dumps).map(str.encode))
def test_any_body_is_decoded_or_refused(data):
    """Whatever the bytes, the only exception is a small InvalidRequest."""
    for schema in (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, dict[str, msgspec.Raw]):
        refusal = None
        try:
            decode_json(data, schema)
        except InvalidRequest as error:
            refusal = error
        assert refusal is None or len(error_response(refusal).body) < 2_500


async def test_unknown_model(serve, chat_body, envelope):
    client, _ = await serve()
    error = await envelope(
        await client.post(URL, json=chat_body(model="gpt-9")), 404, param="model", code="model_not_found"
    )
    assert "gpt-9" in error["message"]
    assert "fake-model" in error["message"]
    assert "fake-alias" in error["message"]
    await envelope(await client.get("/v1/models/other/one"), 404, code="model_not_found")


@pytest.mark.parametrize("chunked", [False, True])
async def test_body_too_large(serve, envelope, chunked):
    client, _ = await serve(max_body_bytes=65_536)

    async def pieces():
        for _ in range(100):
            yield b" " * 100_000

    data = pieces() if chunked else b" " * 10_000_000
    error = await envelope(await client.post(URL, data=data), 413, code="body_too_large")
    assert "65536" in error["message"]
    if not chunked:
        assert "10000000" in error["message"]


async def test_compressed_bodies(serve, chat_body, envelope):
    client, _ = await serve(max_body_bytes=65_536)
    headers = {"Content-Encoding": "gzip"}
    good = gzip.compress(json.dumps(chat_body()).encode())
    assert (await client.post(URL, data=good, headers=headers)).status == 200
    bomb = gzip.compress(b" " * 50_000_000)
    assert len(bomb) < 65_536
    await envelope(await client.post(URL, data=bomb, headers=headers), 413)
    await envelope(await client.post(URL, data=b"not gzip", headers=headers), 400)


async def test_paths_and_methods(serve, envelope):
    client, _ = await serve()
    await envelope(await client.get("/v2/x"), 404, code="not_found")
    response = await client.get(URL)
    await envelope(response, 405, code="method_not_allowed")
    assert response.headers["Allow"] == "POST"
    await envelope(await client.post("/health"), 405)
    await envelope(await client.post("/v1/embeddings", json={"input": "x"}), 501, code="not_supported")


@pytest.mark.parametrize("phase", ["created", "loading model", "draining", "closed"])
async def test_503_with_phase_until_ready(serve, chat_body, envelope, phase):
    client, _ = await serve(FakeEngine(phase=phase))
    said = "draining" if phase == "closed" else phase
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/reset_prefix_cache"):
        response = await client.post(path, json=chat_body())
        error = await envelope(response, 503, code="not_ready")
        assert said in error["message"]
        assert int(response.headers["Retry-After"]) >= 1
        assert response.headers["x-aengine-phase"] == phase
    for path in ("/health", "/v1/models", "/tokenizer_info"):
        response = await client.get(path)
        await envelope(response, 503)
        assert "Retry-After" in response.headers
        assert response.headers["x-aengine-phase"] == phase
    assert (await client.get("/version")).status == 200
    assert (await client.get("/")).status == 200


async def test_dead_engine(serve, chat_body, envelope):
    client, _ = await serve(FakeEngine(phase="dead"))
    error = await envelope(await client.post(URL, json=chat_body()), 500, code="engine_dead")
    assert error["message"] == "it broke"
    assert "it broke" in (await envelope(await client.get("/health"), 503))["message"]


@pytest.mark.parametrize(
    ("error", "status"),
    [(QueueFull("1024 wait; at most 1024 may"), 429), (EngineDead("gone"), 500), (KeyError("x"), 500)],
)
async def test_refusals_of_the_engine(serve, chat_body, envelope, error, status, caplog):
    client, _ = await serve(FakeEngine(refuses=[error]))
    with caplog.at_level(logging.CRITICAL):
        response = await client.post(URL, json=chat_body(stream=True))
    await envelope(response, status)
    assert ("Retry-After" in response.headers) == (status == 429)


async def test_faults_do_not_disturb_a_running_stream(serve, chat_body, events):
    client, engine = await serve(FakeEngine(reply=["x"] * 50, step_s=0.01))
    stream = await client.post(URL, json=chat_body(stream=True))
    bad = [b"{", b'{"messages":' + DEEP + b"}", b" " * 10_000_000, json.dumps(chat_body(n=0)).encode()]
    statuses = await asyncio.gather(*[client.post(URL, data=body) for body in bad * 5])
    assert {response.status for response in statuses} == {400, 413}
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in events(await stream.text())[:-1])
    assert text == "x" * 50
    assert not engine.open


@pytest.mark.parametrize("item", [b"1", b"{}", b"[]", b'""', b'{"a":1}'])
async def test_bodies_of_very_many_small_values_hold_nothing_up(serve, item):
    """At the size limit, 8 MiB, such a body decodes for up to a second; refusing it is one count of its commas."""
    client, _ = await serve()
    count = (8 * 2**20 - 100) // (len(item) + 1)
    for body in (b'{"prompt":[' + b",".join([item] * count) + b"]}", b'{"x":[' + b",".join([item] * count) + b"]}"):
        response = await client.post("/v1/completions", data=body, headers={"Content-Type": "application/json"})
        assert response.status == 400
        assert "at most 262144 are accepted" in (await response.json())["error"]["message"]
    text = json.dumps({"prompt": "one, two, " * 20_000, "max_tokens": 1})
    refused = await (await client.post("/v1/completions", data=text)).json()
    assert refused["error"]["code"] == "context_length_exceeded"  # as any long text, commas or not


@pytest.mark.parametrize("stream", [False, True])
async def test_constraints_that_leave_no_token_are_the_requests_own_fault(serve, chat_body, stream):
    client, _ = await serve(FakeEngine(reply=[], finish=FinishReason.ERROR, error=ALL_RULED_OUT))
    response = await client.post("/v1/chat/completions", json=chat_body(stream=stream))
    text = await response.text()
    assert response.status == 400
    assert '"code":"no_token_allowed"' in text
    assert fault_message(9) == ALL_RULED_OUT  # what the samplers say
