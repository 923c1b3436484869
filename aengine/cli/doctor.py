"""`aengine doctor`: what this machine offers, what is installed, what is wrong.

Owns: the checks, their hints, the exit code.
Does not know: how the engine uses what is found.
Invariants: no check raises: what cannot be read is shown as unknown; the exit code is 1 exactly when there is a problem
(an engine could not run well or at all); notes do not count.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import aengine
from aengine import __version__
from aengine.cli import settings
from aengine.cli.options import Parser, add_settings, config_of, print_config
from aengine.cli.startup import binary_size
from aengine.config import AengineConfig, home
from aengine.errors import AengineError, ConfigError

LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "aiohttp", "msgspec", "safetensors")
EXTRAS = (("uvloop", "a faster event loop"), ("triton", "CUDA kernels"), ("flashinfer", "CUDA attention"))
CPU_FEATURES = {
    "avx2": ("avx2",),
    "avx512": ("avx512f",),
    "avx512_vnni": ("avx512_vnni", "avx_vnni"),
    "bf16": ("avx512_bf16", "bf16"),
    "amx": ("amx_tile",),
    "neon": ("asimd",),
}
MIN_FREE_BYTES = 1 << 30
ASK_S = 2.0  # for whoever listens on the port to say what it is
COMPILERS = ("cc", "gcc", "clang")


@dataclass(slots=True)
class Findings:
    """Facts are (section, name, text) in order of discovery; problems and notes are (what, hint).

    `pages` are lines of a table: how the model's KV pages would be laid out.
    """

    facts: list[tuple[str, str, str]] = field(default_factory=list)
    pages: list[str] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)


def parser() -> Parser:
    made = Parser("doctor", "Show what this machine offers and what is wrong. Exit code 1: there are problems.")
    add_settings(made, server=True)
    return made


def run(args: argparse.Namespace) -> int:
    try:
        config = config_of(args)
    except ConfigError as error:  # what is wrong is what doctor is asked for
        findings = examine(AengineConfig())
        findings.problems.append((str(error), "the rest was examined with the default settings"))
        print(as_text(findings))
        return 1
    if args.print_config:
        return print_config(config)
    findings = examine(config)
    print(as_text(findings))
    return 1 if findings.problems else 0


def examine(config: AengineConfig) -> Findings:
    findings = Findings()
    checks: tuple[Callable[[Findings], None], ...] = (
        _software,
        _compiler,
        _processor,
        lambda found: _kernels(found, config),
        _memory,
        _store,
        lambda found: _port(found, config),
        lambda found: _configuration(found, config),
        lambda found: _pages(found, config),
    )
    for check in checks:
        try:
            check(findings)
        except OSError as error:
            findings.notes.append((f"a check could not be made: {error}", "some figures are missing"))
    return findings


def as_text(findings: Findings) -> str:
    lines: list[str] = []
    section = ""
    for where, name, text in findings.facts:
        if where != section:
            section = where
            lines += ["", where] if lines else [where]
        lines.append(f"  {name:<20} {text}")
    if findings.pages:
        lines += ["", findings.pages[0], *(f"  {line}" for line in findings.pages[1:])]
    for title, entries in (("problem", findings.problems), ("note", findings.notes)):
        lines += [f"\n{title}: {what}\n  → {hint}" for what, hint in entries]
    lines.append("" if findings.problems else "\nno problems found")
    return "\n".join(lines).rstrip()


# ---- checks


def _software(found: Findings) -> None:
    found.facts.append(("software", "aengine", __version__))
    found.facts.append(("software", "Python", f"{platform.python_version()} ({sys.executable})"))
    for name in LIBRARIES:
        installed = _installed(name)
        found.facts.append(("software", name, installed or "missing"))
        if installed is None:
            found.problems.append((f"{name} is not installed", "run make serve, or pip install -r requirements.lock"))
    for name, what in EXTRAS:
        there = importlib.util.find_spec(name) is not None
        found.facts.append(("software", f"{name} (optional)", f"{'yes' if there else 'no'}: {what}"))


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor(found: Findings) -> None:
    flags = _cpu_flags()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    have = [name for name, any_of in CPU_FEATURES.items() if flags & set(any_of)]
    found.facts.append(("processor", "model", f"{_cpu_model()} ({platform.machine()})"))
    found.facts.append(("processor", "cores", f"{cores} usable of {os.cpu_count()}"))
    found.facts.append(("processor", "features", " ".join(have) or "unknown"))
    found.facts.append(("processor", "load", " ".join(f"{load:.2f}" for load in os.getloadavg())))
    if platform.machine() == "x86_64" and flags and "avx2" not in flags:
        hint = "steps run on the reference kernels, many times slower; use a processor from 2015 or later"
        found.problems.append(("the processor has no AVX2", hint))
    if os.getloadavg()[0] > 1.5 * cores:
        found.notes.append((f"load {os.getloadavg()[0]:.1f} on {cores} cores", "other programs slow the engine down"))


def _kernels(found: Findings, config: AengineConfig) -> None:
    """The instruction set of the CPU kernels. Compiles nothing."""
    try:
        found.facts.append(("processor", "kernels", aengine.describe_kernels(config.engine)))
    except ConfigError as error:
        found.problems.append((str(error), "name another cpu_isa, or leave it at auto"))
    except ImportError as error:  # a library is missing: told above
        found.notes.append((f"the kernels could not be examined: {error}", "install what is missing"))


def _cpu_flags() -> set[str]:
    return {flag for key in ("flags", "Features") for flag in _cpuinfo(key).split()}


def _cpu_model() -> str:
    return _cpuinfo("model name") or platform.processor() or "unknown"


def _cpuinfo(key: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), "")


def _memory(found: Findings) -> None:
    figures = dict(_meminfo())
    total, free = figures.get("MemTotal"), figures.get("MemAvailable")
    if total is None or free is None:
        found.facts.append(("memory", "RAM", "unknown"))
        return
    limit = _cgroup_limit()
    text = f"{binary_size(free)} free of {binary_size(total)}"
    found.facts.append(("memory", "RAM", text + (f", limited to {binary_size(limit)}" if limit else "")))
    if free < MIN_FREE_BYTES:
        found.problems.append((f"only {binary_size(free)} of memory are free", "1 GiB is the least for a small model"))


def _meminfo() -> Iterator[tuple[str, int]]:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            yield name, int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):  # not Linux
        return


def _cgroup_limit() -> int | None:
    try:
        return int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no limit
        return None


def _compiler(found: Findings) -> None:
    path = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    found.facts.append(("software", "C compiler", path or "none"))
    if path is None:
        hint = "native kernels cannot be built; steps run on slower ones (on Debian or Ubuntu: apt-get install gcc)"
        found.notes.append(("no C compiler found", hint))


def _store(found: Findings) -> None:
    root = home()
    found.facts.append(("model store", "AENGINE_HOME", str(root)))
    files = sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else []
    for path in files[:20]:
        found.facts.append(("model store", binary_size(path.stat().st_size), str(path.relative_to(root))))
    if len(files) > 20:
        found.facts.append(("model store", "…", f"{len(files) - 20} more files"))
    if not files:
        found.facts.append(("model store", "files", "none yet: the first start fetches the default model"))
    there = next(path for path in (root, *root.parents) if path.exists())
    found.facts.append(("model store", "disk", f"{binary_size(shutil.disk_usage(there).free)} free"))
    if not os.access(there, os.W_OK) or not there.is_dir():
        found.problems.append((f"{there} cannot be written to", "set AENGINE_HOME to a folder of yours"))


def _port(found: Findings, config: AengineConfig) -> None:
    host, port = config.server.host, config.server.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if _is_aengine(host, port):
                found.notes.append((f"an aengine serves on {host}:{port}", "another one needs another --port"))
                return
            hint = "end the program that listens there, or choose another with --port (0: any free one)"
            found.problems.append((f"{host}:{port} cannot be listened on: {error.strerror}", hint))


def _is_aengine(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=ASK_S)
    try:
        connection.request("GET", "/health")
        return (connection.getresponse().getheader("Server") or "").startswith("aengine")
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _configuration(found: Findings, config: AengineConfig) -> None:
    """The settings that differ from their defaults."""
    changed = [
        (setting, value)
        for setting in settings.settings()
        if (value := settings.value_of(config, setting)) != setting.default
    ]
    for setting, value in changed:
        shown = "set, and not printed" if setting.name == "api_key" else str(value)
        found.facts.append(("configuration", setting.name, shown))
    if not changed:
        found.facts.append(("configuration", "settings", "all as by default"))


def _pages(found: Findings, config: AengineConfig) -> None:
    """How the memory for KV pages is divided among the model's kinds of layers. Fetches nothing, loads no weights."""
    model = config.engine.model.model
    try:
        lines = aengine.describe_pages(config.engine)
    except (AengineError, ImportError) as error:
        found.problems.append((f"{model}: {error}", "name another model, or change the setting at fault"))
        return
    if lines:
        found.pages = [f"KV pages of {model}", *lines]
    else:
        found.notes.append((f"the model {model} is not here yet", "the first start fetches it"))
