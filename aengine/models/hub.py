"""Models named by a hub id: the local hub cache first, then a download.

Owns: which files of a repository are needed, how the cache is asked, how a download reports progress.
Does not know: formats beyond file names, packaged models.
Invariants: a complete cached snapshot is used without any network traffic; offline, the answer comes within seconds.
huggingface_hub is imported only when a hub id is asked for (0.4 s).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aengine.errors import ModelNotFound

Progress = Callable[[str, int, int], None]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
PROBE_TIMEOUT_S = 5.0


def cached_snapshot(repo: str) -> Path | None:
    """The snapshot of `repo` in the local hub cache, None when there is none or files are missing from it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo, local_files_only=True, allow_patterns=list(PATTERNS)))
    except (LocalEntryNotFoundError, HFValidationError, FileNotFoundError):
        return None
    return folder if complete(folder) else None


def complete(folder: Path) -> bool:
    """Whether a folder in Hugging Face layout has its configuration and all weight shards."""
    if not (folder / "config.json").exists():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return any(folder.glob("*.safetensors"))
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, AttributeError):
        return False
    return all((folder / shard).exists() for shard in shards)


def cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def download_snapshot(repo: str, progress: Progress | None = None) -> Path:
    """Fetch what is needed of `repo` into the hub cache. Raises ModelNotFound with the reason."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        raise ModelNotFound("not downloaded: HF_HUB_OFFLINE is set")
    try:
        # Asked first and with a short timeout: snapshot_download alone retries for minutes without a network.
        HfApi().model_info(repo, timeout=PROBE_TIMEOUT_S)
        bars = None if progress is None else _bars(repo, progress)
        return Path(snapshot_download(repo, allow_patterns=list(PATTERNS), tqdm_class=bars))
    except GatedRepoError as error:
        raise ModelNotFound("the repository is gated: accept its terms and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound("the hub has no such repository (or it is private and HF_TOKEN is not set)") from error
    except HFValidationError as error:
        raise ModelNotFound(f"not a valid hub id: {error}") from error
    except Exception as error:  # the HTTP library's own errors, whose module differs between hub versions
        reason = str(error).splitlines()[0] if str(error) else ""
        raise ModelNotFound(f"the hub could not be reached: {type(error).__name__}: {reason}") from error


def _bars(repo: str, progress: Progress) -> type[Any]:
    """A tqdm class that draws nothing and reports bytes of the largest bar to `progress`."""
    from huggingface_hub.utils import tqdm

    class Bars(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._in_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": False, "file": _Nowhere()})

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self._in_bytes:
                progress(f"download {repo}", int(self.n), int(self.total or 0))
            return shown

    return Bars


class _Nowhere:
    """A text file that forgets what is written."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        """Nothing is held."""
