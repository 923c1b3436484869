"""The load generator against a server whose timing and faults are known."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from load import WARM_UP, WORDS, WORKLOADS, Beside, LoadError, Prompt, Prompts, Streams, Target, measure

from .fake_peer import BROKEN, LONG_READ, REFUSED, Peer, start

IDS = {f" {word}": 100 + i for i, word in enumerate(dict.fromkeys(WORDS))}


def encode(text: str) -> list[int]:
    return [IDS[f" {word}"] for word in text.split()]


PROMPTS = Prompts.of(encode)


@contextlib.asynccontextmanager
async def served(peer: Peer) -> AsyncIterator[str]:
    runner, url = await start(peer)
    try:
        yield url
    finally:
        await runner.cleanup()


class Unlucky(Prompts):
    """Prompts number 1 and 2 begin with planted faults."""

    def make(self, tokens: int, tag: str) -> Prompt:
        made = super().make(tokens, tag)
        fault = {"1": REFUSED, "2": BROKEN}.get(tag)
        return Prompt((fault, *made.ids[1:]), made.text) if fault else made


def test_text_and_ids_of_a_prompt_are_the_same_tokens() -> None:
    prompt = PROMPTS.make(300, "a") + PROMPTS.make(20, "b")
    assert len(prompt.ids) == 320
    assert tuple(encode(prompt.text)) == prompt.ids


def test_prompts_repeat_with_their_salt_and_tag_only() -> None:
    made = {(salt, tag): PROMPTS.salted(salt).make(40, tag).ids for salt in ("1", "2") for tag in ("1", "2")}
    assert len(set(made.values())) == 4
    assert made["1", "2"] == PROMPTS.salted("1").make(40, "2").ids


def test_a_vocabulary_without_the_words_is_refused() -> None:
    with pytest.raises(LoadError, match=r"^0 of \d+ words are one token in this vocabulary, not 16$"):
        Prompts.of(lambda text: [1, 2])
    with pytest.raises(LoadError, match="one token each in a sentence"):
        Prompts.of(lambda text: [len(text)])


def test_workloads_have_the_shapes_they_are_named_for() -> None:
    assert list(WORKLOADS) == ["W1", "W2", "W3", "W4", "W5"]
    shapes = [(w.streams, w.prompt_tokens, w.output_tokens) for w in WORKLOADS.values()]
    assert shapes == [(1, 128, 128), (16, 256, 128), (64, 64, 64), (16, 32, 32), (8, 64, 256)]


@pytest.mark.parametrize("url", ["http://10.0.0.1:80", "http://example.org", "http://0.0.0.0:1", "127.0.0.1:8000"])
def test_load_goes_to_loopback_only(url: str) -> None:
    with pytest.raises(LoadError, match="loopback"):
        Target(url, "m")


async def test_a_closed_loop_keeps_its_streams_busy() -> None:
    peer = Peer(token_s=0.002)
    async with served(peer) as url:
        work = Streams(streams=4, requests=10, prompt_tokens=8, output_tokens=6, shared_tokens=24)
        measured = await measure(work, Target(url, "fake"), PROMPTS)
    assert (measured["requests"], measured["failed"], measured["short"], measured["errors"]) == (10, 0, 0, [])
    assert peer.most_open == 4
    assert measured["prompt_tokens"] == 10 * 32
    assert len({tuple(body["prompt"][:24]) for body in peer.bodies}) == 1
    assert len({tuple(body["prompt"]) for body in peer.bodies}) == 10
    assert measured["output_tokens_per_s"] == pytest.approx(60 / measured["took_s"])
    assert 0 < measured["itl_p50_ms"] <= measured["itl_p99_ms"] <= measured["itl_max_ms"]
    assert measured["took_s"] >= 3 * 6 * peer.token_s  # ten requests by four streams: three after one another
    assert measured["ttft_p50_ms"] <= measured["ttft_p99_ms"] < 1e3 * measured["took_s"]
    assert 0 < measured["tpot_mean_ms"] <= measured["itl_max_ms"]
    sent = peer.bodies[0]
    assert (sent["model"], sent["ignore_eos"], sent["temperature"], sent["stream"]) == ("fake", True, 0, True)


async def test_what_failed_is_counted_and_left_out() -> None:
    async with served(Peer()) as url:
        work = Streams(streams=2, requests=6, prompt_tokens=8, output_tokens=4)
        measured = await measure(work, Target(url, "fake"), Unlucky(PROMPTS.words))
        nobody = await measure(work, Target("http://127.0.0.1:1", "fake"), PROMPTS)
    assert (measured["requests"], measured["failed"]) == (6, 2)
    assert measured["output_tokens_per_s"] == pytest.approx(16 / measured["took_s"])
    assert measured["errors"] == ["HTTP 400: unlucky", "{'message': 'out of luck'}"]
    assert (nobody["failed"], nobody["ttft_p50_ms"], nobody["output_tokens_per_s"]) == (6, None, 0)
    assert "ClientConnectorError" in nobody["errors"][0]


async def test_a_server_without_ignore_eos_and_token_ids() -> None:
    peer = Peer()
    async with served(peer) as url:
        target = Target(url, "fake", api="chat", prompts="text", ignore_eos=False, body={"min_p": 0.1})
        measured = await measure(Streams(2, 4, 8, 6), target, PROMPTS)
    assert (measured["failed"], measured["short"]) == (0, 4)
    assert measured["output_tokens_per_s"] == pytest.approx(12 / measured["took_s"])
    assert all("ignore_eos" not in body and body["min_p"] == 0.1 for body in peer.bodies)
    assert {body["messages"][0]["content"] for body in peer.bodies} == {PROMPTS.make(8, str(i)).text for i in range(4)}
    with pytest.raises(LoadError, match="chat needs prompts=text"):
        Target(url, "fake", api="chat")


async def test_steady_streams_feel_the_long_prompts() -> None:
    peer = Peer(token_s=0.004)
    async with served(peer) as url:
        target = Target(url, "fake")
        shape = {"streams": 3, "requests": 2, "prompt_tokens": 8, "output_tokens": 30, "long_output_tokens": 3}
        long = Beside(**shape, long_tokens=1500, lead_s=0.1, every_s=0.3)
        stalled = await measure(long, target, PROMPTS)
        while peer.open:  # streams that were cut are noticed at their next token; the time limit is pytest's
            await asyncio.sleep(peer.token_s)
        assert peer.left == 3
        calm = await measure(Beside(**shape, long_tokens=500, lead_s=0.1, every_s=0.3), target, PROMPTS)
    stall_ms = 1e3 * LONG_READ * peer.token_s
    assert stalled["steady_itl_max_ms"] > 0.9 * stall_ms
    assert stalled["long_ttft_p50_ms"] > stall_ms > calm["steady_itl_p50_ms"]
    for measured in (stalled, calm):
        assert 0 < measured["steady_chunks_per_s"] <= 3 / peer.token_s  # three streams, a chunk in token_s at most
    assert (stalled["requests"], stalled["failed"], stalled["prompt_tokens"]) == (2, 0, 3000)


def test_warming_up_is_short() -> None:
    assert WARM_UP.requests * WARM_UP.output_tokens <= 128
