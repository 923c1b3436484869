"""Claim: the default server is ready and gives its first token in under 3 s, and holds little beside weights and KV.

Starts `aengine serve` on a free port of 127.0.0.1 several times and takes the time, from the start of the process,
until it listens, until /health says 200, and until the first token of a request sent then; then how much memory is
resident: after that token, and after `--streams` requests at once. Weights and reserved KV pages are what the server's
own table says; touched KV pages are what of the arena's mapping is resident. With `--fill` prompts of their own follow
until all of the reserved pages are touched, and memory is set against weights and the whole pool; a pool of the default
size takes minutes to fill, a small one makes what is resident beside it count for more.

Modules are compiled once, as an installation does it: one start that does not count goes before, and the servers may
write bytecode whatever this shell's environment says. Without any, a start takes 0.4 s of processor time more.

    python bench/startup.py [--model smollm2-135m] [--repeats 5] [--streams 16] [--serve-args "--dtype bfloat16"]
    python bench/startup.py --repeats 1 --fill --serve-args "--kv-bytes 512MiB"
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import re
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

MIB = 2**20
UNITS = {"B": 1, "KiB": 2**10, "MiB": MIB, "GiB": 2**30, "TiB": 2**40}
LONGEST_S = 120.0
PROMPT_TOKENS, OUTPUT_TOKENS = 256, 64
FILL_TOKENS, FILL_STREAMS = 1024, 4
FULL = 0.99  # of the reserved pages: the table's figure is rounded


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def connected(port: int, process: subprocess.Popen[bytes]) -> http.client.HTTPConnection:
    ends_s = time.perf_counter() + LONGEST_S
    while time.perf_counter() < ends_s and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONGEST_S)
        try:
            connection.connect()
        except OSError:
            time.sleep(0.005)
        else:
            return connection
    raise SystemExit(f"the server does not listen on port {port} (exit code {process.poll()})")


def wait_until_ready(connection: http.client.HTTPConnection) -> None:
    ends_s = time.perf_counter() + LONGEST_S
    while time.perf_counter() < ends_s:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        text = answer.read()
        if answer.status == 200:
            return
        if b"failed" in text:
            break
        time.sleep(0.01)
    raise SystemExit(f"the server does not become ready: {text!r}")


def complete(connection: http.client.HTTPConnection, body: dict[str, Any]) -> None:
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    if answer.status != 200:
        raise SystemExit(f"status {answer.status}: {text!r}")


def resident(pid: int, arena_bytes: float) -> dict[str, float]:
    """MiB: all that is resident, its anonymous and its file-backed part, and touched pages of the KV arena."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = {name: int(kib) * 1024 / MIB for name, kib in re.findall(r"(\w+):\s+(\d+) kB", status)}
    touched = 0.0
    for size, rss in re.findall(r"^Size:\s+(\d+) kB\n(?:.*\n)*?Rss:\s+(\d+) kB", smaps(pid), re.MULTILINE):
        if int(size) * 1024 >= 0.99 * arena_bytes:  # the table's figure is rounded
            touched += int(rss) * 1024 / MIB
    return {
        "rss": found["VmRSS"],
        "anonymous": found["RssAnon"],
        "file": found["RssFile"] + found["RssShmem"],
        "peak": found["VmHWM"],
        "kv_touched": touched,
    }


def smaps(pid: int) -> str:
    return Path(f"/proc/{pid}/smaps").read_text()


def ledger(log: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)}\s+([\d.]+) (\w+)\s*$", log, re.MULTILINE)
    if found is None:
        raise SystemExit(f"the server's table does not tell {name!r}:\n{log[-2000:]}")
    return float(found[1]) * UNITS[found[2]]


def crowd(port: int, streams: int, *, first: int = 0, tokens: int = PROMPT_TOKENS, answer: int = OUTPUT_TOKENS) -> None:
    """Requests with prompts of their own, number `first` and on, at once."""

    def one(index: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        prompt = [(index * 104729 + place * 31) % 40_000 + 100 for place in range(tokens)]
        complete(connection, {"prompt": prompt, "max_tokens": answer, "ignore_eos": True})
        connection.close()

    threads = [threading.Thread(target=one, args=(first + index,)) for index in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def fill(port: int, pid: int, arena: float) -> dict[str, float]:
    """Prompts until all KV pages are touched; ends the program when more of them touch no more."""
    sent, memory, before = 0, resident(pid, arena), -1.0
    while memory["kv_touched"] * MIB < FULL * arena:
        if memory["kv_touched"] <= before:
            raise SystemExit(f"{memory['kv_touched']:.0f} MiB of KV pages are touched, and more prompts touch no more")
        before = memory["kv_touched"]
        crowd(port, FILL_STREAMS, first=1000 + sent, tokens=FILL_TOKENS, answer=1)
        sent += FILL_STREAMS
        memory = resident(pid, arena)
    return memory


def start_once(arguments: list[str], streams: int, full: bool) -> dict[str, Any]:
    port = free_port()
    command = [sys.executable, "-m", "aengine.cli", "serve", "--host", "127.0.0.1", "--port", str(port), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryFile("w+b") as log:
        began_s = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            connection = connected(port, process)
            listening_s = time.perf_counter() - began_s
            wait_until_ready(connection)
            ready_s = time.perf_counter() - began_s
            complete(connection, {"prompt": "Once upon a time", "max_tokens": 1, "temperature": 0})
            first_s = time.perf_counter() - began_s
            ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            log.seek(0)
            told = log.read().decode("utf-8", "replace")
            weights, arena = ledger(told, "weights"), ledger(told, "KV pages")
            memory = {"first token": resident(process.pid, arena)}
            if streams:
                crowd(port, streams)
                memory["streams"] = resident(process.pid, arena)
            if full:
                memory["full pool"] = fill(port, process.pid, arena)
            return {
                "listening_s": listening_s,
                "ready_s": ready_s,
                "first_token_s": first_s,
                "cpu_s": sum(map(int, ticks)) / 100,
                "weights_mib": weights / MIB,
                "kv_reserved_mib": arena / MIB,
                "memory": memory,
            }
        finally:
            process.terminate()
            process.wait(60)


def ratios(run: dict[str, Any], when: str) -> dict[str, float]:
    """Resident bytes over weights and touched KV pages: of everything, and of anonymous memory alone."""
    memory, counted = run["memory"][when], run["weights_mib"]
    counted += memory["kv_touched"]
    return {"rss": memory["rss"] / counted, "anonymous": memory["anonymous"] / counted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--fill", action="store_true", help="touch all KV pages, after the last start")
    parser.add_argument("--serve-args", default="")
    args = parser.parse_args()
    print(__doc__.splitlines()[0])
    print(f"config: model {args.model}, {args.repeats} starts, {args.streams} streams, {args.serve_args or 'defaults'}")
    print(f"environment: Python {platform.python_version()}, {platform.machine()}, {platform.platform()}")

    arguments = [args.model, *shlex.split(args.serve_args)]
    start_once(arguments, 0, full=False)
    runs = []
    for index in range(args.repeats):
        last = index == args.repeats - 1
        run = start_once(arguments, args.streams if last else 0, args.fill and last)
        runs.append(run)
        times = ", ".join(f"{name.removesuffix('_s')} {run[name]:.2f} s" for name in run if name.endswith("_s"))
        print(f"start {index + 1}: {times}", flush=True)
    latest, names = runs[-1], ("listening_s", "ready_s", "first_token_s", "cpu_s")
    medians = {name: statistics.median(run[name] for run in runs) for name in names}
    least = {name: min(run[name] for run in runs) for name in names}
    for when, memory in latest["memory"].items():
        sizes = ", ".join(f"{name} {size:.0f}" for name, size in memory.items())
        ratio = ratios(latest, when)
        print(f"memory after {when}, MiB: {sizes}; weights {latest['weights_mib']:.0f}")
        print(f"  over weights + touched KV: all {ratio['rss']:.2f}, anonymous alone {ratio['anonymous']:.2f}")
    told = {when: ratios(latest, when) for when in latest["memory"]}
    print(json.dumps({"bench": "startup", "median": medians, "least": least, "runs": runs, "ratios": told}))


if __name__ == "__main__":
    main()
