"""Triton kernels for NVIDIA devices: that they compile, stay in registers and fit into shared memory.

Owns: the process that compiles (never one that interprets), and its cache.
Does not know: the kernels; see `compiled.py`, whose table this prints (`pytest -s`).
Invariants: no GPU is needed. Programs are kept between test runs, by the hash of their source.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(300)
def test_kernels_compile_without_spills_and_within_shared_memory(request: pytest.FixtureRequest) -> None:
    kept = request.config.cache.mkdir("triton-programs")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.compiled"],
        cwd=ROOT, env=environment | {"TRITON_CACHE_DIR": str(kept)}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
