"""curl: the bytes of a stream as they stand on the wire, headers, methods, error codes in the shell."""

from __future__ import annotations

import json
import re
import subprocess

from common import FRUIT, MODEL, URL, check, run_checks

CHAT = URL + "/v1/chat/completions"


def curl(*arguments, body=None):
    sent = [] if body is None else ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    return subprocess.run(["curl", "-sS", "-m", "120", *arguments, *sent], capture_output=True, text=True)


@check
def golden_stream():
    body = {"model": MODEL, "messages": FRUIT, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}
    answer = curl("-N", "-i", CHAT, body=body | {"stream_options": {"include_usage": True}})
    head, text = answer.stdout.split("\n\n", 1)  # text mode has made \r\n to \n
    assert "Content-Type: text/event-stream; charset=utf-8" in head
    assert "Cache-Control: no-cache" in head
    text = re.sub(r'"id":"chatcmpl-[0-9a-f]{32}"', '"id":"I"', text)
    text = re.sub(r'"created":\d+,', '"created":0,', text)
    text = re.sub(r'"system_fingerprint":"fp_[0-9a-f]{10}"', '"system_fingerprint":"F"', text)
    text = re.sub(r'"content":"[^"]+"', '"content":"C"', text)
    text = re.sub(r'"prompt_tokens":\d+', '"prompt_tokens":0', text)
    text = re.sub(r'"total_tokens":\d+', '"total_tokens":0', text)
    text = re.sub(r'"cached_tokens":\d+', '"cached_tokens":0', text)
    start = f'data: {{"id":"I","object":"chat.completion.chunk","created":0,"model":"{MODEL}","system_fingerprint":"F",'
    choice = start + '"choices":[{"index":0,"delta":'
    frames = text.split("\n\n")
    content = choice + '{"content":"C"},"logprobs":null,"finish_reason":null}],"usage":null}'
    assert (
        frames[0] == choice + '{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":null}'
    )
    assert 1 <= len(frames) - 5 <= 4, frames
    assert frames[1:-4] == [content] * (len(frames) - 5), frames
    assert frames[-4] == choice + '{},"logprobs":null,"finish_reason":"length","stop_reason":null}],"usage":null}', (
        frames
    )
    assert frames[-3] == (
        start + '"choices":[],"usage":{"prompt_tokens":0,"completion_tokens":4,"total_tokens":0,'
        '"prompt_tokens_details":{"cached_tokens":0}}}'
    ), frames
    assert frames[-2:] == ["data: [DONE]", ""], frames


@check
def head_and_options():
    head = curl("-I", URL + "/").stdout
    assert head.startswith("HTTP/1.1 200"), head
    preflight = ["-H", "Origin: http://localhost:3000", "-H", "Access-Control-Request-Method: POST"]
    options = curl("-i", "-X", "OPTIONS", *preflight, CHAT).stdout
    assert options.startswith("HTTP/1.1 204"), options
    assert "Access-Control-Allow-Origin: http://localhost:3000" in options, options


@check
def errors_are_small_and_whole():
    for path, body, status, code in (
        ("/v1/chat/completions", {"model": "unknown", "messages": FRUIT}, 404, "model_not_found"),
        ("/v1/completions", {"prompt": "word " * 20_000}, 400, "context_length_exceeded"),
        ("/v1/embeddings", {"input": "x"}, 501, "not_supported"),
    ):
        answer = curl("--fail-with-body", "-w", "\n%{http_code}", URL + path, body=body)
        assert answer.returncode == 22, answer
        text, seen = answer.stdout.rsplit("\n", 1)
        error = json.loads(text)["error"]
        assert (int(seen), error["code"]) == (status, code), answer.stdout
        assert len(text) < 1000


@check
def metrics_and_health():
    assert "vllm:num_requests_running" in curl(URL + "/metrics").stdout
    assert curl("-o", "/dev/null", "-w", "%{http_code}", URL + "/health").stdout == "200"


run_checks()
