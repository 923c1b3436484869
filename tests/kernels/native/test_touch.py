"""Memory that is touched is there, and holds what it held."""

from __future__ import annotations

import mmap
import resource
import sys

import torch

from aengine.kernels.native import NativeOps


def test_nothing_that_is_touched_changes(ops: NativeOps) -> None:
    memory = torch.randint(0, 256, (3 * 4096 + 17,), dtype=torch.uint8)
    memory[::4096] = torch.tensor([0, 7, 255, 0], dtype=torch.uint8)
    before = memory.clone()
    ops.touch(memory)
    assert torch.equal(memory, before)


def test_whoever_writes_next_needs_no_memory_from_the_system(ops: NativeOps) -> None:
    pages = 512
    memory = mmap.mmap(-1, pages * 4096)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    ops.touch(whole[: pages // 2 * 4096])
    faults = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
    for half in whole[: pages // 2 * 4096], whole[pages // 2 * 4096 :]:
        half[::4096] = 1
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    if sys.platform == "linux":  # which counts them so
        assert faults[1] - faults[0] < pages // 8
        assert faults[2] > faults[1]  # as many, or one of a huge page
