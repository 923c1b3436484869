"""What a start begins early is there when it is wanted, and missing or broken it does no harm."""

import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from aengine.engine.ahead import begin_to_load_torch

PROGRAM = """
import sys
from pathlib import Path
from aengine.engine.ahead import begin_to_load_torch

thread = begin_to_load_torch()
if sys.argv[1] == "before":
    thread.join()
    assert "libtorch_cpu.so" in Path("/proc/self/maps").read_text()
    assert "torch" not in sys.modules
import torch
thread.join()
print((torch.arange(4.0) @ torch.ones(4)).item())
"""


@pytest.mark.parametrize("ends", ["before", "meanwhile"])
def test_torch_is_imported_as_ever(ends):
    done = subprocess.run([sys.executable, "-c", PROGRAM, ends], capture_output=True, text=True)
    assert done.stdout == "6.0\n", done.stderr


def test_a_torch_that_is_not_there_or_laid_out_otherwise_is_left_alone(tmp_path, monkeypatch):
    for spec in (None, ModuleSpec("torch", None), ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, spec=spec: spec)
        assert begin_to_load_torch() is None


def test_a_library_that_cannot_be_loaded_is_no_fault_yet(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cpu.so").write_bytes(b"no library")
    spec = ModuleSpec("torch", None, origin=str(Path(tmp_path) / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    unraised: list[object] = []
    monkeypatch.setattr("threading.excepthook", unraised.append)
    thread = begin_to_load_torch()
    assert thread is not None
    thread.join()
    assert not unraised
