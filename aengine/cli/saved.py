"""Conversations in files.

Owns: the folder they are kept in, their names, reading and writing them.
Does not know: what a conversation holds.
Invariants: a file is whole or absent, however many programs write to the folder, and its owner alone may read it;
whatever stands in the way is a SavingFailed with the file's name.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from aengine.cli.dialogue import Dialogue
from aengine.errors import AengineError, InvalidRequest

_NAME = re.compile(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]{0,63}")


class SavingFailed(AengineError):
    """A file could not be read or written."""


class Chats:
    """`folder` is made when something is saved."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, name: str) -> Dialogue:
        path = self._path(name)
        try:
            return Dialogue.from_json(path.read_bytes())
        except FileNotFoundError:
            raise InvalidRequest(f"there is no saved conversation {name!r} in {self._folder}", param="name") from None
        except OSError as error:
            raise SavingFailed(f"{path} cannot be read: {error.strerror or error}") from None
        except InvalidRequest as error:
            raise InvalidRequest(f"{path} is not a saved conversation: {error.message}", param="name") from None

    def save(self, name: str, dialogue: Dialogue) -> None:
        path = self._path(name)
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                file.write(dialogue.to_json())
            part.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            raise SavingFailed(f"{path} cannot be written: {error.strerror or error}") from None

    def has(self, name: str) -> bool:
        return os.path.lexists(self._path(name))

    def names(self) -> list[str]:
        """The last one saved comes first."""
        aged = []
        for path in self._folder.glob("*.json"):
            with contextlib.suppress(OSError):  # gone meanwhile
                aged.append((path.stat().st_mtime, path.stem))
        return [name for _, name in sorted(aged, reverse=True)]

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise InvalidRequest(f"{name[:80]!r} is no name: letters, digits, - _ and . are, at most 64", param="name")
        return self._folder / f"{name}.json"
