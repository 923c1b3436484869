"""What every benchmark prints: its claim, its configuration, where it ran, and a JSON line.

Owns: the environment record, claim lines, the JSON line, CPU timing.
Does not know: what is measured.
Invariants: the last line a script prints is one JSON object with `bench`, `environment`, `config`, `figures` and
`claims`; a claim has a limit, a measured value and a verdict, never a verdict alone.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aengine.cli.environment import commit, cores, cpu_model

ROOT = Path(__file__).resolve().parent.parent
TIMING = "microseconds are CPU time of the process, the least of several repeats: other programs shared the machine"


def environment() -> dict[str, str | int]:
    """CPU model, cores this process may use, Python, commit (with + when files were changed), load."""
    return {
        "cpu": cpu_model(),
        "cores": cores(),
        "python": platform.python_version(),
        "commit": commit(),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


@dataclass
class Report:
    """Collects one script's figures and claims; `close` prints the verdicts and the JSON line."""

    bench: str
    claim: str
    config: Mapping[str, Any]
    figures: dict[str, Any] = field(default_factory=dict)
    claims: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.environment = environment()
        print(f"claim: {self.claim}")
        print("config: " + "  ".join(f"{key} {value}" for key, value in self.config.items()))
        print("environment: " + "  ".join(f"{key} {value}" for key, value in self.environment.items()), flush=True)

    def at_most(self, name: str, value: float, limit: float, unit: str = "") -> None:
        self._claim(name, value, "<=", limit, unit, value <= limit)

    def at_least(self, name: str, value: float, limit: float, unit: str = "") -> None:
        self._claim(name, value, ">=", limit, unit, value >= limit)

    def _claim(self, name: str, value: float, sign: str, limit: float, unit: str, holds: bool) -> None:
        self.claims.append({"name": name, "value": value, "sign": sign, "limit": limit, "unit": unit, "holds": holds})

    def close(self) -> bool:
        """Print all claims and the JSON line; whether every claim holds."""
        for c in self.claims:
            verdict = "holds" if c["holds"] else "MISSED"
            print(f"{verdict:6}  {c['name']}: {c['value']:.4g} {c['sign']} {c['limit']:.4g} {c['unit']}".rstrip())
        line = {
            "bench": self.bench,
            "environment": self.environment,
            "config": dict(self.config),
            "figures": self.figures,
            "claims": self.claims,
        }
        print(json.dumps(line), flush=True)
        return all(claim["holds"] for claim in self.claims)


@contextmanager
def quiet_gc() -> Iterator[None]:
    """What lives now is frozen and collection is off, as in an engine that has started (it freezes too)."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def cpu_us(work: Callable[[], int], repeats: int, before: Callable[[], None] | None = None) -> float:
    """Least CPU microseconds per item over `repeats` calls of `work`, which returns how many items it did."""
    best = float("inf")
    with quiet_gc():
        for _ in range(repeats):
            if before is not None:
                before()
            began_ns = time.process_time_ns()
            items = work()
            best = min(best, (time.process_time_ns() - began_ns) / 1e3 / items)
    return best
