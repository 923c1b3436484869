"""What start-up tells and what a device contributes.

Owns: the ledger of times, bytes and notes; `Made`, a device's share of the parts.
Does not know: how anything is loaded.
Invariants: every phase is reported when it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aengine.config import EngineConfig
from aengine.engine.facts import StartupReport
from aengine.memory import PagePlan
from aengine.models.store import ModelFiles
from aengine.models.vision_config import VisionConfig
from aengine.runner.protocol import Runner

PhaseHook = Callable[[str, float], None]
ProgressHook = Callable[[str, int, int], None]
RunnerFactory = Callable[[asyncio.AbstractEventLoop], Runner]
Touch = Callable[[int, int], None]
"""Has the system give bytes [start, stop) of the KV arena; changes none of them."""


@dataclass(slots=True)
class Ledger:
    """What start-up tells: times, bytes, the table of pages, notes."""

    hook: PhaseHook
    progress: ProgressHook | None
    phases: list[tuple[str, float]] = field(default_factory=list)
    sizes: list[tuple[str, int]] = field(default_factory=list)
    pages: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began_s = time.monotonic()
        yield
        seconds = time.monotonic() - began_s
        self.phases.append((name, seconds))
        self.hook(name, seconds)

    def report(self) -> StartupReport:
        return StartupReport(tuple(self.phases), tuple(self.sizes), tuple(self.pages), tuple(self.lines))


@dataclass(frozen=True, slots=True)
class Made:
    """A device's share of the parts. `make_runner` starts the device's threads. `step_ms`: what a step should take at
    most while rows decode, unless configured; 0: as long as it takes. `draft_tokens`: the most
    draft tokens a row, likewise."""

    names: tuple[str, ...]
    pages: PagePlan
    context: int
    vocab: int
    dtype: str
    make_runner: RunnerFactory
    vision: VisionConfig | None = None
    step_ms: float = 0.0
    draft_tokens: int = 0
    touch: Touch | None = None


def served_names(config: EngineConfig, files: ModelFiles) -> tuple[str, ...]:
    return config.model.served_model_name or (files.name,)
