"""Triton kernels on the CPU: the backend contract and this folder's checks, in Triton's interpreter.

Owns: the process they run in; whether kernels are interpreted is settled when Triton is imported.
Does not know: what they check.
Invariants: about 30 s of processor time; the contract runs in it once more, for the Triton backend alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CHECKS = (
    "tests/kernels/test_contract.py",
    "tests/kernels/triton/check_backend.py",
    "tests/kernels/triton/check_sampling.py",
)


@pytest.mark.timeout(300)
def test_kernels_agree_with_their_oracles_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CHECKS],
        cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
