"""The openai client for Node against a listening server, where node and npm are at hand.

The package is a program of 8 MB that belongs to npm, not to this repository: npm installs the version named here into a
cache, once for each machine. A machine without node cannot run it, as one without a GPU cannot run a GPU test.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.waiting import DEADLINE_S

VERSION = "6.49.0"
PROGRAMS = ("node", "npm")


@pytest.fixture(scope="module")
def folder():
    """A folder whose node_modules has the client; workers of one test run wait for the first."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aengine-clients"
    made = root / f"openai-node-{VERSION}"
    made.mkdir(parents=True, exist_ok=True)
    with (made / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made / ".installed").exists():
            (made / "package.json").write_text('{"private": true}')
            command = ["npm", "install", "--no-audit", "--no-fund", f"openai@{VERSION}"]
            done = subprocess.run(command, cwd=made, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            (made / ".installed").touch()
    return made


@pytest.mark.skipif(not all(map(shutil.which, PROGRAMS)), reason="no node and npm on this machine")
async def test_openai_node(serve, folder):
    client, engine = await serve()
    script = folder / "core.mjs"  # node looks for packages from where the script stands
    script.write_bytes((Path(__file__).parent / "openai_node_core.mjs").read_bytes())
    process = await asyncio.create_subprocess_exec(
        "node",
        str(script),
        str(client.make_url("/v1")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 2 * DEADLINE_S)
    assert (process.returncode, out.decode()) == (0, "all of it\n"), err.decode()
    assert not engine.open
