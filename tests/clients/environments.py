"""Environments of the matrix's clients, in a folder outside the repository.

Owns: one virtual environment or node folder per client below `cache()`, made once and again when its packages change.
Does not know: servers, results.
Invariants: nothing is installed into the project's own environment; a half-made environment is made anew.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.clients.catalogue import Client

HERE = Path(__file__).parent
PACKAGE = re.compile(r"^@?[\w./-]+")


class NotInstalled(Exception):
    """Why a client's environment could not be made."""


@dataclass(frozen=True)
class Environment:
    """`folder`: a virtual environment or one with node_modules. `work`: where the script runs."""

    folder: Path
    work: Path

    def command(self, client: Client) -> list[str]:
        if client.kind == "npm":
            for name in ("common", client.script):  # node looks for packages from where the script stands
                shutil.copy(HERE / "node" / f"{name}.mjs", self.folder)
            return ["node", str(self.folder / f"{client.script}.mjs")]
        python = sys.executable if client.kind == "plain" else str(self.folder / "bin" / "python")
        return [python, str(HERE / "python" / f"{client.script}.py")]

    def versions(self, client: Client) -> list[str]:
        """`name version` of what the table shows."""
        shown = client.shown or tuple(_bare(package) for package in client.packages)
        if client.kind == "plain":
            return [" ".join(_output(client.name, "--version").split()[:2])]
        if client.kind == "npm":
            files = [self.folder / "node_modules" / name / "package.json" for name in shown]
            return [
                f"{name} {json.loads(file.read_text())['version']}" for name, file in zip(shown, files, strict=True)
            ]
        code = "import sys, importlib.metadata as m; print('\\n'.join(f'{n} {m.version(n)}' for n in sys.argv[1:]))"
        return _output(str(self.folder / "bin" / "python"), "-c", code, *shown).splitlines()


def cache() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aengine-clients"
    root.mkdir(parents=True, exist_ok=True)
    return root


def prepare(client: Client, folder: Path | None) -> Environment:
    """The client's environment, installed if it is not there; `folder`: use this one as it is."""
    if client.kind == "plain":
        if shutil.which(client.name) is None:
            raise NotInstalled(f"no {client.name} on PATH")
        return Environment(cache(), cache())
    if folder is not None:
        return Environment(folder, cache())
    folder = cache() / client.name
    marker = folder / ".installed"
    wanted = "\n".join(client.packages)
    if not marker.exists() or marker.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (_install_npm if client.kind == "npm" else _install_pip)(folder, client.packages)
        marker.write_text(wanted)
    return Environment(folder, folder)


def _install_pip(folder: Path, packages: tuple[str, ...]) -> None:
    _run([sys.executable, "-m", "venv", str(folder)])
    _run([str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install", "-q", *packages])


def _install_npm(folder: Path, packages: tuple[str, ...]) -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise NotInstalled("node and npm are needed (Debian: apt-get install nodejs npm)")
    (folder / "package.json").write_text('{"private": true}')
    _run(["npm", "install", "--no-audit", "--no-fund", *packages], cwd=folder)


def _run(command: list[str], cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise NotInstalled(" ".join(done.stdout.split())[-300:])


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _bare(package: str) -> str:
    found = PACKAGE.match(package)
    assert found is not None, package
    return found[0]
