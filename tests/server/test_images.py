"""Image parts of chat messages, as the server passes them on."""

from __future__ import annotations

import pytest

from tests.server.server_fakes import FakeEngine, FakeModel

URL = "/v1/chat/completions"
DATA = "data:image/png;base64,AAAA"


def user(*parts):
    return [{"role": "system", "content": "be brief"}, {"role": "user", "content": list(parts)}]


TEXT = {"type": "text", "text": "What?"}
IMAGE = {"type": "image_url", "image_url": {"url": DATA, "detail": "low"}}


@pytest.fixture
def seeing():
    return FakeEngine(model=FakeModel(takes_images=True))


async def test_images_reach_the_engine_and_marks_the_template(serve, chat_body, seeing):
    client, engine = await serve(seeing)
    other = {"type": "input_image", "image_url": DATA + "BBBB"}
    answer = await client.post(URL, json=chat_body(messages=user(IMAGE, TEXT, other)))
    assert answer.status == 200
    messages = engine.text.calls[0][0]
    assert messages[0] == {"role": "system", "content": "be brief"}
    mark = {"type": "image"}
    assert messages[1]["content"] == [mark, {"type": "text", "text": "What?"}, mark]
    assert [image.digest.decode() for image in engine.submitted[0]["images"]] == [DATA, DATA + "BBBB"]


async def test_text_parts_alone_stay_one_string(serve, chat_body, seeing):
    client, engine = await serve(seeing)
    await client.post(URL, json=chat_body(messages=user(TEXT, TEXT)))
    assert engine.text.calls[0][0][1]["content"] == "What?\nWhat?"
    assert "images" not in engine.submitted[0]


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "messages[1].content[0].image_url"),
        ({"type": "image_url", "image_url": "file:///etc/passwd"}, "messages[1].content[0].image_url"),
        ({"type": "image_url", "image_url": "/etc/passwd"}, "messages[1].content[0].image_url"),
        ({"type": "image_url"}, "messages[1].content[0].image_url"),
        ({"type": "input_audio"}, "messages[1].content[0]"),
    ],
)
async def test_what_is_no_data_url_is_refused(serve, chat_body, envelope, seeing, part, param):
    client, engine = await serve(seeing)
    await envelope(await client.post(URL, json=chat_body(messages=user(part, IMAGE))), 400, param=param)
    assert not engine.submitted


async def test_a_text_model_refuses_image_parts(serve, chat_body, envelope):
    client, engine = await serve()
    error = await envelope(
        await client.post(URL, json=chat_body(messages=user(IMAGE))), 400, param="messages[1].content[0]"
    )
    assert "takes text only" in error["message"]
    assert not engine.submitted


async def test_tokenize_takes_image_parts(serve, seeing):
    client, engine = await serve(seeing)
    answer = await client.post("/tokenize", json={"messages": user(IMAGE, TEXT)})
    assert answer.status == 200
    assert engine.text.calls[0][0][1]["content"][0] == {"type": "image"}
