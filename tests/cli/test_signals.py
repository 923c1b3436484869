"""Signals where the interpreter's way would not do."""

import os
import signal
import subprocess
import sys

import pytest

from aengine.cli.signals import uninterrupted


def test_an_interrupt_while_a_model_loads_ends_at_once_with_one_line(tmp_path):
    code = (
        "import os, signal, sys, time; from aengine.cli import chat;"
        "factory = lambda config: (os.kill(os.getpid(), signal.SIGINT), time.sleep(30));"
        "chat.run(chat.parser().read(['some-model']), factory)"
    )
    home = {**os.environ, "AENGINE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, env=home)
    assert done.returncode == 130
    assert done.stderr == "loading some-model …\naengine chat: ended by SIGINT while some-model was loading\n"


def test_what_is_finished_is_not_interrupted():
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
