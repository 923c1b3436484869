"""`aengine chat --url`: against a scripted server in a thread."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager

import pytest

from aengine.cli import chat
from aengine.cli.remote import Address, Remote, Unreachable
from aengine.errors import AengineError, ContextLengthExceeded, InvalidRequest
from aengine.types import SamplingParams
from tests.e2e.scripted import Refusal, Reply

ASK = [{"role": "user", "content": "x"}]


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
    with pytest.raises(InvalidRequest, match=r"v1/models answered 401: missing or wrong API key \(--api-key or"):
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


@contextmanager
def canned(*answers):
    """A server that says what it is told to, one answer a connection, and hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        for answer in answers:
            connection, _ = listener.accept()
            with connection:
                while b"\r\n\r\n" not in connection.recv(65_536):
                    pass
                connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread.join()
    listener.close()


def response(body, kind="application/json", status="200 OK", more=""):
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n{more}\r\n{body}".encode()


MODELS = response('{"data": [{"id": "m"}]}')


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (response("<html>", "text/html"), r"/v1/models is no list of models \(text/html\)"),
        (response("<html>", "text/html", "502 Bad Gateway"), "/v1/models answered 502: Bad Gateway$"),
        (response("[1]"), "is no list of models"),
        (response('{"data": null}'), "is no list of models"),
        (response('{"data": [3]}'), "is no list of models"),
        (response('{"data": []}'), "serves no model"),
        (response('{"detail": "busy"}', status="429 x", more="Retry-After: 7\r\n"), r"429: busy \(try again in 7 s\)"),
        (b"SSH-2.0-OpenSSH\r\n", ": SSH-2.0-OpenSSH$"),
        (b"", "Remote end closed connection"),
    ],
)
def test_what_is_no_server_of_models_is_told(answer, told):
    with canned(answer) as url, pytest.raises(AengineError, match=told) as caught:
        Remote(url, None, None)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("answer", "kind", "told"),
    [
        (response("<html>", "text/html"), Unreachable, "answered with text/html, not with a stream$"),
        (response('{"object": "error", "message": "no"}'), Unreachable, "application/json, not with a stream: no$"),
        (
            response('{"error": {"message": "9 of 8", "code": "context_length_exceeded"}}', status="400 Bad"),
            ContextLengthExceeded,
            "answered 400: 9 of 8$",
        ),
        (response("data: {}\n\n", "text/event-stream"), Unreachable, "ended before the answer was complete"),
        (response("data: [3]\n\n", "text/event-stream"), Unreachable, r"sent what is no chunk of an answer: '\[3\]'"),
    ],
)
def test_what_is_no_answer_is_told(answer, kind, told):
    with canned(MODELS, answer) as url:
        remote = Remote(url, None, None)
        with pytest.raises(kind, match=told):
            list(remote.answers(ASK, SamplingParams()))


def test_https_to_a_server_without_it_is_told(script):
    with pytest.raises(Unreachable, match=r"; is it http://\?"):
        Remote(script.url.replace("http:", "https:"), None, None)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("here:8000", "http://here:8000"),
        ("https://here/v1/", "https://here"),
        ("http://here/a/v1", "http://here/a"),
        ("http://[::1]:1/é", "http://[::1]:1/%C3%A9"),
    ],
)
def test_addresses(url, address):
    assert str(Address.read(url)) == address


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://",
        "ftp://x",
        "http://x:port",
        "http://x:99999",
        "http://[::1",
        "http://a b",
        "x/?a=1",
        "http://x\x01",
    ],
)
def test_what_is_no_address_is_told(url):
    with pytest.raises(InvalidRequest, match="is not the address of a server"):
        Address.read(url)


def test_a_password_in_a_url_is_refused_and_not_shown():
    with pytest.raises(InvalidRequest, match="--api-key") as caught:
        Address.read("http://me:hidden@here")
    assert "hidden" not in caught.value.message
