"""`aengine bench serve`: load a running server and print what it did.

Owns: the command's flags and checks, the JSON record.
Does not know: how load is made (load.py) or summed up (latency.py).
Invariants: the exit code is 1 when a request failed; --json prints one line that names config, environment and result.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
from typing import Any

from aengine.cli import latency
from aengine.cli.environment import environment
from aengine.cli.load import Load, run_load
from aengine.cli.options import Parser, UsageError


def parser() -> Parser:
    made = Parser(
        "bench",
        "Load a running OpenAI-compatible server and print time to first token, inter-token latency,\n"
        "end-to-end time and tokens per second.",
        epilog="closed loop: --concurrency clients, each sending its next request when its last has ended.\n"
        "open loop:   --rate requests a second with Poisson arrivals, whatever the server does.",
    )
    made.add_argument("what", choices=["serve"], help="what to measure: a server")
    made.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="base URL (default: %(default)s)")
    made.add_argument("--num-requests", type=int, default=32, metavar="N", help="requests to send (default: 32)")
    made.add_argument("--concurrency", type=int, default=8, metavar="N", help="clients of a closed loop (default: 8)")
    made.add_argument("--rate", type=float, metavar="X", help="requests a second: an open loop")
    made.add_argument("--prompt-tokens", type=int, default=128, metavar="N", help="tokens a prompt (default: 128)")
    made.add_argument("--max-tokens", type=int, default=64, metavar="N", help="tokens an answer (default: 64)")
    made.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default: 0)")
    made.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals (default: 0)")
    made.add_argument("--model", help="served name (default: the first the server lists)")
    made.add_argument("--api-key", metavar="TEXT", help="bearer token")
    made.add_argument("--json", action="store_true", help="print one JSON line instead of a table")
    return made


def run(args: argparse.Namespace) -> int:
    load = _load(args)
    samples, took_s = asyncio.run(run_load(load))
    figures = latency.summary(samples, took_s)
    if args.json:
        print(json.dumps({"claim": "bench serve", "config": _shown(load), "environment": environment()} | figures))
    else:
        print(latency.as_text(figures))
    return 1 if figures["failed"] else 0


def _load(args: argparse.Namespace) -> Load:
    for name in ("num_requests", "concurrency", "prompt_tokens", "max_tokens"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}, not at least 1")
    if args.rate is not None and not 0 < args.rate < float("inf"):
        raise UsageError(f"--rate is {args.rate}, not a number above 0")
    if not args.url.startswith(("http://", "https://")):
        raise UsageError(f"{args.url} is not an http:// or https:// URL")
    return Load(
        base_url=args.url.rstrip("/").removesuffix("/v1") + "/",
        requests=args.num_requests,
        concurrency=args.concurrency,
        rate=args.rate,
        prompt_tokens=args.prompt_tokens,
        max_tokens=args.max_tokens,
        seed=args.seed,
        model=args.model,
        api_key=args.api_key,
        temperature=args.temperature,
    )


def _shown(load: Load) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(load).items() if name != "api_key"}
