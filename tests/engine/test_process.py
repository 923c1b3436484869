"""Freed memory goes back to the system."""

import subprocess
import sys

PROGRAM = """
from pathlib import Path
from aengine.engine.process import give_back_free_memory


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


blocks = [bytes(60_000) for _ in range(2_000)]
last = bytes(60_000)  # above them on the heap, so that freeing them alone gives nothing back
del blocks
before = resident()
give_back_free_memory()
print(before - resident())
"""


def test_freed_blocks_below_a_live_one_go_back():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    if sys.platform == "linux":
        assert int(done.stdout) > 50 * 2**20, done.stderr
