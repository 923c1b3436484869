"""Runs the client matrix: `tests/clients/run`.

Owns: the order of things (environment, server, script, table), the command line, the record of results.
Does not know: what a client checks (the scripts do), which packages it needs (`catalogue`).
Invariants: a client that cannot be installed or fails does not keep the others from running; the exit code is 1 if any
failed; a server serves one client and ends with it, so that no client sees what another left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from aengine.config import home
from aengine.models.gguf import open_gguf
from aengine.models.gguf_tokenizer import build_tokenizer
from aengine.models.store import resolve
from tests.clients.catalogue import CLIENTS, Client
from tests.clients.environments import Environment, NotInstalled, cache, prepare
from tests.clients.table import Result, load, save, write_table
from tests.e2e.serving import serve

ROOT = Path(__file__).parents[2]
MODEL = "smollm2-135m"
LIMIT_S = 360


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/clients/run", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", metavar="NAME", choices=[client.name for client in CLIENTS])
    parser.add_argument("--use", action="append", metavar="NAME=FOLDER", default=[], help="an environment you have")
    parser.add_argument("--list", action="store_true", help="print the clients and end")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{client.name:<16}{client.about}" for client in CLIENTS))
        return 0
    used = dict(entry.split("=", 1) for entry in options.use)
    chosen = [client for client in CLIENTS if options.only is None or client.name in options.only]
    failed = 0
    for client in chosen:
        result = attempt(client, Path(used[client.name]) if client.name in used else None)
        results = load() | {client.name: result}  # another run may have written meanwhile
        save(results)
        failed += result.verdict == "failed"
        print(f"{client.name:<16}{result.verdict}  {result.seconds:.0f} s", flush=True)
        for line in result.failures:
            print("    " + line, flush=True)
    print("table:", write_table(load()).relative_to(ROOT))
    return int(failed > 0)


def attempt(client: Client, folder: Path | None) -> Result:
    """One client, from its installation to its verdict."""
    stamp = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "commit": commit()}
    try:
        environment = prepare(client, folder)
    except NotInstalled as error:
        return Result("failed", [], [f"not installed: {error}"], [], 0.0, **stamp)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(serve(MODEL, "--max-num-seqs", "16", "--kv-bytes", "512MiB"))
            for _ in range(client.servers)
        ]
        ended, text = run_script(client, environment, [server.url for server in servers])
        for server in servers:
            server.wait_idle(20)  # no client may leave a request behind
    passed = re.findall(r"^ok (\S+)$", text, re.M)
    failures = re.findall(r"^failed (.+)$", text, re.M)
    if (ended != 0 and not failures) or (not passed and not failures):
        failures = [f"ended with {ended}: {text.strip().splitlines()[-1][:300] if text.strip() else 'no output'}"]
    verdict = "failed" if failures else "passed"
    return Result(verdict, passed, failures, environment.versions(client), time.monotonic() - began, **stamp)


def run_script(client: Client, environment: Environment, urls: list[str]) -> tuple[int, str]:
    """The exit code and the whole output, which is also kept beside the environment."""
    settings = {
        "AENGINE_URL": urls[0],
        "AENGINE_URLS": ",".join(urls),
        "AENGINE_MODEL": MODEL,
        "AENGINE_ROOT": str(ROOT),
        "AENGINE_TOKENIZER": str(tokenizer_folder()),
        "HF_HUB_OFFLINE": "1",
        "GRADIO_ANALYTICS_ENABLED": "False",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "PYTHONUNBUFFERED": "1",
    }
    process = subprocess.Popen(
        environment.command(client),
        cwd=environment.work,
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the script and what it started
        text, _ = process.communicate()
        text += f"\nfailed script: not ended after {LIMIT_S} s\n"
    (cache() / f"{client.name}.log").write_text(text)
    return process.returncode, text


def tokenizer_folder() -> Path:
    """The model's tokenizer as Hugging Face's libraries read it, for clients that count tokens themselves."""
    folder = cache() / f"tokenizer-{MODEL}"
    folder.mkdir(exist_ok=True)
    made = build_tokenizer(open_gguf(resolve(MODEL, home=home(), progress=None).path))
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def commit() -> str:
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*", "--abbrev=7"]
    done = subprocess.run(asked, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
