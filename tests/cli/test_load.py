"""The load generator against a small server of our own."""

import asyncio
import itertools
import json
import re
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from aengine.cli import bench, load
from aengine.cli.load import Load, LoadError, run_load


@dataclass
class Target:
    """A server that streams `max_tokens` chunks, one each `gap_s`, and notes what it was asked."""

    gap_s: float = 0.002
    fail_every: int = 0
    break_stream: bool = False
    tokenizes: bool = True
    models: list = field(default_factory=lambda: [{"id": "m"}])
    bodies: list = field(default_factory=list)
    open: int = 0
    most_open: int = 0
    keys: set = field(default_factory=set)

    def app(self):
        app = web.Application()
        app.router.add_get("/v1/models", self.list_models)
        app.router.add_post("/v1/completions", self.complete)
        if self.tokenizes:
            app.router.add_post("/tokenize", self.tokenize)
        return app

    async def list_models(self, request):
        self.keys.add(request.headers.get("Authorization"))
        return web.json_response({"data": self.models})

    async def tokenize(self, request):
        words = (await request.json())["prompt"].split()
        return web.json_response({"tokens": [100 + len(word) for word in words]})

    async def complete(self, request):
        body = await request.json()
        self.bodies.append(body)
        if self.fail_every and len(self.bodies) % self.fail_every == 0:
            return web.json_response({"error": {"message": "the waiting room is full"}}, status=429)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            return await self.stream(request, body)
        finally:
            self.open -= 1

    async def stream(self, request, body):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for i in range(body["max_tokens"]):
            await asyncio.sleep(self.gap_s)
            if self.break_stream and i == 2:
                await send(response, {"error": {"message": "step 7 failed"}})
                break
            await send(response, {"choices": [{"index": 0, "text": f" {i}"}]})
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        await send(response, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        await send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


async def send(response, event):
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


async def measure(target, **options):
    async with TestServer(target.app()) as server:
        return await run_load(Load(str(server.make_url("/")), **options))


async def test_a_closed_loop_keeps_its_clients_busy_and_no_more():
    target = Target()
    samples, took_s = await measure(target, requests=12, concurrency=3, max_tokens=5, prompt_tokens=7)
    assert len(samples) == len(target.bodies) == 12
    assert target.most_open == 3
    assert took_s >= 4 * 5 * target.gap_s
    for sample in samples:
        assert sample.error is None
        assert (sample.prompt_tokens, sample.completion_tokens) == (7, 5)
        assert len(sample.gaps_s) == 4
        assert sample.ttft_s is not None
        assert target.gap_s * 0.5 < sample.ttft_s < sample.e2e_s
        assert sample.ttft_s + sum(sample.gaps_s) <= sample.e2e_s


async def test_an_open_loop_does_not_wait_for_the_server():
    target = Target(gap_s=0.1)
    samples, _ = await measure(target, requests=8, concurrency=1, rate=400.0, max_tokens=3)
    assert all(sample.error is None for sample in samples)
    assert target.most_open > 4


async def test_prompts_are_exact_ids_of_the_servers_vocabulary():
    target = Target()
    await measure(target, requests=4, prompt_tokens=50, max_tokens=1)
    prompts = [body["prompt"] for body in target.bodies]
    known = {100 + len(word) for word in load.WORDS}
    assert all(len(prompt) == 50 and set(prompt) <= known for prompt in prompts)
    assert len({tuple(prompt) for prompt in prompts}) == 4


async def test_a_server_without_tokenizer_gets_words():
    target = Target(tokenizes=False)
    await measure(target, requests=1, prompt_tokens=50, max_tokens=1)
    (body,) = target.bodies
    assert len(body["prompt"].split()) == 50


async def test_the_same_seed_sends_the_same_prompts():
    first, second, other = Target(), Target(), Target()
    await measure(first, requests=3, concurrency=1, seed=1, max_tokens=1)
    await measure(second, requests=3, concurrency=1, seed=1, max_tokens=1)
    await measure(other, requests=3, concurrency=1, seed=2, max_tokens=1)
    assert first.bodies == second.bodies
    assert first.bodies != other.bodies


async def test_requests_ask_for_full_answers_of_the_first_model():
    target = Target(models=[{"id": "first"}, {"id": "second"}])
    await measure(target, requests=1, max_tokens=2, api_key="k")
    (body,) = target.bodies
    assert body["model"] == "first"
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert target.keys == {"Bearer k"}


async def test_refused_requests_are_counted_not_retried():
    target = Target(fail_every=3)
    samples, _ = await measure(target, requests=9, concurrency=1, max_tokens=1)
    errors = [sample.error for sample in samples if sample.error]
    assert errors == ["HTTP 429: the waiting room is full"] * 3
    assert len(target.bodies) == 9


async def test_an_error_inside_a_stream_fails_its_request():
    samples, _ = await measure(Target(break_stream=True), requests=2, max_tokens=9)
    assert [sample.error for sample in samples] == ["step 7 failed"] * 2


async def test_a_server_without_models_or_none_at_all_is_one_clear_error(unused_tcp_port):
    with pytest.raises(LoadError, match="lists no model"):
        await measure(Target(models=[]))
    with pytest.raises(LoadError, match=r"no server answers on 127.0.0.1:\d+"):
        await run_load(Load(f"http://127.0.0.1:{unused_tcp_port}/"))


def test_arrivals_are_poisson_and_repeatable():
    times = load.arrivals_s(4001, 10.0, seed=3)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert times[0] == 0.0
    assert mean == pytest.approx(0.1, rel=0.1)
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.1)
    assert times == load.arrivals_s(4001, 10.0, seed=3)
    assert times != load.arrivals_s(4001, 10.0, seed=4)


EVENTS = [{"text": "a\nb"}, {"text": "é😀"}, {}]


@given(cuts=st.lists(st.integers(0, 200), max_size=8), newline=st.sampled_from(["\n", "\r\n"]), done=st.booleans())
async def test_sse_may_be_cut_anywhere(cuts, newline, done):
    blocks = [f"data: {json.dumps(event, ensure_ascii=False)}" for event in EVENTS]
    text = (newline * 2).join([": a comment", "event: x" + newline + blocks[0], *blocks[1:]]) + newline * 2
    if done:
        text += f'data: [DONE]{newline * 2}data: {{"after": 1}}{newline * 2}'
    raw = text.encode()
    edges = sorted({0, len(raw), *(min(cut, len(raw)) for cut in cuts)})

    async def chunks():
        for begin, end in itertools.pairwise(edges):
            yield raw[begin:end]

    assert [event async for event in load.sse_events(chunks())] == EVENTS


@pytest.mark.parametrize("data", [b"{", b"[1]", b"\xff"])
async def test_an_event_that_is_no_object_is_an_error(data):
    async def chunks():
        yield b"data: " + data + b"\n\n"

    with pytest.raises(ValueError, match=r".+"):
        [event async for event in load.sse_events(chunks())]


def test_error_messages_are_short():
    assert load.error_message('{"error": {"message": "no"}}') == "no"
    assert load.error_message("<html>" + "x" * 1000) == "<html>" + "x" * 294
    assert load.error_message("[]") == "[]"


@pytest.mark.parametrize(
    "argv",
    [
        ("--num-requests", "0"),
        ("--concurrency", "0"),
        ("--prompt-tokens", "0"),
        ("--rate", "0"),
        ("--rate", "nan"),
        ("ftp://x",),
    ],
)
def test_bench_checks_its_flags(argv):
    with pytest.raises(bench.UsageError):
        bench.run(bench.parser().read(["serve", *argv]))


@pytest.mark.parametrize(("fail_every", "code"), [(0, 0), (2, 1)])
def test_bench_prints_one_json_line(monkeypatch, capsys, fail_every, code):
    """The whole command; the server runs in the same event loop, started by the patched generator."""

    async def local(load):
        target = Target(fail_every=fail_every)
        async with TestServer(target.app()) as server:
            return await run_load(Load(str(server.make_url("/")), requests=load.requests, max_tokens=load.max_tokens))

    monkeypatch.setattr(bench, "run_load", local)
    argv = ["serve", "http://h:1/v1/", "--num-requests", "4", "--max-tokens", "2", "--json", "--api-key", "hidden-key"]
    assert bench.run(bench.parser().read(argv)) == code
    out = capsys.readouterr().out
    record = json.loads(out)
    assert out.count("\n") == 1
    assert record["config"]["base_url"] == "http://h:1/"
    assert record["requests"] == 4
    assert record["failed"] == (2 if fail_every else 0)
    assert record["environment"]["cores"] >= 1
    assert record["environment"]["cpu"]
    assert re.fullmatch(r"[0-9a-f]{7,}\+?|unknown", record["environment"]["commit"])
    assert "hidden-key" not in out
