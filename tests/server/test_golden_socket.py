"""A streamed chat as it stands on the wire, read from a bare socket: status line, headers, chunks, frames."""

from __future__ import annotations

import re

from test_disconnect import connect

URL = "/v1/chat/completions"


def unchunked(data):
    """The payload of a chunked body, and nothing behind its end."""
    out = b""
    while True:
        size, data = data.split(b"\r\n", 1)
        n = int(size, 16)
        out, end, data = out + data[:n], data[n : n + 2], data[n + 2 :]
        assert end == b"\r\n"
        if n == 0:
            assert data == b""
            return out


async def test_golden_bytes_on_the_wire(serve, chat_body):
    client, _ = await serve()
    reader, writer = await connect(client, URL, chat_body(stream=True))
    raw = b""
    while not raw.endswith(b"0\r\n\r\n"):
        piece = await reader.read(2**16)
        assert piece, raw
        raw += piece
    writer.close()
    head, body = raw.split(b"\r\n\r\n", 1)
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert status == "HTTP/1.1 200 OK"
    assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert headers["Cache-Control"] == "no-cache"
    assert headers["X-Accel-Buffering"] == "no"
    assert headers["Transfer-Encoding"] == "chunked"
    assert "Content-Length" not in headers
    text = unchunked(body).decode()
    start = re.match(r'data: (\{"id":"chatcmpl-[0-9a-f]{32}","object":"chat.completion.chunk","created":\d+,)', text)
    assert start, text
    frame = r"data: " + re.escape(start[1]) + r'"model":"fake-model","system_fingerprint":"fp_[0-9a-f]{10}","choices":'
    told = re.sub(frame, "data: C:", text)
    assert told == "".join(
        f"data: {data}\n\n"
        for data in (
            'C:[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}',
            'C:[{"index":0,"delta":{"content":"Hel"},"logprobs":null,"finish_reason":null}]}',
            'C:[{"index":0,"delta":{"content":"lo"},"logprobs":null,"finish_reason":null}]}',
            'C:[{"index":0,"delta":{"content":"!"},"logprobs":null,"finish_reason":null}]}',
            'C:[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}',
            "[DONE]",
        )
    )
