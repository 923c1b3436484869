"""The scripts of bench/ run as people run them; their helpers are imported by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parent.parent.parent / "bench"
sys.path.insert(0, str(BENCH))


def run_bench(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCH / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def json_line(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The last line, after checking what every script promises to print."""
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert lines[0].startswith("claim: ")
    assert lines[1].startswith("config: ")
    assert "commit" in lines[2]
    line: dict[str, Any] = json.loads(lines[-1])
    assert set(line) == {"bench", "environment", "config", "figures", "claims"}
    assert all(claim["holds"] in (True, False) for claim in line["claims"])
    return line


@pytest.fixture(scope="session")
def small_traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trace files in the two formats: 400 requests each, conversations of three turns in the second."""
    folder = tmp_path_factory.mktemp("traces")
    rows = [f"2023-11-16 18:15:46.68,{200 + 37 * i % 1900},{10 + 29 * i % 300}" for i in range(400)]
    (folder / "azure_conv.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    lines = []
    for i in range(400):
        chat, turn = divmod(i, 3)
        blocks = [0] + [1 + 100 * chat + block for block in range(6 * (turn + 1))]
        tokens = len(blocks) * 512 - (i % 500)
        lines.append(json.dumps({"timestamp": i, "input_length": tokens, "output_length": 50, "hash_ids": blocks}))
    (folder / "conversation_trace.jsonl").write_text("\n".join(lines) + "\n")
    return folder
