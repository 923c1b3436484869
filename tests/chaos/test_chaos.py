"""A few seconds of chaos: each request ends exactly once, whole answers are right, nothing leaks, all faults are seen.

bench/chaos.py runs the same for as long as one likes.
"""

from __future__ import annotations

import pytest

from tests.chaos.world import Chaos

KINDS = ("stage", "run", "encode", "detokenize")
ENDS = ("stream: ok", "choices: ok", "leave: left", "crawl: ok", "error step_failed", "text: 400", "no_http: 400")


def saw_everything(chaos: Chaos) -> bool:
    ends = " ".join(chaos.ends)
    return all(chaos.faults.raised[kind] for kind in KINDS) and all(end in ends for end in ENDS)


async def test_chaos(monkeypatch: pytest.MonkeyPatch) -> None:
    chaos = Chaos(seed=1)
    monkeypatch.setattr("aengine.engine.build.build", chaos.sim.build)
    async with chaos.serving() as (engine, port):
        for seed in range(3, 33):  # a slow machine needs more of them to see everything
            await chaos.clients(port, count=24, seconds=4.0 if seed == 3 else 1.0, seed=seed)
            if saw_everything(chaos):
                break
        await chaos.settle(engine)
        chaos.balance(engine)
        assert not chaos.wrong, "\n".join(chaos.wrong[:20])
        chaos.faults.armed = False  # and afterwards it is as good as new
        await chaos.clients(port, count=8, seconds=0.3, seed=2)
        await chaos.settle(engine)
        chaos.balance(engine)
        assert engine.health().ok
    assert not chaos.wrong, "\n".join(chaos.wrong[:20])
    assert saw_everything(chaos), (chaos.faults.raised, chaos.ends)
