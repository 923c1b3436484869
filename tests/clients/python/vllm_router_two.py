"""vllm-router in front of two servers: both are used, streams pass whole, errors come through."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
from pathlib import Path

import openai
from common import FRUIT, MODEL, URLS, check, get, run_checks


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


PORT = free_port()
ROUTER = f"http://127.0.0.1:{PORT}"
command = [str(Path(sys.executable).with_name("vllm-router")), "--host", "127.0.0.1", "--port", str(PORT)]
command += ["--worker-urls", *URLS, "--policy", "round_robin", "--prometheus-port", str(free_port())]
router = subprocess.Popen(command, stdout=sys.stderr)
client = openai.OpenAI(base_url=ROUTER + "/v1", api_key="any", max_retries=0, timeout=120)


def served(url):
    lines = [line for line in get("/metrics", url).splitlines() if line.startswith("vllm:request_success_total")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@check
def it_finds_both_servers():
    for _ in range(120):
        try:
            if get("/health", ROUTER) is not None and MODEL in [model.id for model in client.models.list()]:
                return
        except (OSError, urllib.error.URLError, openai.OpenAIError):
            time.sleep(0.5)
    raise AssertionError("the router was not ready after 60 s")


@check
def both_servers_are_used():
    before = [served(url) for url in URLS]
    asked = {"model": MODEL, "messages": FRUIT, "max_tokens": 16, "temperature": 0}
    texts = [client.chat.completions.create(**asked).choices[0].message.content for _ in range(4)]
    assert len(set(texts)) == 1, texts
    assert [served(url) - old for url, old in zip(URLS, before, strict=True)] == [2, 2]


@check
def streams_pass_whole():
    asked = {"model": MODEL, "messages": FRUIT, "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert chunks[-1].choices[0].finish_reason in ("length", "stop")
    text = "".join(
        chunk.choices[0].text
        for chunk in client.completions.create(
            model=MODEL, prompt="The capital of France is", max_tokens=6, temperature=0, stream=True
        )
    )
    assert "Paris" in text


@check
def errors_come_through():
    try:
        client.chat.completions.create(model=MODEL, messages=FRUIT, n=0)
    except openai.BadRequestError as error:
        assert error.param == "n", error
    else:
        raise AssertionError("accepted")


try:
    run_checks()
finally:
    router.terminate()
    router.wait(20)
