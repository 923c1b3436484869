"""Work in slices on several threads covers everything once."""

from __future__ import annotations

import threading

import pytest

from aengine.models.spread import spread


@pytest.mark.parametrize(("count", "step"), [(0, 4), (1, 4), (7, 3), (64, 1), (1000, 3), (1001, 1)])
def test_every_index_once(count, step):
    seen, lock = [0] * count, threading.Lock()

    def work(part: slice) -> None:
        assert 0 < part.stop - part.start <= step
        with lock:
            for index in range(part.start, part.stop):
                seen[index] += 1

    spread(count, step, work)
    assert seen == [1] * count


def test_a_failure_in_any_slice_is_raised():
    def work(part: slice) -> None:
        if part.start == 990:
            raise ValueError("slice 990")

    with pytest.raises(ValueError, match="slice 990"):
        spread(1000, 1, work)
