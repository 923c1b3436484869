"""The fence gives each item back once, when its step has retired."""

from __future__ import annotations

import pytest

from aengine.memory import Fence


def test_items_come_back_in_step_order() -> None:
    fence: Fence[str] = Fence()
    fence.defer(2, "b")
    fence.defer(1, "a")
    fence.defer(2, "c")
    assert len(fence) == 3
    assert fence.retire(1) == ["a"]
    assert fence.retire(2) == ["b", "c"]
    assert len(fence) == 0


def test_a_later_step_retires_the_earlier_ones() -> None:
    fence: Fence[int] = Fence()
    for step in (5, 3, 4):
        fence.defer(step, step)
    assert fence.retire(4) == [3, 4]
    assert fence.retire(4) == []
    assert fence.retire(2) == []
    assert fence.retired == 4
    assert fence.retire(10**12) == [5]


def test_deferring_to_a_retired_step_is_a_bug() -> None:
    fence: Fence[int] = Fence()
    fence.retire(3)
    with pytest.raises(AssertionError, match="step 3"):
        fence.defer(3, 0)
