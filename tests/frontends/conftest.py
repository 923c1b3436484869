"""An engine process and its front-ends in one event loop: everything but the processes themselves."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from aengine import AsyncEngine, EngineConfig, SchedulerConfig
from aengine.frontends.hub import Hub, Lost
from aengine.frontends.remote import RemoteEngine
from aengine.frontends.wire import Pipe, ToEngine, ToFrontend
from tests.engine.conftest import Sim, sim

__all__ = ["sim"]


@dataclass
class House:
    host: AsyncEngine
    hub: Hub
    fronts: list[RemoteEngine] = field(default_factory=list)
    pipes: list[Pipe] = field(default_factory=list)  # the front-ends' ends
    serving: list[asyncio.Task[Lost]] = field(default_factory=list)

    async def connect(self, index: int) -> socket.socket:
        """A new front-end's end of a pipe that the hub serves."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        pipe = await Pipe.over(ours, ToEngine)
        self.serving.append(asyncio.create_task(self.hub.serve(index, pipe)))
        return theirs


@asynccontextmanager
async def house(made: Sim, fronts: int = 1, seats: int | None = None, **scheduler: Any) -> AsyncIterator[House]:
    settings = {"max_num_seqs": 16, "max_batched_tokens": 64, **scheduler}
    hub = Hub(seats or fronts)
    host = AsyncEngine(EngineConfig(scheduler=SchedulerConfig(**settings)), outlet=hub)
    hub.engine = host
    home = House(host, hub)
    for index in range(fronts):
        pipe = await Pipe.over(await home.connect(index), ToFrontend)
        home.pipes.append(pipe)
        home.fronts.append(RemoteEngine(host.config, pipe, asyncio.Event()))
        home.fronts[-1].listen()
    watching = asyncio.create_task(hub.watch())
    starting = [asyncio.create_task(front.start()) for front in home.fronts]
    await host.start()
    if seats is None:
        await asyncio.gather(*starting)
    try:
        yield home
    finally:
        for start in starting:
            start.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        for front in home.fronts:
            await front.close()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await host.close()
        async with asyncio.timeout(60):
            await asyncio.gather(*home.serving)


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch: pytest.MonkeyPatch, sim: Sim) -> None:
    monkeypatch.setattr("aengine.frontends.remote.present", lambda *_, **__: "the model's files")
    monkeypatch.setattr("aengine.frontends.remote.load_tokenizer", lambda _: sim.tokenizer)
