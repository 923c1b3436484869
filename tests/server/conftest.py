"""Fixtures: an application on a real local socket, around a fake engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from aengine.config import ServerConfig
from aengine.server import create_app

sys.path.insert(0, str(Path(__file__).parent))
from server_fakes import FakeEngine


@pytest.fixture
async def serve():
    """`client, engine = await serve(engine, **server_config)`; closed after the test."""
    clients = []

    async def make(engine=None, **settings):
        engine = engine or FakeEngine()
        server = TestServer(create_app(engine, ServerConfig(**settings)))
        await server.start_server()  # aiohttp turns handler_cancellation on here by itself
        client = TestClient(server)
        clients.append(client)
        return client, engine

    yield make
    for client in clients:
        await client.close()


@pytest.fixture
def chat_body():
    def make(**fields):
        return {"model": "fake-model", "messages": [{"role": "user", "content": "hi"}], **fields}

    return make


@pytest.fixture
def events():
    """Splits an SSE text into its data payloads, decoded but for [DONE]."""
    import json

    def split(text):
        assert text.endswith("\n\n")
        frames = text[:-2].split("\n\n")
        return [f[6:] if f == "data: [DONE]" else json.loads(f[6:]) for f in frames if f.startswith("data: ")]

    return split


@pytest.fixture
def envelope():
    """Checks that an answer is exactly the error envelope and small; returns its inside."""

    async def check(response, status, *, param="unchecked", code="unchecked"):
        raw = await response.read()
        assert response.status == status, raw
        assert len(raw) < 2_500
        assert response.content_type == "application/json"
        body = await response.json()
        assert set(body) == {"error"}
        error = body["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert error["code"] is None or isinstance(error["code"], str)
        assert "x-request-id" in response.headers
        if param != "unchecked":
            assert error["param"] == param
        if code != "unchecked":
            assert error["code"] == code
        return error

    return check
