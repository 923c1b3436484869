"""What an engine asks of the system changes nothing else about the thread or the process."""

import os
import platform
from concurrent.futures import ThreadPoolExecutor

import pytest

from aengine.engine.process import give_back_free_memory, take_short_turns


@pytest.mark.skipif(platform.system() != "Linux", reason="turns are asked of Linux alone")
def test_short_turns_leave_policy_and_priority_alone():
    def here() -> tuple[int, int]:
        return os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)

    with ThreadPoolExecutor(1) as thread:
        before = thread.submit(here).result()
        taken = thread.submit(take_short_turns).result()
        after = thread.submit(here).result()
    assert taken == (platform.machine() in ("x86_64", "aarch64"))
    assert after[1] == before[1]
    assert after[0] & ~getattr(os, "SCHED_RESET_ON_FORK", 0) == before[0]


def test_giving_memory_back_may_be_repeated():
    for _ in range(2):
        give_back_free_memory()
