"""Claim: front-end processes take HTTP and text off the engine's loop, so that the device idles less.

One server after the other with 0, 1 and 2 front-ends on the modelled device, loaded by sse_load.c (cc -O2 -o sse_load
sse_load.c). Device idle is 1 - device seconds / seconds, between two scrapes while all clients stream.

    python bench/frontends.py --load ./sse_load [--clients 1024] [--tokens 200] [--frontends 0 1 2]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
import urllib.request


def scrape(url: str) -> dict[str, float]:
    text = urllib.request.urlopen(url + "/metrics", timeout=30).read().decode()
    found: dict[str, float] = {"at": time.monotonic()}
    for name, value in re.findall(r"^(\S+?)(?:\{[^}]*\})? (\S+)$", text, re.M):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def measure(args: argparse.Namespace, frontends: int) -> dict[str, object]:
    command = [sys.executable, "-m", "aengine.cli", "serve", "--port", str(args.port), "--device", "sim"]
    command += ["--sim-profile", args.profile, "--max-num-seqs", str(args.clients), "--max-waiting", "4096"]
    command += ["--max-batched-tokens", "8192", "--max-model-len", "2048", "--frontends", str(frontends)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        if "chat page" in line:
            break
    url = f"http://127.0.0.1:{args.port}"
    try:
        loading = [args.load, args.port, args.clients, 1, args.prompt, args.tokens, 500, 49000, 0, ',"ignore_eos":true']
        load = subprocess.Popen([str(part) for part in loading], stdout=subprocess.PIPE, text=True)
        while scrape(url)["vllm:num_requests_running"] < args.clients and load.poll() is None:
            time.sleep(0.1)
        time.sleep(0.5)
        first, engine_s = scrape(url), cpu_s(server.pid)
        time.sleep(args.window)
        last, engine_s = scrape(url), cpu_s(server.pid) - engine_s
        out, _ = load.communicate(timeout=120)
        delta = {name: last[name] - first[name] for name in last if name in first}
        steps = delta["aengine:steps_total"]
        return {
            "frontends": frontends,
            "running_at_end": last["vllm:num_requests_running"],
            "steps": steps,
            "device_ms_per_step": round(1e3 * delta["aengine:step_device_seconds_sum"] / max(steps, 1), 2),
            "device_idle_percent": round(100 * (1 - delta["aengine:step_device_seconds_sum"] / delta["at"]), 1),
            "tokens_per_s": round(delta["vllm:generation_tokens_total"] / delta["at"]),
            "engine_cpu_percent": round(100 * engine_s / delta["at"]),
            "load": json.loads(out.strip().splitlines()[-1]),
        }
    finally:
        server.terminate()
        server.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", required=True)
    parser.add_argument("--port", type=int, default=18440)
    parser.add_argument("--profile", default="h100-llama8b")
    parser.add_argument("--clients", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--window", type=float, default=4.0)
    parser.add_argument("--frontends", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    for frontends in args.frontends:
        print(json.dumps(measure(args, frontends)), flush=True)


if __name__ == "__main__":
    main()
