"""Tokenizer endpoints."""

from __future__ import annotations

import pytest

HI = [{"role": "user", "content": "hi"}]


async def test_tokenize_a_prompt(serve):
    client, _ = await serve()
    answer = await (await client.post("/tokenize", json={"prompt": "ab", "return_token_strs": True})).json()
    assert answer == {"count": 3, "max_model_len": 4096, "tokens": [256, 97, 98], "token_strs": ["<s>", "a", "b"]}
    bare = await (await client.post("/tokenize", json={"prompt": "ab", "add_special_tokens": False})).json()
    assert (bare["tokens"], bare["token_strs"]) == ([97, 98], None)


async def test_messages_render_and_chat_agree(serve, chat_body):
    client, engine = await serve()
    ids = (await (await client.post("/tokenize", json={"messages": HI})).json())["tokens"]
    rendered = await (await client.post("/v1/chat/completions/render", json=chat_body())).json()
    await client.post("/v1/chat/completions", json=chat_body())
    assert rendered["token_ids"] == ids == engine.streams[0].prompt_ids
    assert rendered["prompt"] == "<user>hi\n<assistant>"
    body = {"prompt": rendered["prompt"], "add_special_tokens": False}
    assert (await (await client.post("/tokenize", json=body)).json())["tokens"] == ids
    assert len(engine.submitted) == 1


async def test_detokenize(serve, envelope):
    client, _ = await serve()
    answer = await (await client.post("/detokenize", json={"tokens": [*"é😀".encode(), 257]})).json()
    assert answer == {"prompt": "é😀</s>"}
    await envelope(await client.post("/detokenize", json={"tokens": [258]}), 400, param="tokens")
    await envelope(await client.post("/detokenize", json={"tokens": ["x"]}), 400, param="tokens[0]")
    await envelope(await client.post("/detokenize", json={}), 400, param="tokens")


async def test_tokenizer_info(serve):
    client, engine = await serve()
    engine.text.chat_template = "{{ x }}"
    info = await (await client.get("/tokenizer_info")).json()
    assert (info["eos_token"], info["eos_token_ids"], info["chat_template"]) == ("</s>", [257], "{{ x }}")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": HI}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": HI, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ({"prompt": 5}, "prompt"),
    ],
)
async def test_wrong_bodies(serve, envelope, body, param):
    client, _ = await serve()
    await envelope(await client.post("/tokenize", json=body), 400, param=param)


async def test_unknown_model(serve, envelope):
    client, _ = await serve()
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        await envelope(await client.post(path, json={"model": "other", **body}), 404, param="model")
