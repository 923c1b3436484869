"""A scripted server in a thread, for the commands that talk to one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from tests.e2e.scripted import Script, scripted
from tests.waiting import DEADLINE_S


@pytest.fixture
def script(tmp_path, monkeypatch) -> Iterator[Script]:
    monkeypatch.setenv("AENGINE_HOME", str(tmp_path))
    made = Script(key="secret")
    ready, done = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def main():
        async with scripted(made):
            ready.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert ready.wait(DEADLINE_S)
    yield made
    loop.call_soon_threadsafe(done.set)
    thread.join()
    loop.close()
