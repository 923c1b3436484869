"""The terminal: a real one where it matters."""

import errno
import io
import os
import pty
import re
import select
import sys
import time

import pytest

from aengine.cli.terminal import OutputFailed, note, say
from tests.e2e.scripted import Reply
from tests.waiting import DEADLINE_S


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_what_a_model_says_cannot_drive_the_terminal(monkeypatch, capsys):
    evil = "\x1b[2J\x1b]0;owned\x07 a\rb\r\n\tc\x08\x7f\x9b31m \x00日本👩‍👧"
    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr("sys.stderr", screen)
    say(evil)
    note(evil, end="")
    shown = "␛[2J␛]0;owned␇ ab\n\tc␈␡\ufffd31m ␀日本👩‍👧"
    assert screen.getvalue() == f"{shown}\n{shown}"


def test_a_file_gets_what_a_model_says(capsys):
    say("\x1b[2J\r\n", end="")
    assert capsys.readouterr().out == "\x1b[2J\r\n"


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    class Full(io.StringIO):
        file = open(tmp_path / "out", "w")  # noqa: SIM115 - closed below

        def write(self, text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def fileno(self):
            return self.file.fileno()

    monkeypatch.setattr("sys.stdout", Full())
    with pytest.raises(OutputFailed, match="the output cannot be written: No space left on device"):
        say("x")
    Full.file.close()


class Person:
    """Types into `aengine chat` in a pseudo-terminal."""

    def __init__(self, *argv):
        self.seen = ""
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            os.environ["TERM"] = "xterm"
            os.execv(sys.executable, [sys.executable, "-m", "aengine.cli", "chat", *argv])

    def waits_for(self, pattern):
        while not re.search(pattern, self.seen):
            ready, _, _ = select.select([self._terminal], [], [], DEADLINE_S)
            assert ready, f"no {pattern!r} in {self.seen!r}"
            self._reads(pattern)

    def _reads(self, pattern):
        try:
            data = os.read(self._terminal, 65_536)
        except OSError:  # the other end is closed
            data = b""
        assert data, f"no {pattern!r} in {self.seen!r}"
        self.seen += data.decode(errors="replace").replace("\r", "")

    def types(self, text):
        self.seen = ""
        os.write(self._terminal, text.encode())

    def interrupts_until(self, pattern):
        """Ctrl-C, again each second: readline loses one that comes between its prompt and its wait for a key."""
        end = time.monotonic() + DEADLINE_S
        self.types("\x03")
        while not re.search(pattern, self.seen):
            assert time.monotonic() < end, f"no {pattern!r} in {self.seen!r}"
            if select.select([self._terminal], [], [], 1)[0]:
                self._reads(pattern)
            else:
                os.write(self._terminal, b"\x03")

    def leaves(self):
        self.types("\x04")
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        os.close(self._terminal)
        return code


def test_a_person_at_a_terminal(script, tmp_path):
    script.answers = [Reply(["He", "\x1b[2Jllo"], hold=True), Reply(["Yes"])]
    person = Person("--url", script.url, "--api-key", "secret")
    person.waits_for(r"\x1b\[\?2004h> $")  # several lines pasted come as one
    person.types("\x1b[200~/usr and\nmore\x1b[201~\r")
    person.waits_for("unknown command /usr")
    person.types("\x1b[200~one\ntwo\x1b[201~\r")
    person.waits_for(r"He␛\[2Jllo")
    person.types("\x03")
    person.waits_for(r"\[stopped · 21 prompt tokens[^\n]*\n[^\n]*> $")
    person.types("half")
    person.waits_for("half")
    person.interrupts_until("> $")
    person.interrupts_until(r"Ctrl-D or /quit leaves\n[^\n]*> $")
    person.types("so\r")
    person.waits_for(r"Yes\n\[21 prompt[^\n]*\n[^\n]*> $")
    assert person.leaves() == 0
    assert [m["content"] for m in script.bodies[1]["messages"]] == ["one\ntwo", "He\x1b[2Jllo", "so"]
    history = (tmp_path / "chat_history").read_text()
    assert history.endswith("one\ntwo\nso\n")
    assert "half" not in history
