"""Plain completions: prompt forms, echo, log-probabilities, best_of, streams."""

from __future__ import annotations

import asyncio

import pytest
from server_fakes import FakeEngine, logprob

from aengine.errors import InvalidRequest
from aengine.server.sse import LOOKS

URL = "/v1/completions"


async def ask(client, **fields):
    response = await client.post(URL, json={"model": "fake-model", **fields})
    assert response.status == 200, await response.text()
    return await response.json()


async def test_shape_and_defaults(serve):
    client, engine = await serve(FakeEngine(reply=["x"] * 40))
    answer = await ask(client, prompt="ab")
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [
        {"index": 0, "text": "x" * 16, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"]["prompt_tokens"] == 3
    assert engine.submitted[0]["sampling"].max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[256, 97, 98]]),
        (["a", "b"], [[256, 97], [256, 98]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
async def test_prompt_forms(serve, prompt, ids):
    client, engine = await serve()
    answer = await ask(client, prompt=prompt, n=2)
    assert [stream.prompt_ids for stream in engine.streams] == ids
    assert [c["index"] for c in answer["choices"]] == list(range(2 * len(ids)))
    assert all(c["text"] == "Hello!" for c in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 14 * len(ids)


@pytest.mark.parametrize(
    "prompt", [[], [[]], ["a", 1], [1, [2]], [300], [-1], 5, None, {"a": 1}, [2**70], ["a"] * 1_025]
)
async def test_wrong_prompts(serve, envelope, prompt):
    client, engine = await serve()
    error = await envelope(await client.post(URL, json={"prompt": prompt}), 400)
    assert error["param"].startswith("prompt")
    assert not engine.submitted


async def test_add_special_tokens(serve):
    client, engine = await serve()
    await ask(client, prompt="a", add_special_tokens=False)
    assert engine.streams[0].prompt_ids == [97]


async def test_echo_without_logprobs(serve):
    client, _ = await serve()
    answer = await ask(client, prompt=["ab", "c"], echo=True)
    assert [c["text"] for c in answer["choices"]] == ["abHello!", "cHello!"]
    answer = await ask(client, prompt=[97, 98], echo=True)
    assert answer["choices"][0]["text"] == "abHello!"


async def test_lm_eval_scoring(serve):
    """Token lists, echo, logprobs 1, max_tokens 1: the prompt's tokens and exactly one more."""
    client, engine = await serve()
    prompts = [[97, 98, 99], [100, 101]]
    answer = await ask(client, prompt=prompts, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234)
    assert engine.submitted[0]["sampling"].prompt_logprobs == 1
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        scores = choice["logprobs"]
        assert {len(column) for column in scores.values()} == {len(prompt) + 1}
        assert scores["tokens"] == [chr(i) for i in prompt] + ["H"]
        assert scores["token_logprobs"] == [None] + [-1.5] * len(prompt)
        assert scores["top_logprobs"][0] is None
        for token, top in zip(scores["tokens"][1:], scores["top_logprobs"][1:], strict=True):
            assert isinstance(top, dict)
            assert token in top
        assert scores["text_offset"] == list(range(len(prompt) + 1))
        assert choice["text"] == "".join(scores["tokens"])


async def test_scoring_with_no_new_token(serve):
    client, _ = await serve()
    answer = await ask(client, prompt="ab", echo=True, logprobs=2, max_tokens=0)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["tokens"] == ["<s>", "a", "b"]
    assert answer["usage"]["completion_tokens"] == 0


async def test_max_tokens_0_needs_echo(serve, envelope):
    client, _ = await serve()
    await envelope(await client.post(URL, json={"prompt": "a", "max_tokens": 0}), 400, param="max_tokens")


async def test_logprobs_form(serve):
    client, _ = await serve(FakeEngine(reply=["h\xe9"]))
    scores = (await ask(client, prompt="a", logprobs=3))["choices"][0]["logprobs"]
    assert scores["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "</s>"]
    assert scores["top_logprobs"][0] == {"i": -0.25, "h": -1.5, "j": -9999.0}
    assert scores["text_offset"] == [0, 1, 2, 3]
    zero = (await ask(client, prompt="a", logprobs=0))["choices"][0]["logprobs"]
    assert zero["top_logprobs"][0] == {"h": -1.5}


async def test_prompt_logprobs_and_ids(serve):
    client, _ = await serve()
    choice = (await ask(client, prompt="a", prompt_logprobs=1, return_token_ids=True))["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    assert set(choice["prompt_logprobs"][1]) == {"97", "98"}
    assert choice["prompt_token_ids"] == [256, 97]
    assert choice["token_ids"][-1] == 257


async def test_best_of(serve, monkeypatch):
    client, engine = await serve()
    assert len((await ask(client, prompt="a", best_of=1))["choices"]) == 1
    assert engine.submitted[-1]["sampling"].logprobs is None

    def ranked(self, index, text, tokens, finish=None, error=None):
        from aengine.types import OutputDelta

        entries = tuple(logprob(token, 0) for token in tokens)
        entries = tuple(type(e)(e.token_id, -1.0 if index == 2 else -3.0, 1) for e in entries)
        return OutputDelta(index, f"{index}" if text else "", tokens, entries, finish, None, error)

    monkeypatch.setattr("server_fakes.FakeStream._delta", ranked)
    answer = await ask(client, prompt=["a", "b"], best_of=4)
    assert engine.submitted[-1]["sampling"].n == 4
    assert [c["index"] for c in answer["choices"]] == [0, 1]
    assert [c["text"] for c in answer["choices"]] == ["222", "222"]
    assert all(c["logprobs"] is None for c in answer["choices"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
async def test_wrong_fields(serve, envelope, fields, param):
    client, _ = await serve()
    await envelope(await client.post(URL, json={"prompt": "a", **fields}), 400, param=param)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"best_of": 1, "n": 2}, "best_of", "best_of (1) is less than n (2)"),
        ({"best_of": 0}, "best_of", "best_of (0) is less than n (1)"),
        ({"best_of": 2, "n": 0}, "n", "n is 0; at least 1 is needed"),
        ({"best_of": 3, "stream": True}, "best_of", "best_of (3) greater than n (1) cannot be streamed"),
        ({"best_of": 2000}, "best_of", "best_of is 2000, not in [1, 1024]"),
        ({"best_of": 2000, "n": 2000}, "n", "n is 2000, not in [1, 1024]"),
    ],
)
async def test_best_of_against_n(serve, envelope, fields, param, message):
    client, engine = await serve()
    error = await envelope(await client.post(URL, json={"prompt": "a", **fields}), 400, param=param)
    assert error["message"] == message
    assert not engine.submitted


async def test_the_engines_limit_of_choices_is_told_of_best_of(serve, envelope):
    limit = InvalidRequest("n is 200; at most 128 choices are allowed", param="n")
    client, _ = await serve(FakeEngine(refuses=[limit]))
    error = await envelope(await client.post(URL, json={"prompt": "a", "best_of": 200}), 400, param="best_of")
    assert error["message"] == "best_of is 200; at most 128 choices are allowed"


async def test_the_best_n_of_best_of(serve, events):
    client, engine = await serve()
    answer = await ask(client, prompt="a", n=2, best_of=3)
    assert engine.submitted[-1]["sampling"].n == 3
    assert [c["index"] for c in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 3 * 7  # all that were made
    streamed = await client.post(URL, json={"prompt": "a", "n": 2, "best_of": 2, "stream": True})
    told = events(await streamed.text())
    assert {c["choices"][0]["index"] for c in told[:-1]} == {0, 1}


async def test_stream(serve, events):
    client, _ = await serve()
    body = {"prompt": ["a", "b"], "stream": True, "echo": True, "stream_options": {"include_usage": True}}
    chunks = events(await (await client.post(URL, json=body)).text())
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["usage"]["completion_tokens"] == 14
    assert chunks[-2]["choices"] == []
    for index, prompt in enumerate("ab"):
        mine = [c["choices"][0] for c in chunks[:-2] if c["choices"][0]["index"] == index]
        assert [c["text"] for c in mine] == [prompt, "Hel", "lo", "!", ""]
        assert [c["finish_reason"] for c in mine] == [None, None, None, None, "stop"]
    assert all(c["usage"] is None for c in chunks[:-2])


async def test_streamed_scores_join_to_the_whole(serve, events):
    client, _ = await serve()
    fields = {"prompt": "ab", "echo": True, "logprobs": 1, "return_token_ids": True}
    whole = (await ask(client, **fields))["choices"][0]
    chunks = events(await (await client.post(URL, json={**fields, "stream": True})).text())[:-1]
    parts = [c["choices"][0] for c in chunks]
    joined = {key: [x for part in parts for x in (part["logprobs"] or {key: []})[key]] for key in whole["logprobs"]}
    assert joined == whole["logprobs"]
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert [i for part in parts for i in part["token_ids"]] == whole["token_ids"]
    assert parts[0]["prompt_token_ids"] == whole["prompt_token_ids"]


async def test_idle_stream_opens_with_an_empty_text(serve, events, keepers):
    client, engine = await serve(FakeEngine(gate=asyncio.Semaphore(0)))
    asked = asyncio.create_task(client.post(URL, json={"prompt": "a", "stream": True}))
    await keepers.look(LOOKS)
    for _ in range(9):
        engine.gate.release()
    text = await (await asked).text()
    assert text.startswith("data: ")
    assert events(text)[0]["choices"][0]["text"] == ""


async def test_all_prompts_or_none(serve, envelope):
    from aengine.errors import QueueFull

    engine = FakeEngine(refuses=[None, None, QueueFull("3 requests wait; at most 2 may", retry_after_s=7)])
    client, _ = await serve(engine)
    response = await client.post(URL, json={"prompt": ["a", "b", "c"]})
    await envelope(response, 429, code="queue_full")
    assert response.headers["Retry-After"] == "7"
    assert not engine.open
    assert len(engine.aborted) == 2
    assert all(stream.closed for stream in engine.streams)


async def test_a_failing_prompt_ends_the_others(serve, envelope):
    engine = FakeEngine(raises=ValueError("x"), step_s=0.01)
    client, _ = await serve(engine)
    await envelope(await client.post(URL, json={"prompt": ["a", "b", "c"]}), 500)
    assert not engine.open
