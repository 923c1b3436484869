"""The compatibility checklist of chat front-ends, SDKs and load generators: one test a point, in its order.

Most points have files of their own that look closer; here each is seen once, from outside, over HTTP.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal

import pytest
from aiohttp.test_utils import TestClient, TestServer
from server_fakes import FakeEngine
from test_disconnect import connect
from test_run import BODY, ended, process, until_draining, until_ready
from test_tools import engine_with

from aengine.config import ServerConfig
from aengine.engine.core import Core
from aengine.errors import QueueFull
from aengine.models.detokenize import ByteStream
from aengine.server import create_app
from aengine.server.sse import LOOKS
from tests.engine.conftest import (
    EOS,
    sim,  # noqa: F401
)
from tests.engine.conftest import engine as sim_engine
from tests.waiting import DEADLINE_S, until

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
TOOLS = [
    {"type": "function", "function": {"name": f"tool_{i}", "parameters": {"type": "object", "properties": {}}}}
    for i in range(36)
]


@pytest.fixture
async def on_sim(sim):  # noqa: F811
    """`client, engine = await on_sim(step_s, **scheduler)`: the real engine on the simulated device."""
    closing = []

    async def make(step_s=0.0, **scheduler):
        sim.step_s = step_s
        engine = sim_engine(sim, **scheduler)
        await engine.start()
        client = TestClient(TestServer(create_app(engine, ServerConfig())))
        await client.start_server()
        closing.extend((client.close, engine.close))
        return client, engine

    yield make
    for close in closing:
        await close()


@pytest.fixture
def chunks(serve, chat_body, events):
    """The decoded chunks of one streamed chat."""

    async def ask(engine=None, url=CHAT, **fields):
        client, _ = await serve(engine)
        response = await client.post(url, json=chat_body(stream=True, **fields))
        assert response.status == 200, await response.text()
        return events(await response.text())

    return ask


async def metric(client, name):
    text = await (await client.get("/metrics")).text()
    values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    assert values, f"no metric {name}"
    return sum(map(float, values))


async def test_01_first_chunk_of_each_choice_has_the_role(chunks):
    seen = {}
    for chunk in (await chunks(n=3))[:-1]:
        choice = chunk["choices"][0]
        seen.setdefault(choice["index"], choice)
    assert sorted(seen) == [0, 1, 2]
    assert all(first["delta"] == {"role": "assistant", "content": ""} for first in seen.values())


async def test_02_finish_comes_with_an_empty_delta(chunks):
    *_, last, _ = await chunks()
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "stop")


async def test_03_usage_only_when_asked(chunks):
    assert all("usage" not in chunk for chunk in (await chunks())[:-1])
    asked = await chunks(stream_options={"include_usage": True})
    assert asked[-2]["choices"] == []
    assert asked[-2]["usage"]["total_tokens"] == 27
    assert all(chunk["usage"] is None for chunk in asked[:-2])
    running = await chunks(stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert all(chunk["usage"]["prompt_tokens"] == 20 for chunk in running[:-1])
    grown = [chunk["usage"]["completion_tokens"] for chunk in running[:-1]]
    assert grown == sorted(grown)
    assert (grown[0], grown[-1]) == (3, 7)


async def test_04_done_is_last(chunks):
    assert (await chunks())[-1] == "[DONE]"
    assert (await chunks(url=PLAIN, prompt="a"))[-1] == "[DONE]"


async def test_05_comments_only_in_idle_times(serve, chat_body, keepers):
    client, engine = await serve(FakeEngine(gate=asyncio.Semaphore(0)))
    asked = asyncio.create_task(client.post(CHAT, json=chat_body(stream=True)))
    await keepers.look(LOOKS + LOOKS + 1)
    for _ in range(9):
        engine.gate.release()
    text = await (await asked).text()
    assert text.startswith("data: ")
    assert text.count("\n\n: keep-alive\n\n") == 1
    client, _ = await serve()
    assert "\n:" not in await (await client.post(CHAT, json=chat_body(stream=True))).text()


class Forgetful(dict):
    def __setitem__(self, key, value):
        """Nothing is kept: a token may stand for another byte next time."""


class Bytes:
    """TokenBytes of tokens of one byte each, which `byte` tells."""

    def __init__(self, byte):
        self.byte = byte

    def whole(self, skipped):
        return Forgetful()

    def __call__(self, token):
        return bytes([self.byte(token)])


async def test_06_only_whole_characters(on_sim, sim, events):  # noqa: F811
    """Each token is one byte of this text."""
    text = "é😀日本e\u0301👩‍👩‍👧"
    data = text.encode()

    def stream(*, skip_special_tokens=True):
        left = iter(data)
        return ByteStream(Bytes(lambda token: next(left)), frozenset())

    sim.tokenizer.stream = stream
    client, _ = await on_sim()
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": len(data), "ignore_eos": True, "stream": True}
    told = events(await (await client.post(CHAT, json=body)).text())[:-1]
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in told]
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


async def test_07_choices_interleave(chunks):
    told = [chunk["choices"][0] for chunk in (await chunks(n=2))[:-1]]
    assert [choice["index"] for choice in told][:6] == [0, 1] * 3
    for index in (0, 1):
        mine = [choice for choice in told if choice["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert [choice["finish_reason"] for choice in mine] == [None] * 4 + ["stop"]


async def test_08_tool_calls_stream_in_pieces(chunks):
    call = '<tool_call>\n{"name": "tool_7", "arguments": {"city": "Rome"}}\n</tool_call>'
    engine = engine_with([call[i : i + 6] for i in range(0, len(call), 6)])
    told = [chunk["choices"][0] for chunk in (await chunks(engine, tools=TOOLS))[:-1]]
    calls = [choice["delta"]["tool_calls"][0] for choice in told if "tool_calls" in choice["delta"]]
    assert (calls[0]["index"], calls[0]["type"], calls[0]["function"]["name"]) == (0, "function", "tool_7")
    assert calls[0]["id"]
    assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in calls[1:])
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"city": "Rome"}
    assert (told[-1]["delta"], told[-1]["finish_reason"]) == ({}, "tool_calls")


async def test_09_tool_choice_is_enforced(serve, chat_body, envelope, on_sim, sim):  # noqa: F811
    client, engine = await serve(engine_with(["x"]))
    named = {"type": "function", "function": {"name": "tool_3"}}
    for choice, allowed in (("required", 36), (named, 1)):
        assert (await client.post(CHAT, json=chat_body(tools=TOOLS, tool_choice=choice))).status == 200
        grammar = engine.submitted[-1]["sampling"].grammar
        assert len(set(re.findall(r"tool_\d+", grammar.source))) == allowed
    # A device that draws bytes without sense calls the tool all the same.
    sim.context = 40_000
    sim.tokenizer.stream = lambda *, skip_special_tokens=True: ByteStream(Bytes(lambda token: token), frozenset({EOS}))
    sim.tokenizer.token_bytes = lambda token: bytes([token])
    real, _ = await on_sim()
    tools = [tool["function"] | {"parameters": {"enum": [{}]}} for tool in TOOLS[:4]]
    tools = [{"type": "function", "function": tool | {"strict": False}} for tool in tools]
    for choice, allowed in (("required", {"tool_0", "tool_1", "tool_2", "tool_3"}), (named, {"tool_3"})):
        body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": choice}
        answer = (await (await real.post(CHAT, json=body | {"parallel_tool_calls": False})).json())["choices"][0]
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["name"] in allowed
        assert json.loads(call["function"]["arguments"]) == {}
        assert (answer["message"]["content"], answer["finish_reason"]) == (None, "tool_calls")
    named["function"]["name"] = "unknown"
    body = chat_body(tools=TOOLS, tool_choice=named)
    await envelope(await client.post(CHAT, json=body), 400, param="tool_choice")


@pytest.mark.parametrize(
    ("url", "restriction"),
    [
        (CHAT, lambda form: {"response_format": {"type": "json_schema", "json_schema": form}}),
        ("/v1/responses", lambda form: {"text": {"format": {"type": "json_schema", **form}}}),
        ("/v1/messages", lambda form: {"output_config": {"format": {"type": "json_schema", "schema": form["schema"]}}}),
    ],
    ids=["chat", "responses", "messages"],
)
async def test_10_strict_schemas_hold(on_sim, sim, url, restriction):  # noqa: F811
    """The device draws tokens without sense, each a byte; the schema alone makes a value of them."""
    sim.tokenizer.stream = lambda *, skip_special_tokens=True: ByteStream(Bytes(lambda token: token), frozenset({EOS}))
    sim.tokenizer.token_bytes = lambda token: bytes([token])
    properties = {"kind": {"enum": ["cat", "dog"]}, "old": {"type": "boolean"}, "age": {"enum": [1, 22, 333]}}
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    client, _ = await on_sim()
    asked = [{"role": "user", "content": "x"}]
    body = {"input": "x"} if url == "/v1/responses" else {"messages": asked, "max_tokens": 200}
    body |= restriction({"name": "pet", "strict": True, "schema": schema})
    response = await client.post(url, json=body)
    assert response.status == 200, await response.text()
    answer = await response.json()
    if url == CHAT:
        text = answer["choices"][0]["message"]["content"]
    elif url == "/v1/responses":
        text = answer["output"][0]["content"][0]["text"]
    else:
        text = answer["content"][0]["text"]
    pet = json.loads(text)
    assert list(pet) == ["kind", "old", "age"]
    assert pet["kind"] in ("cat", "dog")
    assert isinstance(pet["old"], bool)
    assert pet["age"] in (1, 22, 333)


async def test_11_echo_with_logprobs(serve):
    client, _ = await serve()
    body = {"prompt": [[97, 98], [99, 100, 101]], "echo": True, "logprobs": 1, "max_tokens": 1}
    answer = await (await client.post(PLAIN, json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice, prompt in zip(answer["choices"], body["prompt"], strict=True):
        scores = choice["logprobs"]
        assert len(scores["tokens"]) == len(prompt) + 1
        assert scores["tokens"][:-1] == [chr(token) for token in prompt]
        assert (scores["token_logprobs"][0], scores["top_logprobs"][0]) == (None, None)
        assert all(isinstance(value, float) for value in scores["token_logprobs"][1:])
        assert [isinstance(top, dict) for top in scores["top_logprobs"][1:]] == [True] * len(prompt)
        assert choice["text"].startswith("".join(scores["tokens"][:-1]))


async def test_12_embeddings_are_a_clean_501(serve, envelope):
    client, _ = await serve()
    for encoding in ("base64", "float"):
        body = {"input": "x", "model": "fake-model", "encoding_format": encoding}
        await envelope(await client.post("/v1/embeddings", json=body), 501, code="not_supported")
    await envelope(await client.post("/v1/load_lora_adapter", json={"lora_name": "x"}), 501, code="not_supported")
    await envelope(await client.post("/v1/unload_lora_adapter", json={"lora_name": "x"}), 501, code="not_supported")


async def test_13_envelopes(serve, chat_body, envelope):
    client, _ = await serve(FakeEngine(refuses=[QueueFull("full")]), api_key="k", max_body_bytes=4096)
    key = {"Authorization": "Bearer k"}
    await envelope(await client.post(CHAT, json=chat_body()), 401, code="invalid_api_key")
    await envelope(await client.post(CHAT, data="{", headers=key), 400)
    await envelope(await client.post(CHAT, json=chat_body(model="x"), headers=key), 404, code="model_not_found")
    await envelope(await client.get(CHAT, headers=key), 405)
    await envelope(await client.post(CHAT, data=" " * 5000, headers=key), 413)
    await envelope(await client.post(CHAT, json=chat_body(), headers=key), 429)
    loading, _ = await serve(FakeEngine(phase="loading model"))
    await envelope(await loading.post(CHAT, json=chat_body()), 503)


async def test_14_retry_after(serve, chat_body):
    client, engine = await serve(FakeEngine(refuses=[QueueFull("full", retry_after_s=7), QueueFull("full")]))
    told = []
    for phase in ("ready", "ready", "loading model"):
        engine.phase = phase
        response = await client.post(CHAT, json=chat_body())
        told.append((response.status, int(response.headers["Retry-After"])))
    assert told[:2] == [(429, 7), (429, 1)]
    assert told[2][0] == 503
    assert told[2][1] >= 1


async def test_15_request_ids(serve, chat_body):
    client, _ = await serve()
    for url, body in ((CHAT, chat_body()), ("/v1/responses", {"input": "x"}), ("/nowhere", {})):
        response = await client.post(url, json=body, headers={"x-request-id": "mine"})
        assert response.headers["x-request-id"] == "mine"
        first, second = [(await client.post(url, json=body)).headers["x-request-id"] for _ in range(2)]
        assert first.startswith("req-")
        assert first != second


async def test_16_options_needs_no_key(serve):
    client, _ = await serve(api_key="k")
    asked = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
    response = await client.options(CHAT, headers=asked)
    assert response.status == 204
    assert response.headers["Access-Control-Allow-Origin"] == "http://localhost:3000"


async def test_17_the_root_answers_head_and_get(serve):
    client, _ = await serve(api_key="k")
    for method in ("HEAD", "GET"):
        response = await client.request(method, "/")
        assert response.status == 200
        assert bool(await response.read()) == (method == "GET")


async def test_18_unknown_fields_are_named(serve, chat_body):
    client, _ = await serve()
    bodies = [(CHAT, chat_body()), (PLAIN, {"prompt": "a"}), ("/v1/responses", {"input": "x"})]
    bodies += [("/v1/messages", {"messages": chat_body()["messages"], "max_tokens": 5}), ("/tokenize", {"prompt": "a"})]
    for url, body in bodies:
        response = await client.post(url, json={**body, "frobnicate": 1})
        assert response.status == 200
        assert response.headers["x-aengine-ignored"] == "frobnicate"


@pytest.mark.parametrize(
    ("name", "value"),
    [("guided_json", {"type": "object"}), ("guided_regex", "a+"), ("guided_choice", ["a", "b"]), ("guided_new", 1)],
)
async def test_19_guided_fields_are_honoured_or_refused(serve, chat_body, envelope, name, value):
    client, engine = await serve()
    response = await client.post(CHAT, json=chat_body(**{name: value}))
    if response.status == 200:
        assert engine.submitted[0]["sampling"].grammar is not None
    else:
        await envelope(response, 400, param=name)


async def test_20_both_length_limits(serve, chat_body):
    client, engine = await serve()
    for fields, limit in (
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 2, "max_completion_tokens": 6}, 2),
        ({"max_tokens": 6, "max_completion_tokens": 3}, 3),
    ):
        answer = await (await client.post(CHAT, json=chat_body(**fields))).json()
        assert engine.submitted[-1]["sampling"].max_tokens == limit
        assert answer["usage"]["completion_tokens"] == limit


async def test_21_forms_of_content(serve, chat_body):
    client, engine = await serve()
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    assert (await client.post(CHAT, json=chat_body(messages=messages))).status == 200
    plain, parts, null = engine.text.calls[0][0]
    assert (plain["content"], parts["content"]) == ("a", "b\nc")
    assert "f" in (null["content"] or "") or null["tool_calls"][0]["function"]["name"] == "f"


async def test_22_roles(serve, chat_body, envelope):
    client, engine = await serve()
    roles = ("system", "developer", "user", "assistant", "tool")
    messages = [{"role": role, "content": role} for role in roles]
    assert (await client.post(CHAT, json=chat_body(messages=messages))).status == 200
    assert [message["content"] for message in engine.text.calls[0][0]] == list(roles)
    told = [message["role"] for message in engine.text.calls[0][0]]
    assert told == ["system", "system", "user", "assistant", "tool"]  # what templates call them
    wrong = [{"role": "robot", "content": "x"}]
    await envelope(await client.post(CHAT, json=chat_body(messages=wrong)), 400, param="messages[0].role")


@pytest.mark.parametrize("kind", ["streaming", "whole", "queued"])
async def test_23_a_disconnect_frees_the_pages(on_sim, sim, monkeypatch, kind):  # noqa: F811
    """At most depth + 1 steps are launched behind the abort, which comes with the end of the socket."""
    steps, abort = [], Core.abort

    def noted(core, handle):
        steps.append(core.progress.steps)
        abort(core, handle)

    monkeypatch.setattr(Core, "abort", noted)
    client, engine = await on_sim(max_num_seqs=1)
    sim.hold(30)
    prompt = {"prompt": "x" * 40, "max_tokens": 200, "ignore_eos": True}
    writers = [(await connect(client, PLAIN, prompt | {"stream": kind == "streaming"}))[1]]
    await until(lambda: engine.stats().running == 1)
    if kind == "queued":
        writers.append((await connect(client, PLAIN, prompt))[1])
        await until(lambda: engine.stats().waiting == 1)
        writers.pop().close()
        await until(lambda: steps)
        sim.hold(5)
        await until(lambda: engine.stats().waiting == 0)
        assert engine.stats().running == 1
    before = len(steps)
    writers[0].close()
    await until(lambda: len(steps) > before)
    sim.free()
    await until(lambda: engine.stats().running == 0)
    assert engine.stats().steps - steps[-1] <= engine.config.scheduler.depth + 1
    assert engine.stats().steps < 200  # it did not run to its end
    assert engine.stats().kv_usage == 0
    await until(lambda: engine.stats().open_streams == 0)  # the output task hears of it last


async def test_24_36_tools(serve, chat_body):
    for template in ("<tool_call> {{ tools }}", "{{ messages }}"):
        client, engine = await serve(engine_with(["x"], template))
        for stream in (False, True):
            response = await client.post(CHAT, json=chat_body(tools=TOOLS, stream=stream))
            assert response.status == 200
            told = response.headers.get("x-aengine-ignored")
        assert all(call["tools"] == TOOLS for _, call in engine.text.calls)
        assert all(submitted["sampling"].grammar is None for submitted in engine.submitted)
        assert told == (None if "tools" in template else "tools")  # not dropped in silence


async def test_25_tokenizer_endpoints(serve, chat_body):
    client, _ = await serve()
    plain = await (await client.post("/tokenize", json={"prompt": "ab"})).json()
    assert plain["tokens"] == [256, 97, 98]
    chat = await (await client.post("/tokenize", json={"messages": chat_body()["messages"]})).json()
    rendered = await (await client.post(CHAT + "/render", json=chat_body())).json()
    assert rendered["token_ids"] == chat["tokens"]
    back = await (await client.post("/detokenize", json={"tokens": chat["tokens"]})).json()
    assert back["prompt"] == rendered["prompt"]
    info = await (await client.get("/tokenizer_info")).json()
    assert (info["eos_token"], info["chat_template"]) == ("</s>", "{{ messages }}{{ tools }}")


async def test_26_reset_prefix_cache_under_load(on_sim):
    client, engine = await on_sim(step_s=0.001)
    body = {"prompt": "the same beginning " * 3, "max_tokens": 40, "temperature": 0, "ignore_eos": True}

    async def ask():
        return (await (await client.post(PLAIN, json=body)).json())["choices"][0]["text"]

    async def resets():
        for _ in range(5):
            assert (await client.post("/reset_prefix_cache")).status == 200
            await asyncio.sleep(0.01)

    *texts, _ = await asyncio.gather(*(ask() for _ in range(8)), resets())
    assert len(set(texts)) == 1
    await until(lambda: engine.stats().kv_usage == 0)

    async def cached():
        usage = (await (await client.post(PLAIN, json=body)).json())["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert await cached() > 40  # those eight left it
    assert (await client.post("/reset_prefix_cache")).status == 200
    assert await cached() == 0


async def test_27_metrics_count_exactly(on_sim, sim, monkeypatch):  # noqa: F811
    client, engine = await on_sim(step_s=0.002)
    aborted, abort = [], engine.abort
    monkeypatch.setattr(engine, "abort", lambda id: aborted.append(id) or abort(id))
    done = {"prompt": "abcdefgh", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    for _ in range(3):
        assert (await client.post(PLAIN, json=done)).status == 200
    sim.hold(20)
    _, writer = await connect(client, PLAIN, done | {"max_tokens": 200})
    await until(lambda: engine.stats().running)
    assert await metric(client, "vllm:num_requests_running") == 1
    while await metric(client, "vllm:time_to_first_token_seconds_count") < 4:
        await asyncio.sleep(0.001)
    writer.close()
    await until(lambda: aborted)
    sim.free()
    await until(lambda: not engine.stats().running)
    await until(lambda: not engine.stats().open_streams)
    for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert await metric(client, gauge) == 0
    text = await (await client.get("/metrics")).text()
    ended = {
        reason: float(n) for reason, n in re.findall(r'request_success_total{.*finished_reason="(\w+)".*} (\S+)', text)
    }
    assert (ended["length"], ended["abort"]) == (3, 1)
    assert await metric(client, "vllm:prompt_tokens_total") == 8 * 4
    assert await metric(client, "vllm:prefix_cache_queries_total") == 8 * 4
    assert await metric(client, "vllm:prefix_cache_hits_total") == 4 * 3  # a page of four each, but for the first
    assert await metric(client, "vllm:time_to_first_token_seconds_count") == 4
    assert await metric(client, "vllm:e2e_request_latency_seconds_count") == 4
    generated = await metric(client, "vllm:generation_tokens_total")
    assert 6 * 3 < generated < 6 * 3 + 200
    assert await metric(client, "vllm:inter_token_latency_seconds_count") == generated - 4


async def test_28_sigterm_drains(tmp_path):
    held = tmp_path / "held"
    held.touch()
    fields = {"reply": ["x"] * 10, "hold_while": str(held), "hold_from": 3}
    async with process(fields, shutdown_timeout_s=DEADLINE_S) as (child, session):
        await until_ready(session)
        running = await session.post(CHAT, json=BODY)
        child.send_signal(signal.SIGTERM)
        await until_draining(session)
        refused = await session.post(CHAT, json=BODY)
        assert (refused.status, "Retry-After" in refused.headers) == (503, True)
        held.unlink()
        text = await running.text()
        assert text.count('"content":"x"') == 10
        assert text.endswith("data: [DONE]\n\n")
        assert await ended(child) == 0


async def test_29_model_names(serve, chat_body, envelope):
    client, _ = await serve()
    for asked, told in (
        ("fake-model", "fake-model"),
        ("fake-alias", "fake-alias"),
        (None, "fake-model"),
        ("", "fake-model"),
    ):
        answer = await (await client.post(CHAT, json=chat_body(model=asked))).json()
        assert answer["model"] == told
    error = await envelope(await client.post(CHAT, json=chat_body(model="x")), 404, code="model_not_found")
    assert "fake-alias" in error["message"]


async def test_30_large_bodies(serve, chat_body, envelope):
    engine = FakeEngine()
    engine.model.max_model_len = 10**8
    client, _ = await serve(engine)
    large = json.dumps(chat_body(messages=[{"role": "user", "content": "x" * (3 << 20)}]))
    assert (await client.post(CHAT, data=large)).status == 200
    await envelope(await client.post(CHAT, data=b" " * (9 << 20)), 413, code="body_too_large")
