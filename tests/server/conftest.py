"""Fixtures: an application on a real local socket, around a fake engine."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from aengine.config import ServerConfig
from aengine.server import create_app
from tests.waiting import until

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


class Keepers:
    """The time of the tasks that keep idle streams alive: it passes when a test says so."""

    def __init__(self):
        self.asleep = []

    def __getattr__(self, name):
        """Whatever else a module asks of asyncio."""
        return getattr(asyncio, name)

    async def sleep(self, seconds):
        future = asyncio.get_running_loop().create_future()
        self.asleep.append(future)
        try:
            await future
        finally:
            if future in self.asleep:
                self.asleep.remove(future)

    async def look(self, times):
        """Lets each keeper look at its stream so often."""
        for _ in range(times):
            await until(lambda: self.asleep)
            woken, self.asleep = self.asleep, []
            for future in woken:
                future.set_result(None)
            await until(lambda most=woken: len(self.asleep) == len(most))


@pytest.fixture
def keepers(monkeypatch):
    made = Keepers()
    monkeypatch.setattr("aengine.server.sse.asyncio", made)
    return made


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
