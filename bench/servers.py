"""Servers under measurement: running ones, and ones started for a measurement and ended after it.

Owns: how a server is named on the command line, its process, its log, its readiness, what its processes used.
Does not know: workloads, figures.
Invariants: only processes started here are ended, by process group; a server that ends before it is ready shows the end
of its log; it listens on 127.0.0.1 only (`{port}` in its command is a free port there).
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from load import LoadError, Target

READY_S = 300.0
STOP_S = 30.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
LEAST_S = 0.5  # of time, for a tick or two too many on each processor to be a few hundredths of the figure
SWITCHES = {"yes": True, "no": False}


@dataclass(frozen=True, slots=True)
class Server:
    """`command` starts it, or is None: it runs already, at `url`, as process `pid` (0: not known).

    `model` is the name requests ask for; empty: the first that the server lists. `note` is recorded: a version, say.
    """

    name: str
    command: str | None = None
    url: str = ""
    model: str = ""
    pid: int = 0
    note: str = ""
    health: str = "/health"
    api: str = "completions"
    prompts: str = "ids"
    ignore_eos: bool = True

    def target(self, url: str) -> Target:
        return Target(url, self.model or _first_model(url), self.api, self.prompts, self.ignore_eos)

    def told(self, text: str) -> Server:
        """With settings of the form key=value,key=value. LoadError for an unknown key."""
        changes: dict[str, Any] = {}
        for part in filter(None, text.split(",")):
            key, sign, value = part.partition("=")
            if key in ("model", "note", "health", "api", "prompts") and sign:
                changes[key] = value
            elif key == "pid" and value.isdigit():
                changes[key] = int(value)
            elif key == "ignore_eos" and value in SWITCHES:
                changes[key] = SWITCHES[value]
            else:
                keys = "model, note, health, api, prompts, pid=NUMBER or ignore_eos=yes|no"
                raise LoadError(f"{self.name}: {part!r} is not one of {keys}")
        made = replace(self, **changes)
        replace(made, model="any").target(made.url or "http://127.0.0.1")  # raises where settings do not go together
        return made


@dataclass(frozen=True, slots=True)
class Running:
    url: str
    pid: int
    ready_s: float | None


@contextlib.contextmanager
def up(server: Server, log_dir: Path) -> Iterator[Running]:
    """The server, ready to answer; what was started here is ended behind the block."""
    if server.command is None:
        _wait_ready(server.url + server.health, None, None)
        yield Running(server.url, server.pid, None)
        return
    port = free_port()
    words = shlex.split(server.command.replace("{port}", str(port)))
    path = log_dir / f"{server.name}.log"
    began_s = time.monotonic()
    with path.open("ab") as log, _process(words, log) as process:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(url + server.health, process, path)
        yield Running(url, process.pid, time.monotonic() - began_s)


@contextlib.contextmanager
def _process(words: list[str], log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    except OSError as error:
        raise LoadError(f"cannot start {words[0]}: {error}") from error
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # it, or children that outlived it
        process.wait()


def _wait_ready(url: str, process: subprocess.Popen[bytes] | None, log: Path | None) -> None:
    deadline_s = time.monotonic() + READY_S
    while True:
        if process is not None and log is not None and process.poll() is not None:
            tail = log.read_bytes()[-2000:].decode(errors="replace")
            raise LoadError(f"the server ended with {process.returncode} before it was ready:\n{tail}")
        with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(url, timeout=10) as answer:
            if answer.status == 200:
                return
        if time.monotonic() > deadline_s:
            raise LoadError(f"{url} was not ready after {READY_S:.0f} s")
        time.sleep(0.05)


def _first_model(url: str) -> str:
    try:
        with urllib.request.urlopen(url + "/v1/models", timeout=30) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise LoadError(f"{url}/v1/models names no model ({type(error).__name__}: {error}): set model=NAME") from error


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- what it used


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor time so far: of a process tree (0 when its pid is not known), of the machine: busy, and all there was.

    The machine's is counted in ticks that come in lumps, so a short span says nothing about it; and all that there was
    is read from the same line as what was busy, so that no clock and no count of processors can disagree with it.
    """

    tree_s: float
    busy_s: float
    whole_s: float
    processors: int

    @classmethod
    def now(cls, pid: int, stat: Path = Path("/proc/stat")) -> Usage:
        lines = [line.split() for line in stat.read_text().splitlines() if line.startswith("cpu")]
        ticks = list(map(int, lines[0][1:9]))
        idle = ticks[3] + ticks[4]  # the rest: user, nice, system, irq, softirq, steal
        busy_s, whole_s = (sum(ticks) - idle) / TICKS_PER_S, sum(ticks) / TICKS_PER_S
        return cls(sum(_cpu_s(each) for each in tree(pid)), busy_s, whole_s, len(lines) - 1)

    def since(self, before: Usage, own_s: float) -> tuple[float, float | None]:
        """The server's processor seconds, and cores that neither it nor the load generator (`own_s`) kept busy.

        None for the latter when no more than LEAST_S passed. It lies in 0 … processors.
        """
        server_s = self.tree_s - before.tree_s
        whole_s = self.whole_s - before.whole_s
        if whole_s <= LEAST_S * self.processors:
            return server_s, None
        share = (self.busy_s - before.busy_s - server_s - own_s) / whole_s
        return server_s, self.processors * min(1.0, max(0.0, share))


def tree(pid: int) -> list[int]:
    """`pid` and its descendants; nothing for 0."""
    if not pid:
        return []
    parents = {int(path.name): _stat(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    found = [pid]
    for member in found:
        found += [child for child, stat in parents.items() if stat and int(stat[1]) == member]
    return found


def rss_mib(pid: int) -> float:
    """Resident memory of the tree; pages that its processes share count once for each."""
    pages = 0
    for member in tree(pid):
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{member}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _cpu_s(pid: int) -> float:
    stat = _stat(pid)
    return (int(stat[11]) + int(stat[12])) / TICKS_PER_S if stat else 0.0


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on: [1] parent, [11] user ticks, [12] system ticks. Empty: it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []
