"""The real model behind the real server: clients, streams, cancellations, errors, shutdown."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import aiohttp
import openai
import pytest

from tests.e2e.serving import Server, serve
from tests.waiting import until

GREEDY = {"temperature": 0, "ignore_eos": True}
CONTEXT = 2560


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("--max-num-seqs", "64", "--max-model-len", str(CONTEXT)) as running:
        yield running


@pytest.fixture(scope="module")
def split_server() -> Iterator[Server]:
    with serve("--max-num-seqs", "64", "--max-model-len", str(CONTEXT), "--frontends", "2") as running:
        yield running


@pytest.fixture(scope="module", params=["server", "split_server"])
def either(request: pytest.FixtureRequest) -> Server:
    """One process, then two front-ends beside the engine: the same answers."""
    found: Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def client(either: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=either.url + "/v1", api_key="any", max_retries=0, timeout=120) as made:
        yield made


MESSAGES: Any = [{"role": "user", "content": "Name three fruits."}]


def test_start_up_tells_phases_and_memory_in_few_lines(server: Server) -> None:
    text = "".join(server.output)
    assert "weights" in text
    assert "KV pages" in text
    assert "total" in text
    logged = [line for line in server.output if " INFO " in line]
    assert 1 <= len(logged) <= 15


def test_several_tokens_of_one_step_stream_with_their_log_probabilities(client: openai.OpenAI) -> None:
    """A text that repeats itself, so that drafts are accepted; each chunk tells of all its tokens."""
    asked: Any = {"model": "smollm2-135m", "prompt": " red green blue" * 12, "max_tokens": 48, "temperature": 0}
    whole = client.completions.create(**asked, logprobs=1)
    chunks = list(client.completions.create(**asked, logprobs=1, stream=True, stream_options={"include_usage": True}))
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(part.text for part in parts) == whole.choices[0].text
    told = [token for part in parts if part.logprobs for token in part.logprobs.tokens or []]
    assert whole.choices[0].logprobs is not None
    assert told == whole.choices[0].logprobs.tokens
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(told) == 48


def test_openai_chat_streamed_equals_not_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="smollm2-135m", messages=MESSAGES, max_tokens=24, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model="smollm2-135m",
            messages=MESSAGES,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len(text) > 10
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens > 3
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_openai_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2-135m", messages=MESSAGES, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert len(told.content) == 5
    for token in told.content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(top.logprob for top in token.top_logprobs)


def test_openai_errors_and_headers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="smollm2-135m"):
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="smollm2-135m", prompt=[5] * CONTEXT)
    assert long.value.code == "context_length_exceeded"
    assert str(CONTEXT) in str(long.value)
    raw = client.chat.completions.with_raw_response.create(
        model="smollm2-135m",
        messages=MESSAGES,
        max_tokens=1,
        extra_headers={"x-request-id": "mine-1"},
        extra_body={"some_router_field": 1},
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.headers["x-aengine-ignored"] == "some_router_field"


def test_completions_with_choices_seed_and_echo(client: openai.OpenAI) -> None:
    def once() -> list[str]:
        out = client.completions.create(
            model="smollm2-135m", prompt="The sea", n=3, seed=5, max_tokens=12, temperature=0.9, echo=True
        )
        return [choice.text for choice in out.choices]

    first = once()
    assert first == once()
    assert len(set(first)) == 3
    assert all(text.startswith("The sea") for text in first)


def test_curl_streams_line_by_line(either: Server) -> None:
    body = json.dumps({"model": "smollm2-135m", "messages": MESSAGES, "max_tokens": 6, "stream": True, **GREEDY})
    command = ["curl", "-sN", "-i", either.url + "/v1/chat/completions", "-H", "Content-Type: application/json"]
    out = subprocess.run([*command, "-d", body], capture_output=True, text=True, timeout=120, check=True).stdout
    head, _, events = out.partition("\n\n") if "\r\n" not in out else out.partition("\r\n\r\n")
    assert "200 OK" in head
    assert "text/event-stream; charset=utf-8" in head
    lines = [line for line in events.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    first = json.loads(lines[0].removeprefix("data: "))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}


async def stream_ids(
    session: aiohttp.ClientSession, url: str, prompt: Any, tokens: int, sizes: list[int] | None = None
) -> list[int]:
    """Token ids of a streamed greedy completion; `sizes` gets the number of tokens in each chunk as it comes."""
    body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": tokens, "stream": True, "return_token_ids": True}
    ids: list[int] = []
    async with session.post(url + "/v1/completions", json={**body, **GREEDY}) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                new = choice.get("token_ids") or []
                if new and sizes is not None:
                    sizes.append(len(new))
                ids += new
    return ids


async def test_64_streams_are_complete_and_even(either: Server, server: Server) -> None:
    """One token a chunk, most of the time and in every stream: nothing is batched up on the way while the device steps
    back to back. Who shares a busy core may come late for a step, and a front-end for many; what is then merged is
    whole."""
    sizes: list[list[int]] = [[] for _ in range(64)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks = [stream_ids(session, either.url, f"Story number {i}:", 16, sizes[i]) for i in range(64)]
        ids = await asyncio.gather(*tasks)
    assert [len(each) for each in ids] == [16] * 64
    if either is server:
        assert all(chunks.count(1) > len(chunks) / 2 for chunks in sizes), sizes


async def test_200_cancelled_long_prompts_leave_an_empty_pool(either: Server) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(i: int) -> None:
            prompt = [(i * 7919 + j * 31) % 40_000 + 100 for j in range(2000)]
            try:
                async with asyncio.timeout(0.5 + i * 1e-3):
                    await stream_ids(session, either.url, prompt, 64)
            except TimeoutError:
                return

        await asyncio.gather(*(one(i) for i in range(200)))
        await asyncio.to_thread(either.wait_idle)
        assert len(await stream_ids(session, either.url, "Still there?", 4)) == 4
    assert either.metric("vllm:num_requests_running") == 0


BAD: list[tuple[bytes, int]] = [
    (b'{"model": "smollm2-135m", "messages": [', 400),
    (b"[" * 5000 + b"]" * 5000, 400),
    (b'{"model": "smollm2-135m", "messages": "hello"}', 400),
    (b'{"model": "smollm2-135m", "messages": []}', 400),
    (b'{"model": "other", "messages": [{"role": "user", "content": "x"}]}', 404),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', 400),
    (b'{"messages": [{"role": "user", "content": "x"}], "n": 0}', 400),
    (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', 400),
    (b'{"messages": [{"role": "user", "content": "' + b"x" * (10 * 2**20) + b'"}]}', 413),
    (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 5000}', 400),
]


async def test_errors_are_small_and_typed_while_a_stream_goes_on(either: Server) -> None:
    async with aiohttp.ClientSession() as session:
        alone = await stream_ids(session, either.url, "Errors do not disturb", 48)
        came: list[int] = []
        beside = asyncio.create_task(stream_ids(session, either.url, "Errors do not disturb", 48, came))
        await until(lambda: came)
        for body, status in BAD:
            headers = {"Content-Type": "application/json"}
            async with session.post(either.url + "/v1/chat/completions", data=body, headers=headers) as response:
                text = await response.text()
                assert response.status == status, (body[:60], text[:200])
                assert len(text) < 2000
                error = json.loads(text)["error"]
                assert set(error) == {"message", "type", "param", "code"}
        assert await beside == alone


async def test_a_prompt_one_token_too_long_is_refused_with_both_numbers(server: Server) -> None:
    async with aiohttp.ClientSession() as session:
        for tokens, status in ((CONTEXT - 1, 200), (CONTEXT, 400)):
            body = {"prompt": [9] * tokens, "max_tokens": 1}
            async with session.post(server.url + "/v1/completions", json=body) as response:
                answer = await response.json()
                assert response.status == status, answer
        assert answer["error"]["code"] == "context_length_exceeded"
        assert str(CONTEXT) in answer["error"]["message"]


def test_the_second_turn_of_a_chat_hits_the_first(either: Server) -> None:
    messages = [{"role": "user", "content": "Tell me about the moon. " * 8}]
    first: Any = either.post("/v1/chat/completions", {"messages": messages, "max_tokens": 40, **GREEDY})
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And the sun?"}]
    second: Any = either.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4, **GREEDY})
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"] // 16 * 16
    assert cached > 0


def test_sigterm_drains_running_streams_and_ends_with_0() -> None:
    with serve("--max-model-len", "1024") as running:
        body = json.dumps({"prompt": "Once", "max_tokens": 60, "stream": True, **GREEDY})
        command = ["curl", "-sN", running.url + "/v1/completions", "-H", "Content-Type: application/json", "-d", body]
        client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert client.stdout is not None
        client.stdout.readline()
        running.process.send_signal(signal.SIGTERM)
        rest = client.stdout.read()
        assert client.wait(120) == 0
        assert rest.rstrip().endswith("data: [DONE]")
        assert running.process.wait(120) == 0
