"""The timeline over HTTP and by signal."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal

from server_fakes import FakeEngine

from aengine.config import ServerConfig
from aengine.server import run_server
from aengine.server.trace import write_trace
from tests.waiting import DEADLINE_S, until


async def test_a_trace_of_the_last_seconds(serve, envelope):
    client, _ = await serve(api_key="secret")
    headers = {"Authorization": "Bearer secret"}
    for query, seconds in (("", 30), ("?seconds=2.5", 2.5)):
        response = await client.get(f"/debug/trace{query}", headers=headers)
        assert response.headers["Content-Type"].startswith("application/json")
        assert await response.json() == {"traceEvents": [], "seconds": seconds}
    for wrong in ("0", "31", "nan", "x", "-1"):
        error = await envelope(await client.get(f"/debug/trace?seconds={wrong}", headers=headers), 400)
        assert "not in (0, 30]" in error["message"]
    await envelope(await client.get("/debug/trace"), 401)
    assert (await client.get("/trace")).status == 200  # the page itself holds nothing secret


async def test_a_signal_writes_a_file_and_the_server_goes_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    caplog.set_level(logging.INFO)
    urls = []
    server = asyncio.create_task(run_server(FakeEngine(), ServerConfig(port=0), on_listening=urls.append))
    async with asyncio.timeout(DEADLINE_S):
        await until(lambda: urls)
        os.kill(os.getpid(), signal.SIGUSR1)
        await until(lambda: list(tmp_path.glob("*.json")))
        (found,) = tmp_path.glob("*.json")
        assert json.loads(found.read_text()) == {"traceEvents": [], "seconds": 30}
        assert oct(found.stat().st_mode & 0o777) == "0o600"
        await until(lambda: str(found) in caplog.text)
        assert not server.done()
        os.kill(os.getpid(), signal.SIGTERM)
        await server


async def test_a_folder_that_cannot_be_written_is_a_line_in_the_log(tmp_path, caplog):
    assert await write_trace(FakeEngine(), tmp_path / "nowhere") is None
    assert "no trace was written" in caplog.text
