"""Identity, keys, origins, ignored fields, the page and the small endpoints."""

from __future__ import annotations

import asyncio
import logging

import pytest
from server_fakes import FakeEngine

from aengine.server.edge import ignored_header, origin_allowed

URL = "/v1/chat/completions"


@pytest.mark.parametrize("stream", [False, True])
async def test_request_id_in_is_request_id_out(serve, chat_body, stream):
    client, _ = await serve()
    for sent in ("abc-123", "x" * 128):
        response = await client.post(URL, json=chat_body(stream=stream), headers={"x-request-id": sent})
        assert response.headers["x-request-id"] == sent
    for sent in ("x" * 129, "a b", ""):
        response = await client.post(URL, json=chat_body(stream=stream), headers={"x-request-id": sent})
        assert response.headers["x-request-id"].startswith("req-")


async def test_the_same_request_id_twice_at_once(serve, chat_body):
    """Clients repeat ids on retries; the engine's own ids stay unique."""
    client, engine = await serve()
    for _ in range(2):
        assert (await client.post(URL, json=chat_body(), headers={"x-request-id": "same"})).status == 200
    assert len({stream.request_id for stream in engine.streams}) == 2


async def test_keys(serve, chat_body, envelope):
    client, _ = await serve(api_key="s3cret")
    for value in (None, "Bearer wrong", "Basic s3cret", "Bearer", "s3cret", "Bearer s3cret2", "Bearer \xe9"):
        headers = {} if value is None else {"Authorization": value}
        response = await client.post(URL, json=chat_body(), headers=headers)
        error = await envelope(response, 401, code="invalid_api_key")
        assert "s3cret" not in error["message"]
        assert response.headers["WWW-Authenticate"] == "Bearer"
    for scheme in ("Bearer", "bearer"):
        good = {"Authorization": f"{scheme} s3cret"}
        assert (await client.post(URL, json=chat_body(), headers=good)).status == 200
    assert (await client.get("/")).status == 200
    assert (await client.get("/health")).status == 200
    assert (await client.get("/metrics")).status == 401
    assert (await client.options(URL)).status == 204
    assert (await client.get("/nowhere")).status == 401


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:3000", True),
        ("https://127.0.0.1", True),
        ("http://[::1]:80", True),
        ("https://chat.example", True),
        ("http://localhost.evil.example", False),
        ("http://evil.example", False),
        ("null", False),
    ],
)
async def test_cors(serve, chat_body, origin, allowed):
    client, _ = await serve(cors_origins=("https://chat.example",), api_key="k")
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-stainless"}
    before = await client.options(URL, headers=asked)
    assert before.status == 204
    headers = {"Origin": origin, "Authorization": "Bearer k"}
    answers = [before, await client.post(URL, json=chat_body(stream=True), headers=headers)]
    answers.append(await client.post(URL, headers=headers))
    for response in answers:
        assert response.headers.get("Access-Control-Allow-Origin") == (origin if allowed else None)
        assert "Origin" in response.headers["Vary"]
    assert before.headers.get("Access-Control-Allow-Headers") == ("x-stainless" if allowed else None)


async def test_without_a_key_pages_of_other_origins_are_refused(serve, chat_body, envelope):
    """A form or a fetch without preflight reaches the server, whoever wrote the page."""
    client, engine = await serve()
    own = f"http://{client.host}:{client.port}"
    for origin, status in ((own, 200), ("http://localhost:3000", 200), (None, 200), ("http://evil.example", 403)):
        headers = {"Content-Type": "text/plain"} | ({} if origin is None else {"Origin": origin})
        response = await client.post(URL, json=chat_body(), headers=headers)
        assert response.status == status, origin
    await envelope(response, 403, code="origin_refused")
    assert (await client.post("/reset_prefix_cache", headers={"Origin": "null"})).status == 403
    assert engine.resets == 0
    assert (await client.get("/v1/models", headers={"Origin": "http://evil.example"})).status == 200


async def test_strangers_write_no_lines_of_the_log(serve, chat_body, caplog):
    client, engine = await serve()
    with caplog.at_level(logging.DEBUG):
        await client.post(URL, json=chat_body(**{"a\nINFO all is well": 1}, model="m\r\nINFO"))
        await client.get("/x%0aINFO%20all%20is%20well")
        await client.get("/health", headers={"x-request-id": "a INFO all is well"})
        engine.refuses = [ZeroDivisionError("planted")]
        assert (await client.post("/v1/completions?a=%0aINFO", json={"prompt": "x"})).status == 500
    assert not [record for record in caplog.records if "\n" in record.getMessage() or "\r" in record.getMessage()]


def test_star_allows_all():
    assert origin_allowed("https://any.example", ("*",))
    assert not origin_allowed("https://any.example", ())


async def test_ignored_fields_are_named_and_logged_once(serve, chat_body, caplog):
    client, _ = await serve()
    with caplog.at_level(logging.INFO, "aengine.server"):
        for stream in (True, False):
            body = chat_body(stream=stream, user="u", frobnicate=[1], metadata={})
            response = await client.post(URL, json=body)
            assert response.status == 200
            assert response.headers["x-aengine-ignored"] == "user, frobnicate, metadata"
    assert caplog.text.count("frobnicate") == 1
    assert "x-aengine-ignored" not in (await client.post(URL, json=chat_body())).headers


async def test_ignored_names_are_bounded(serve, chat_body, caplog):
    client, _ = await serve()
    many = {f"field{i}": 1 for i in range(900)}
    with caplog.at_level(logging.INFO, "aengine.server"):
        response = await client.post(URL, json=chat_body(**many, **{"x\r\ny: z": 1}))
    assert response.headers["x-aengine-ignored"].endswith(", and 869 more")
    assert len(caplog.records) <= 256
    assert ignored_header(("a\r\nb", "é", "ok")) == "?, ?, ok"


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_page(serve, method):
    client, _ = await serve(api_key="k")
    response = await client.request(method, "/")
    assert response.status == 200
    assert response.content_type == "text/html"
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    again = await client.get("/", headers={"If-None-Match": response.headers["ETag"]})
    assert again.status == 304


async def test_models(serve):
    client, _ = await serve()
    listed = await (await client.get("/v1/models")).json()
    assert [card["id"] for card in listed["data"]] == ["fake-model", "fake-alias"]
    assert listed["object"] == "list"
    card = await (await client.get("/v1/models/fake-alias")).json()
    assert (card["id"], card["object"], card["root"], card["max_model_len"]) == (
        "fake-alias",
        "model",
        "fake-model",
        4096,
    )


async def test_model_names_with_slashes(serve):
    engine = FakeEngine()
    engine.model.names = ("org/name",)
    client, _ = await serve(engine)
    assert (await (await client.get("/v1/models/org/name")).json())["id"] == "org/name"


async def test_small_endpoints(serve):
    client, engine = await serve()
    assert await (await client.get("/health")).json() == {"status": "ok", "phase": "ready"}
    assert (await (await client.get("/version")).json())["version"]
    metrics = await client.get("/metrics")
    assert metrics.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "vllm:num_requests_running" in await metrics.text()
    assert (await client.post("/reset_prefix_cache")).status == 200
    assert engine.resets == 1


@pytest.mark.parametrize(
    "path", ["/static/../run.py", "/static/%2e%2e/run.py", "/../../etc/passwd", "/static//etc/passwd"]
)
async def test_nothing_outside_the_page_is_served(serve, envelope, path):
    client, _ = await serve()
    reader, writer = await asyncio.open_connection(client.host, client.port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 404 ")
