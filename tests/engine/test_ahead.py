"""Torch's libraries are mapped by a thread that leaves the interpreter free, and what cannot be mapped does no harm."""

import subprocess
import sys

from aengine.engine import ahead

PROGRAM = """
import sys
from pathlib import Path
from aengine.engine.ahead import map_torch

turns, thread = 0, map_torch()
assert map_torch() is thread
while thread.is_alive():
    turns += 1
assert "torch" not in sys.modules
if sys.platform == "linux":  # elsewhere there is nothing to do
    assert turns > 1000, turns
    assert "libtorch_cpu.so" in Path("/proc/self/maps").read_text()
import torch
assert torch.ones(3).sum().item() == 3.0
print("done")
"""


def test_the_interpreter_is_free_while_they_are_mapped():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr


def test_what_is_missing_ends_it_in_silence(tmp_path, monkeypatch):
    (tmp_path / "no_library.so").write_bytes(b"\x7fELF")
    ahead._map([(tmp_path / "no_library.so", 2), (tmp_path / "absent.so", 2)])
    monkeypatch.setattr(ahead, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert ahead._paths() == []
