"""Thoughts split from an answer by the whole server, on the simulated device: real steps, tokens and detokenising.

No model at hand thinks, so the device's tokens spell an answer that does. The vocabulary has no token for the marks:
they come in several tokens each, and characters beyond ASCII in tokens of single bytes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from aengine import AsyncEngine, EngineConfig
from aengine.config import DeviceConfig, ModelConfigArgs, ServerConfig
from aengine.engine import build_sim
from aengine.runner.sim import SimExecutor
from aengine.server import create_app

THOUGHTS = "\nTwo and two; a <b> is no mark, nor is </thin. Voilà: 四 🙂\n"
ANSWER = "\n\nIt is <think> four: 四."
WRITTEN = f"<think>{THOUGHTS}</think>{ANSWER}"
BODY = {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "temperature": 0, "max_tokens": 400}


class Spelt:
    """The device's next token: the one of `ids` that stands behind what was made of it, whatever the prompt is."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.prompt = 0

    def __call__(self, context: Any, vocab: int, seed: int) -> int:
        at = len(context) - self.prompt
        return self.ids[at] if 0 <= at < len(self.ids) else 0


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TestClient[Any, Any]]:
    spelt = Spelt()
    monkeypatch.setattr(build_sim, "SimExecutor", functools.partial(SimExecutor, token=spelt))
    config = EngineConfig(
        model=ModelConfigArgs(model="smollm2-135m", max_model_len=1024), device=DeviceConfig(device="sim")
    )
    async with AsyncEngine(config) as engine:
        app = create_app(engine, ServerConfig(reasoning_parser="think"))
        async with TestClient(TestServer(app)) as made:
            spelt.ids = await tokens(made, prompt=WRITTEN, add_special_tokens=False)
            texts = [await text(made, [id]) for id in spelt.ids]
            assert not [piece for piece in texts if "think>" in piece]
            assert any("\N{REPLACEMENT CHARACTER}" in piece for piece in texts)
            spelt.ids += await tokens(made, prompt="<|im_end|>", add_special_tokens=False)
            spelt.prompt = len(await tokens(made, messages=BODY["messages"], add_generation_prompt=True))
            yield made


async def tokens(client: TestClient[Any, Any], **body: Any) -> list[int]:
    async with client.post("/tokenize", json=body) as response:
        return list((await response.json())["tokens"])


async def text(client: TestClient[Any, Any], ids: list[int]) -> str:
    async with client.post("/detokenize", json={"tokens": ids}) as response:
        return str((await response.json())["prompt"])


async def whole(client: TestClient[Any, Any], path: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    async with client.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        return dict(await response.json())


async def test_thoughts_and_answer_whole_and_streamed(client: TestClient[Any, Any]) -> None:
    answer = await whole(client, **BODY)
    message, usage = answer["choices"][0]["message"], answer["usage"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert message["content"] == ANSWER.lstrip()
    assert message["reasoning"] == message["reasoning_content"] == THOUGHTS.strip()
    thinking = usage["completion_tokens_details"]["reasoning_tokens"]
    assert thinking == len(await tokens(client, prompt=f"<think>{THOUGHTS}</think>", add_special_tokens=False))
    assert thinking < usage["completion_tokens"]

    async with client.post("/v1/chat/completions", json={**BODY, "stream": True}) as response:
        lines = (await response.text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines[:-2]]
    told = {name: [delta[name] for delta in deltas if delta.get(name)] for name in message}
    assert {name: "".join(told[name]) for name in ("content", "reasoning", "reasoning_content")} == {
        name: message[name] for name in ("content", "reasoning", "reasoning_content")
    }
    assert min(len(told["reasoning"]), len(told["content"])) > 3  # as it is made, not in one piece at the end
    kinds = ["content" if delta.get("content") else "reasoning" for delta in deltas if any(delta.values())]
    first = kinds.index("content", 1)
    assert "reasoning" not in kinds[first:]


async def test_thoughts_left_out_and_in_the_other_dialects(client: TestClient[Any, Any]) -> None:
    message = (await whole(client, **BODY, include_reasoning=False))["choices"][0]["message"]
    assert message["content"] == ANSWER.lstrip()
    assert not message.get("reasoning")
    assert not message.get("reasoning_content")

    asked: dict[str, Any] = {"temperature": 0, "model": "smollm2-135m"}
    output = (await whole(client, "/v1/responses", **asked, input=BODY["messages"], max_output_tokens=400))["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    assert output[1]["content"][0]["text"] == ANSWER.lstrip()
    told = await whole(client, "/v1/messages", **asked, messages=BODY["messages"], max_tokens=400)
    assert [block["type"] for block in told["content"]] == ["thinking", "text"]
    assert told["content"][0]["thinking"] == THOUGHTS.strip()
