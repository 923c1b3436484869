"""What every test may rely on: settings come from the test alone, not from the developer's environment.

AENGINE_HOME stays, so that a model that was fetched once is not fetched again.
"""

import os
import signal

import pytest

# Read when torch loads its OpenMP. Steps of 7 s were seen once while other programs wanted the same two cores; threads
# that spin at barriers are the likely cause, and sleeping ones cannot do it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


# A shell that starts tests in the background has them ignore Ctrl-C, and every program that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_settings_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AENGINE_") and name != "AENGINE_HOME":
            monkeypatch.delenv(name)
