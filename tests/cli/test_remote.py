"""`aengine chat --url`: against a scripted server in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from aengine.cli import chat
from aengine.cli.remote import Remote
from aengine.errors import AengineError, InvalidRequest
from aengine.types import SamplingParams
from tests.e2e.scripted import Refusal, Reply, Script, scripted
from tests.waiting import DEADLINE_S

ASK = [{"role": "user", "content": "x"}]


@pytest.fixture
def script(tmp_path, monkeypatch) -> Iterator[Script]:
    monkeypatch.setenv("AENGINE_HOME", str(tmp_path))
    made = Script(key="secret")
    ready, done = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def main():
        async with scripted(made):
            ready.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert ready.wait(DEADLINE_S)
    yield made
    loop.call_soon_threadsafe(done.set)
    thread.join()
    loop.close()


def converse(script, lines, *argv):
    left = iter([*lines, None])

    def ask(_):
        if (line := next(left)) is None:
            raise EOFError
        return line

    return chat.run(chat.parser().read(["--url", script.url + "/v1", "--api-key", "secret", *argv]), ask=ask)


def test_a_conversation_with_a_server(script, capsys):
    script.answers = [Reply([{"reasoning_content": "hm"}, "He", "llo"]), Refusal(400, "too hot"), Reply(["Bye"])]
    converse(script, ["hi", "/set top_k 3", "again", "/model other-model", "so"], "--max-tokens", "9")
    out, err = capsys.readouterr()
    assert out.split() == ["Hello", "Bye"]
    assert "hm" in err
    assert "too hot" in err
    assert "[21 prompt tokens (16 cached) · first token" in err
    first, refused, last = script.bodies
    assert (first["model"], first["max_tokens"], first["temperature"]) == ("small-model", 9, 0.7)
    assert "top_k" not in first
    assert refused["top_k"] == 3
    assert last["model"] == "other-model"
    assert [message["content"] for message in last["messages"]] == ["hi", "Hello", "so"]


def test_what_is_wrong_is_said(script):
    with pytest.raises(InvalidRequest, match="missing or wrong API key"):
        Remote(script.url, None, None)
    with pytest.raises(InvalidRequest, match="'big' is not served; there are small-model, other-model"):
        Remote(script.url, "secret", "big")
    with pytest.raises(InvalidRequest, match="is not the address of a server"):
        Remote("ftp://there", None, None)
    with pytest.raises(AengineError, match=r"127\.0\.0\.1:9"):
        Remote("127.0.0.1:9", None, None)


def test_an_answer_left_early_closes_its_connection(script):
    script.answers = [Reply(["part"], hold=True)]
    remote = Remote(script.url, "secret", None)
    answers = remote.answers(ASK, SamplingParams(max_tokens=None))
    assert next(answer.text for answer in answers if answer.text) == "part"
    answers.close()
    script.answers = [Reply(["whole"])]
    assert [answer.text for answer in remote.answers(ASK, SamplingParams())][-1] == "whole"
