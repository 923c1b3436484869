"""The fake device itself: what it must raise at, and what order it may and may not run things in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aengine.runner.cuda.staging import FIRST_BYTES, CudaStaging
from tests.runner.cuda.fake import FakeCuda, PageableMemory, Synchronises

WAITS = {
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x.sum().item(),
    "int": lambda x: int(x[0]),
    "truth": lambda x: bool(x[0] > 1),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 2],
    "masked assignment": lambda x: x.index_put_((x > 2,), x),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "repeat": lambda x: torch.repeat_interleave(x, x.long()),
}


@pytest.fixture
def device():
    return FakeCuda(eager=0.0)


@pytest.mark.parametrize("work", WAITS.values(), ids=WAITS.keys())
def test_what_makes_the_host_wait_is_caught(device, work):
    stream, x = device.stream("one"), torch.arange(6.0)
    device.settle()
    with device.on(stream), pytest.raises(Synchronises):
        work(x)


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x + torch.from_numpy(np.ones(6, np.float32)),
        lambda x: x[torch.tensor([1, 2])],
        lambda x: x.copy_(torch.from_numpy(np.ones(6, np.float32))),
    ],
)
def test_pageable_memory_is_caught(device, work):
    stream, x = device.stream("one"), torch.arange(6.0)
    device.settle()
    with device.on(stream), pytest.raises(PageableMemory):
        work(x)


def test_work_runs_late_in_order_and_other_streams_only_wait_for_events():
    orders = set()
    for seed in range(20):
        device = FakeCuda(seed, eager=0.0)
        one, two = device.stream("one"), device.stream("two")
        x = torch.zeros(1)
        device.settle()
        with device.on(one):
            x.add_(1)
            early = one.record()
            x.mul_(10)
        with device.on(two):
            two.wait(early)
            x.add_(5)
        assert x.tolist() == [0.0]
        assert not early.done()
        two.record().wait()
        one.record().wait()
        orders.add(float(x))
    assert orders == {15.0, 60.0}


def test_a_graph_runs_when_it_is_replayed(device):
    stream, x = device.stream("one"), torch.ones(2)
    device.settle()
    graph, made = device.capture(stream, lambda: x * 2)
    for value in (3.0, 4.0):
        with device.on(stream):
            x.fill_(value)
            graph.replay()
        stream.record().wait()
        assert made.tolist() == [2 * value] * 2


def test_a_staging_set_grows_and_keeps_what_it_carries(device):
    stream, staging = device.stream("one"), CudaStaging(device, 1)
    big = np.arange(FIRST_BYTES, dtype=np.int32)
    for _ in range(2):
        carrier = staging.take(1)
        with device.on(stream):
            uploads = [staging(np.array([7], np.int64)), staging(big), staging(np.zeros(0, np.float32))]
            back = carrier.download(uploads[1])
        carrier.guard = stream.record()
        carrier.guard.wait()
        assert uploads[0].tolist() == [7]
        assert back.tolist() == big.tolist()
        with pytest.raises(RuntimeError, match="step 2: all 1 staging sets are in flight"):
            staging.take(2)
        staging.give(carrier)
