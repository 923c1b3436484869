"""Answers over the wire: whatever comes is an answer or a typed error."""

import io

import pytest

from aengine.cli.streams import MAX_LINE_BYTES, Gathered, Malformed, chunks, said
from aengine.errors import InvalidRequest


def read(data):
    """-> (the last answer, whether it is complete)"""
    gathered = Gathered()
    last = None
    for chunk in chunks(io.BytesIO(data)):
        last = gathered.add(chunk)
    return last, gathered.complete


def delta(inside, finish="null"):
    return b'data: {"choices": [{"delta": {%s}, "finish_reason": %s}]}\n\n' % (inside.encode(), finish.encode())


def test_an_answer_is_complete_by_its_last_line_or_by_its_reason():
    part = delta('"content": "a"')
    assert read(part)[1] is False
    assert read(part + b"data: [DO")[1] is False
    assert read(part + b"data: [DONE]\n")[1] is True
    answer, complete = read(part + delta("", '"length"'))
    assert (answer.text, answer.cut_off, complete) == ("a", True, True)


def test_what_is_no_event_is_passed_over():
    assert read(b": ping\r\n\r\nevent: x\nid: 3\n\ndata: {}\r\n\r\n" + delta('"content": "a"'))[0].text == "a"


def test_halves_of_characters_are_joined_and_those_without_their_other_replaced():
    halves = delta(r'"content": "a\ud83d"') + delta(r'"content": "\ude00b"')
    assert read(halves)[0].text == "a😀b"
    assert read(halves[: len(halves) // 2])[0].text == "a"
    assert read(delta(r'"content": "a\ud83db\ude00"'))[0].text == "a\ufffdb\ufffd"
    assert read(b'data: {"choices": [{"delta": {"content": "\xff"}}]}\n')[0].text == "\ufffd"


@pytest.mark.parametrize(
    "event",
    [
        b"[1]",
        b'{"choi',
        b"[" * 100_000,
        b'{"choices": 3}',
        b'{"choices": [3]}',
        b'{"choices": [{"delta": {"content": 7}}]}',
        b'{"choices": [], "usage": {"prompt_tokens": "many"}}',
        b'{"choices": [], "usage": 7}',
    ],
)
def test_what_is_no_chunk_is_told(event):
    with pytest.raises(Malformed, match=r"^sent what is no chunk of an answer: "):
        read(delta('"content": "a"') + b"data: " + event + b"\n\n")


def test_a_line_without_an_end_is_told():
    with pytest.raises(Malformed, match="sent a line of more than 16,777,216 bytes"):
        read(b"x" * MAX_LINE_BYTES)


@pytest.mark.parametrize(
    "event",
    [
        b'{"error": {"message": "3 rows failed"}}',
        b'{"error": "3 rows\\nfailed"}',
        b'{"object": "error", "message": "3 rows failed"}',
        b'{"detail": [{"msg": "3 rows failed"}]}',
    ],
)
def test_an_error_in_a_stream_is_told(event):
    with pytest.raises(InvalidRequest, match=r"^the server broke the answer off: 3 rows failed$"):
        read(delta('"content": "a"') + b"data: " + event + b"\n\n")


def test_a_long_error_is_cut():
    assert said({"error": "x" * 1000}) == "x" * 300 + "…"
    assert said([]) == said(None) == said({"error": None}) == ""
