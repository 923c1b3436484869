"""The terminal: what a person types, and what is shown.

Owns: reading messages, line editing and its history, control characters made visible.
Does not know: conversations, engines.
Invariants: nothing that a model or a server says can drive the terminal; into a file or a pipe it goes as it is. stdout
carries answers alone, the rest is on stderr. A line that was typed is in the history at once.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from aengine.errors import AengineError, InvalidRequest

PROMPT, MORE = "> ", "… "
HISTORY_LINES = 1000
QUOTES = '"""'
_VISIBLE = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t\r"}
_VISIBLE |= {0x7F: "␡", ord("\r"): ""} | dict.fromkeys(range(0x80, 0xA0), "\ufffd")
Ask = Callable[[str], str]


class OutputFailed(AengineError):
    """What was to be shown could not be written: a full disk."""


@dataclass(frozen=True, slots=True)
class Message:
    """`command`: it was typed as one, on a line of its own that begins with a slash."""

    text: str
    command: bool = False


class Terminal:
    """`ask` stands for a person in tests; `person`: somebody is typing, rather than a file or a pipe."""

    def __init__(self, ask: Ask | None = None) -> None:
        self.person = ask is not None or _is_terminal(sys.stdin)
        self._ask = ask or _type
        self._history: History | None = None
        for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors=errors)

    @contextlib.contextmanager
    def editing(self, path: Path, commands: Iterable[str]) -> Iterator[None]:
        """Line editing where the interpreter has readline and a person types; Tab completes commands."""
        if _is_terminal(sys.stdin):
            with contextlib.suppress(ImportError):
                self._history = History(path, commands)
        yield

    def read(self) -> Message:
        """A line, or several between lines that begin and end with three quotes. Raises EOFError, and InvalidRequest
        for what is not text."""
        line = self._line(PROMPT).strip()
        if not line.startswith(QUOTES):
            return Message(_text(line), command=line.startswith("/"))
        lines = [line.removeprefix(QUOTES)]
        while not lines[-1].rstrip().endswith(QUOTES):
            try:
                lines.append(self._line(MORE))
            except EOFError:
                raise InvalidRequest(f"the input ended within a message, after {len(lines)} lines") from None
        lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
        return Message(_text("\n".join(lines).strip()))

    def _line(self, prompt: str) -> str:
        line = self._ask(prompt if self.person else "")
        if self._history is not None:
            self._history.keep()
        return line


class History:
    """Lines typed, kept in a file; several programs may add to it. Raises ImportError where there is no readline."""

    def __init__(self, path: Path, commands: Iterable[str]) -> None:
        import readline

        self._readline = readline
        self._path = path
        names = sorted(commands)
        readline.set_completer(lambda text, state: [*(n for n in names if text and n.startswith(text)), None][state])
        readline.set_completer_delims(" ")
        readline.parse_and_bind("tab: complete")
        if _moves():
            readline.parse_and_bind("set enable-bracketed-paste on")  # several lines pasted are one message
        readline.set_history_length(HISTORY_LINES)
        with contextlib.suppress(OSError):
            readline.read_history_file(path)
        self._kept = readline.get_current_history_length()

    def keep(self) -> None:
        """Add what was typed since to the file. A full disk is no reason to stop talking."""
        length = self._readline.get_current_history_length()
        added, self._kept = length - self._kept, length
        if added <= 0:
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch(mode=0o600)
            if hasattr(self._readline, "append_history_file"):
                self._readline.append_history_file(added, self._path)
            else:
                self._readline.write_history_file(self._path)


def say(text: str, end: str = "\n") -> None:
    """An answer, or a part of it."""
    _put(sys.stdout, text + end)


def note(text: str, end: str = "\n") -> None:
    """What is not an answer."""
    _put(sys.stderr, text + end)


def _put(stream: TextIO | None, text: str) -> None:
    if stream is None:  # closed by whoever started the program
        return
    try:
        stream.write(text.translate(_VISIBLE) if stream.isatty() else text)
        stream.flush()
    except BrokenPipeError:  # the command ends as others do
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # the exit would try again
        raise OutputFailed(f"the output cannot be written: {error.strerror or error}") from None


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def _moves() -> bool:
    """Whether the terminal has a cursor to move, and so takes more than letters."""
    try:
        import curses
    except ImportError:
        return False
    try:
        curses.setupterm(fd=2)
    except curses.error:
        return False
    return curses.tigetstr("cup") is not None


def _type(prompt: str) -> str:
    """Raises EOFError."""
    try:
        if _is_terminal(sys.stdin) and _is_terminal(sys.stdout) and sys.stderr is not None:
            return input(prompt)
        note(prompt, end="")  # a prompt is no part of the answers
        line = "" if sys.stdin is None else sys.stdin.readline()
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        line = ""  # the terminal has gone
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def _text(line: str) -> str:
    """Raises InvalidRequest where bytes came that the input's encoding does not have."""
    at = next((i for i, letter in enumerate(line) if "\ud800" <= letter <= "\udfff"), None)
    if at is None:
        return line
    byte = ord(line[at]) & 0xFF
    raise InvalidRequest(f"the message is not {sys.stdin.encoding} text: byte 0x{byte:02x} after {at:,} characters")
