"""Claim: planning step N + 1 while step N runs keeps the device busy, where its predecessors let it wait.

Loads the whole server (HTTP, SSE, detokenising and all) with a C client over loopback. The device is modelled, so when
it was idle, and why, is known exactly; the load client checks that every answer has all of its tokens, and digests
them, so that modes can be compared token for token.

    modes   synchronous (depth 0), multi-step 8 and overlapped (depth 1) on the same load: device idle %, tokens/s,
            TTFT, ITL. The first idle figure is of the time in which (nearly) all clients had a running request,
            "whole" of the load with its ramp and end.
    limits  overlapped: the shortest step (the profile, times one of --scales) and the highest client count (one of
            --ladder) at which the device is idle at most --idle percent of the steady time. Each is found by bisection:
            three tries of about 20 s, so under 4 minutes in all; --budget-s bounds it.

    python bench/overlap.py [--section modes|limits|all] [--clients 1024] [--frontends N] [--sim-profile h100-llama8b]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from aengine.cli.environment import environment  # noqa: E402

T = TypeVar("T")
VOCAB = 49_152
OWN_TOKENS = 16  # of each prompt; the others are shared, so that the ramp is short and all clients stream together
SEED_TOKENS = 32
MODES = {"depth 0": ("--depth", "0"), "multi-step 8": ("--multi-step", "8"), "depth 1": ("--depth", "1")}
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
READY_S = 120.0
LEAST_TOKEN_S = 15e-6  # what a token costs a server at least: where steps are shorter than that, loads must still end


@dataclass(frozen=True)
class Sample:
    """The server's counters at one moment."""

    at_s: float
    running: float
    busy_s: float
    idle_s: dict[str, float]
    stages: dict[str, float]


@contextlib.contextmanager
def serve(args: argparse.Namespace, clients: int, *more: str) -> Iterator[int]:
    """A server's port, once it is ready."""
    length = args.prompt_tokens + args.max_tokens + 16
    command = [
        *(sys.executable, "-m", "aengine.cli", "serve", args.model, "--port", str(args.port), "--device", "sim"),
        *("--sim-profile", args.sim_profile, "--max-num-seqs", str(clients), "--max-waiting", str(2 * clients)),
        *(
            "--max-model-len",
            str(length),
            "--max-batched-tokens",
            str(max(2048, 2 * clients)),
            "--log-level",
            "warning",
        ),
        *more,
    ]
    if args.frontends is not None:
        command += ["--frontends", str(args.frontends)]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=HERE.parent)
        try:
            until_s = time.monotonic() + READY_S
            while not healthy(args.port):
                if process.poll() is not None or time.monotonic() > until_s:
                    output.seek(0)
                    sys.exit(f"the server did not start:\n{output.read().decode()}")
                time.sleep(0.1)
            yield args.port
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def healthy(port: int) -> bool:
    try:
        with DIRECT.open(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def sample(port: int) -> Sample:
    with DIRECT.open(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        text, at_s = response.read().decode(), time.monotonic()
    found = re.findall(r"^([\w:]+)(?:\{([^}]*)\})? (\S+)$", text, re.M)

    def by(name: str, label: str) -> dict[str, float]:
        sums: dict[str, float] = {}
        for metric, labels, value in found:
            if metric == name and (match := re.search(rf'{label}="([^"]*)"', labels)):
                sums[match[1]] = sums.get(match[1], 0.0) + float(value)
        return sums

    def one(name: str) -> float:
        return sum(float(value) for metric, _, value in found if metric == name)

    return Sample(
        at_s,
        one("vllm:num_requests_running"),
        one("aengine:step_device_seconds_sum"),
        by("aengine:device_idle_seconds_total", "cause"),
        by("aengine:stage_seconds_total", "stage"),
    )


def idle(before: Sample, after: Sample) -> dict[str, float]:
    """Percent of the time in which the device had, or could have had, work; by cause and in all."""
    idle_s = {cause: after.idle_s[cause] - before.idle_s[cause] for cause in after.idle_s if cause != "no_work"}
    whole_s = after.busy_s - before.busy_s + sum(idle_s.values())
    percent = {cause: 100 * seconds / whole_s for cause, seconds in idle_s.items()} if whole_s else idle_s
    return percent | {"total": sum(percent.values())}


class Watch(threading.Thread):
    """Samples the server's counters while the load runs. A scrape costs its loop milliseconds, so few are taken."""

    def __init__(self, port: int, every_s: float) -> None:
        super().__init__(daemon=True)
        self.samples = [sample(port)]
        self._port, self._every_s, self._ended = port, every_s, threading.Event()

    def run(self) -> None:
        while not self._ended.wait(self._every_s):
            self.samples.append(sample(self._port))

    def end(self) -> None:
        self._ended.set()
        self.join()
        self.samples.append(sample(self._port))


def load(args: argparse.Namespace, port: int, clients: int, requests: int, max_tokens: int, watch_s: float) -> dict:
    """One run of the load client beside a watch."""
    shared = max(0, args.prompt_tokens - OWN_TOKENS)
    ramp_ms = 2 * clients
    command = [args.binary, port, clients, requests, args.prompt_tokens, max_tokens, ramp_ms, VOCAB, shared]
    watch = Watch(port, watch_s)
    watch.start()
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=args.limit_s)
    watch.end()
    if done.returncode not in (0, 1) or not done.stdout:
        sys.exit(f"the load client failed: {done.stderr}")
    told: dict[str, Any] = json.loads(done.stdout)
    if told["failed"]:
        sys.exit(f"{told['failed']} of {told['failed'] + told['answered']} answers failed: {told['first_failure']}")
    samples = watch.samples
    full = [each for each in samples if each.running >= 0.9 * clients]
    whole_s = samples[-1].at_s - samples[0].at_s
    told["idle_whole"] = idle(samples[0], samples[-1])
    told["idle_steady"] = idle(full[0], full[-1]) if len(full) > 1 else None
    told["steady_s"] = full[-1].at_s - full[0].at_s if len(full) > 1 else 0.0
    stages = {stage: samples[-1].stages[stage] - samples[0].stages[stage] for stage in samples[-1].stages}
    told["stages_percent"] = {stage: round(100 * seconds / whole_s, 1) for stage, seconds in stages.items()}
    return told


def run(args: argparse.Namespace, clients: int, requests: int, watch_s: float, *more: str) -> dict:
    with serve(args, clients, *more) as port:
        load(args, port, min(clients, SEED_TOKENS), 1, 8, 60.0)  # warm: the shared prompt is cached, all paths have run
        return load(args, port, clients, requests, args.max_tokens, watch_s)


def row(name: str, told: dict) -> str:
    """Steady idle % (and by cause), tokens/s, TTFT, ITL: of all answers, and while every client streamed."""
    at = told["idle_steady"] or told["idle_whole"]
    causes = " + ".join(f"{value:.2f} {cause}" for cause, value in at.items() if cause != "total" and value >= 0.005)
    note = "" if told["idle_steady"] else "  (never steady: of the whole load)"
    return (
        f"{name:<14} idle {at['total']:6.2f} % = {causes or 'none':<28} whole {told['idle_whole']['total']:5.1f} %  "
        f"{told['tokens_per_s']:>7,.0f} tok/s  TTFT p50 {told['ttft_ms']['p50']:.0f} p99 {told['ttft_ms']['p99']:.0f}  "
        f"ITL p50 {told['steady']['itl_p50_ms']:.1f} p99 {told['steady']['itl_p99_ms']:.1f} "
        f"max {told['steady']['itl_max_ms']:.1f} ms{note}"
    )


def modes(args: argparse.Namespace) -> dict:
    """The same load in each mode."""
    results = {}
    for name in args.only or MODES:
        flags = MODES[name]
        results[name] = run(args, args.clients, args.requests, args.watch_s, "--sim-scale", str(args.sim_scale), *flags)
        print(row(name, results[name]), flush=True)
    digests = {told["digest"] for told in results.values()}
    print(f"digests {'equal: no token lost or reordered' if len(digests) == 1 else f'DIFFER: {digests}'}")
    return results | {"digests_equal": len(digests) == 1}


def limits(args: argparse.Namespace) -> dict:
    """Shortest step at --clients, then most clients at the profile's own step; no try begins after --budget-s."""
    until_s = time.monotonic() + args.budget_s
    rows: list[dict] = []

    def fine(clients: int, scale: float) -> bool | None:
        """Whether the device was idle at most --idle percent; None: there is no time left to try."""
        if time.monotonic() > until_s:
            print(f"{clients} x {scale}: not tried, the {args.budget_s:.0f} s are over", flush=True)
            return None
        began_s, step_s = time.monotonic(), modelled_step_s(args, clients) * scale
        steps = math.ceil(args.steady_s / max(step_s, clients * LEAST_TOKEN_S))
        tokens = min(args.max_tokens, max(32, steps))
        requests = max(1, round(steps / tokens))
        tried = argparse.Namespace(**{**vars(args), "max_tokens": tokens})
        told = run(tried, clients, requests, args.steady_s / 8, "--sim-scale", str(scale))
        idle_percent = (told["idle_steady"] or told["idle_whole"])["total"]
        told |= {
            "step_ms": 1e3 * step_s,
            "scale": scale,
            "holds": idle_percent <= args.idle,
            "idle_percent": idle_percent,
        }
        rows.append(told)
        took_s = time.monotonic() - began_s
        print(row(f"{clients} x {told['step_ms']:.2f} ms", told) + f"  [{took_s:.0f} s]", flush=True)
        return told["holds"]

    print(f"scales of the step at {args.clients} clients:", *args.scales, flush=True)
    print("clients at the profile's own step:", *args.ladder, flush=True)
    scale = first_good(args.scales, lambda scale: fine(args.clients, scale))
    most = first_good(args.ladder[::-1], lambda clients: fine(clients, 1.0))
    print(f"{'clients':>8} {'step ms':>8} {'idle %':>7} {'tok/s':>8} {'ITL p99 ms':>10}  idle <= {args.idle} %")
    for told in sorted(rows, key=lambda told: (told["clients"], told["step_ms"])):
        print(
            f"{told['clients']:>8} {told['step_ms']:>8.2f} {told['idle_percent']:>7.2f} {told['tokens_per_s']:>8,.0f} "
            f"{told['steady']['itl_p99_ms']:>10.1f}  {'holds' if told['holds'] else 'missed'}"
        )
    step_ms = None if scale is None else 1e3 * modelled_step_s(args, args.clients) * scale
    step = "none of those tried" if step_ms is None else f"{step_ms:.2f} ms at {args.clients} clients"
    print(f"idle <= {args.idle} %: shortest step {step}; most clients {most or 'none of those tried'}")
    return {"shortest_step_ms": step_ms, "most_clients": most, "tries": rows}


def first_good(ladder: Sequence[T], good: Callable[[T], bool | None]) -> T | None:
    """The first rung that is good, where all behind a good one are good as well: by bisection, in log2(n + 1) tries.
    Where `good` has no answer (None), the best of what is known."""
    low, high = 0, len(ladder)
    while low < high:
        middle = (low + high) // 2
        answer = good(ladder[middle])
        if answer is None:
            break
        low, high = (low, middle) if answer else (middle + 1, high)
    return ladder[high] if high < len(ladder) else None


def modelled_step_s(args: argparse.Namespace, clients: int) -> float:
    """A decode step of all clients in the middle of their answers."""
    from aengine.runner.sim_profiles import PROFILES

    context = args.prompt_tokens + args.max_tokens // 2
    return PROFILES[args.sim_profile].step_s(clients, clients, clients * context)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", choices=["modes", "limits", "all"], default="modes")
    parser.add_argument("--model", default="smollm2-135m", help="whose vocabulary the modelled device speaks")
    parser.add_argument("--sim-profile", default="h100-llama8b")
    parser.add_argument("--sim-scale", type=float, default=1.0, help="modes: so many times the profile's step")
    parser.add_argument("--only", choices=list(MODES), nargs="+", default=None, help="modes: these alone")
    parser.add_argument("--clients", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=1, help="modes: requests of each client, one after the other")
    parser.add_argument("--prompt-tokens", type=int, default=400)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--frontends", type=int, default=None, help="passed to the server; unset: its own default")
    parser.add_argument("--port", type=int, default=8411)
    parser.add_argument("--watch-s", type=float, default=0.7, help="modes: seconds between looks at the counters")
    parser.add_argument("--idle", type=float, default=2.0, help="limits: percent of the steady time")
    parser.add_argument("--steady-s", type=float, default=14.0, help="limits: seconds of load that each try aims at")
    parser.add_argument(
        "--scales", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0], help="limits: rising"
    )
    parser.add_argument(
        "--ladder", type=int, nargs="+", default=[128, 256, 512, 768, 1024, 1536, 2048], help="limits: clients, rising"
    )
    parser.add_argument("--budget-s", type=float, default=240.0, help="limits: seconds after which no try begins")
    parser.add_argument("--limit-s", type=float, default=120.0, help="seconds one load may take")
    args = parser.parse_args()
    print(
        f"modelled step of {args.clients} clients: {1e3 * modelled_step_s(args, args.clients) * args.sim_scale:.2f} ms"
    )
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        args.binary = str(Path(folder) / "sse_load")
        subprocess.run(["cc", "-O2", "-o", args.binary, str(HERE / "sse_load.c"), "-lm"], check=True)
        for name, section in (("modes", modes), ("limits", limits)):
            if args.section in (name, "all"):
                results[name] = section(args)
    config = {name: value for name, value in vars(args).items() if name != "binary"}
    print(json.dumps({"bench": "overlap", "config": config, "environment": environment(), **results}))
    if results.get("modes", {}).get("digests_equal") is False:
        sys.exit(1)


if __name__ == "__main__":
    main()
