"""Where a figure was measured.

Owns: the processor's name, the cores, the commit of a working copy.
Does not know: what was measured.
Invariants: what cannot be found out is "unknown", never left out.
"""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import aengine

SOURCE = Path(aengine.__file__).parent


def environment() -> dict[str, str | int]:
    """Of this process: for a client that is the server's side too where both share a machine."""
    return {
        "aengine": aengine.__version__,
        "commit": commit(),
        "cpu": cpu_model(),
        "cores": cores(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "machine": platform.machine(),
    }


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """Name, family and model: one name may stand for several generations on rented machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine() or "unknown"
    info = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = info.get("model name", platform.machine())
    return f"{name} (family {info.get('cpu family', '?')}, model {info.get('model', '?')})"


def commit() -> str:
    """Of the working copy this package runs from, with + when its files were changed. A copy that was installed inside
    another project's repository has none."""
    try:
        if _git("ls-files", "--", "__init__.py") != "__init__.py":
            return "unknown"
        return _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=SOURCE, capture_output=True, text=True, check=True).stdout.strip()
