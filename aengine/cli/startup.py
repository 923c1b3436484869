"""What a server tells while it starts.

Owns: the start-up lines, the table of phases and the memory ledger.
Does not know: what a phase does.
Invariants: at most MAX_LINES log lines before the table, however many phases there are; `phase` may be called from any
thread.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aengine.cli.session import Report

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

log = logging.getLogger("aengine.startup")

MAX_LINES = 15
_WIDTH = 24


class Startup:
    """`listening`, then `phase` as often as there are phases, then `ready`."""

    def __init__(self, model: str, version: str) -> None:
        self._model = model
        self._version = version
        self._url = ""
        self._began_s = time.monotonic()
        self._lines = 0
        self._lock = threading.Lock()
        self._bar: Progress | None = None
        self._bars: dict[str, TaskID | None] = {}

    def listening(self, url: str) -> None:
        self._url = url
        self._log("aengine %s listens on %s and loads %s", self._version, url, self._model)

    def phase(self, name: str, seconds: float) -> None:
        self._log("%s: %.2f s", name, seconds)

    def note(self, text: str) -> None:
        self._log("%s", text)

    def progress(self, what: str, done: int, total: int) -> None:
        """Something long goes on: a bar on a terminal, else one line when it begins. Called from any thread."""
        with self._lock:
            if what not in self._bars:
                self._begin(what, total)
            if self._bar is not None and (task := self._bars[what]) is not None:
                self._bar.update(task, completed=done, total=total or None)

    def _begin(self, what: str, total: int) -> None:
        size = f" ({binary_size(total)})" if total > 100_000 else ""
        if self._bar is None and sys.stderr.isatty():
            self._bar = _bar()
            self._bar.start()
        if self._bar is not None:
            self._bars[what] = self._bar.add_task(what + size, total=total or None)
        else:
            self._bars[what] = None
            log.info("%s%s ...", what, size)

    def ready(self, report: Report) -> None:
        """Print the table; its log line tells how long the start took as a person felt it."""
        took_s = time.monotonic() - self._began_s
        if self._bar is not None:
            self._bar.stop()
        print(table(report, took_s), flush=True)
        print(f"\nready in {took_s:.1f} s: chat page {self._url}/   API {self._url}/v1   Ctrl-C stops", flush=True)

    def _log(self, text: str, *values: object) -> None:
        with self._lock:
            self._lines += 1
            if self._lines <= MAX_LINES:
                log.info(text, *values)


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def table(report: Report, total_s: float) -> str:
    """Phases with seconds, ledger with sizes, then the notes; sums under both columns."""
    known_s = sum(seconds for _, seconds in report.phases)
    phases = [*report.phases, ("other", max(0.0, total_s - known_s)), ("total", total_s)]
    parts = [_columns("phase", "seconds", [(name, f"{seconds:.2f}") for name, seconds in phases])]
    if report.ledger:
        ledger = [*report.ledger, ("total", sum(size for _, size in report.ledger))]
        parts.append(_columns("memory", "", [(name, binary_size(size)) for name, size in ledger]))
    parts.append("\n".join((*report.pages, *report.lines)))
    return "\n\n".join(part for part in parts if part)


def _columns(left: str, right: str, rows: Sequence[tuple[str, str]]) -> str:
    lines = [f"{left:<{_WIDTH}}{right:>12}", "─" * (_WIDTH + 12)]
    lines += [f"{name:<{_WIDTH}}{value:>12}" for name, value in rows]
    return "\n".join(lines)


def binary_size(size: float) -> str:
    """Bytes for a reader: 734.0 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
