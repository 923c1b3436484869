"""A few seconds of chaos: each request ends exactly once, whole answers are right, nothing leaks, all faults are seen.

bench/chaos.py runs the same for as long as one likes.
"""

from __future__ import annotations

import pytest

from tests.chaos.world import Chaos


async def test_chaos(monkeypatch: pytest.MonkeyPatch) -> None:
    chaos = Chaos(seed=1)
    monkeypatch.setattr("aengine.engine.build.build", chaos.sim.build)
    async with chaos.serving() as (engine, port):
        await chaos.clients(port, count=24, seconds=4.0, seed=1)
        await chaos.settle(engine)
        chaos.balance(engine)
        assert not chaos.wrong, "\n".join(chaos.wrong[:20])
        chaos.faults.armed = False  # and afterwards it is as good as new
        await chaos.clients(port, count=8, seconds=0.3, seed=2)
        await chaos.settle(engine)
        chaos.balance(engine)
        assert engine.health().ok
    assert not chaos.wrong, "\n".join(chaos.wrong[:20])
    assert all(chaos.faults.raised[kind] for kind in ("stage", "run", "encode", "detokenize")), chaos.faults.raised
    ends = " ".join(chaos.ends)
    for end in (
        "stream: ok",
        "choices: ok",
        "leave: left",
        "crawl: ok",
        "error step_failed",
        "text: 400",
        "no_http: 400",
    ):
        assert end in ends, chaos.ends
