"""Claim: aengine does at least as well as the best of its peers on the same machine, workload by workload.

Measures servers in turn, A B A B: each turn starts a server (or takes a running one), warms it up, runs the workloads
of load.py, and ends it. Prints medians over all runs and, row by row, ours against the best peer: above 1 where ours is
better. Nothing is installed: the peers' commands are given (see "Peers" in bench/README.md).

    python bench/peers.py --start 'aengine=aengine serve --port {port}' \\
        --start 'llamacpp=llama-server -m FILE --port {port} --alias smollm2' --set 'llamacpp:note=Q8_0'
    python bench/peers.py --server aengine=http://127.0.0.1:8000,pid=71 --server vllm=http://127.0.0.1:8101
    python bench/peers.py --read runs.jsonl      # the table again, of runs kept by --keep
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from comparison import Record, judge, noise, table
from load import WARM_UP, WORKLOADS, LoadError, Prompts, Workload, measure
from report import Report
from servers import Server, Usage, rss_mib, up

from aengine.config import home
from aengine.errors import AengineError

TURN = "start"  # what a record of a server's turn itself has in place of a workload


# ---- measuring


def turns(
    servers: Sequence[Server], prompts: Prompts, chosen: Mapping[str, Workload], args: Any
) -> Generator[Record, None, None]:
    """Records as they come. A server that fails gives a record with `error`, and the others go on."""
    for start in range(args.starts):
        for server in servers:
            try:
                for record in turn(server, prompts, chosen, args, start):
                    yield {"server": server.name, "start": start, **record}
            except LoadError as error:
                yield {"server": server.name, "start": start, "workload": TURN, "error": str(error)}


def turn(
    server: Server, prompts: Prompts, chosen: Mapping[str, Workload], args: Any, start: int
) -> Generator[Record, None, None]:
    with up(server, args.log_dir) as running:
        target = server.target(running.url)
        warm = asyncio.run(measure(WARM_UP, target, prompts.salted(f"{args.seed} warm-up {start}")))
        if warm["failed"]:
            raise LoadError(f"warm-up: {warm['errors']}")
        for run in range(args.runs):
            for name, workload in chosen.items():
                salted = prompts.salted(f"{args.seed} {name} {start} {run}")
                before, own_s = Usage.now(running.pid), time.process_time()
                measured = asyncio.run(measure(workload, target, salted))
                server_s, others = Usage.now(running.pid).since(before, time.process_time() - own_s)
                busy = {} if others is None else {"others_cores": others}
                yield {"workload": name, "run": run, **measured, **busy, **cost(measured, server_s)}
        ready = {} if running.ready_s is None else {"ready_ms": 1e3 * running.ready_s}
        yield {"workload": TURN, **ready, "rss_mib": rss_mib(running.pid)}


def cost(measured: Mapping[str, Any], server_s: float) -> dict[str, float]:
    """Processor time of the server a token: what a busy machine distorts least. Nothing when it is not known."""
    tokens = measured.get("output_tokens")
    return {"cpu_per_token_ms": 1e3 * server_s / tokens} if tokens and server_s else {}


def shown(record: Record) -> str:
    """One line about a record, for whoever waits."""
    head = f"{record['server']:16} start {record['start']} {record['workload']:6}"
    if "error" in record:
        return f"{head} FAILED: {record['error']}"
    return head + "".join(f" {key} {value:.4g}" for key, value in record.items() if isinstance(value, float))


# ---- the command line


def prompts_of(model: str) -> Prompts:
    from aengine.models.loader import load_tokenizer  # brings torch: seconds that --help and --read need not wait for
    from aengine.models.store import resolve

    tokenizer = load_tokenizer(resolve(model, home=home()))
    return Prompts.of(lambda text: tokenizer.encode(text, add_special_tokens=False))


def running_server(text: str) -> Server:
    name, _, rest = text.partition("=")
    url, _, told = rest.partition(",")
    return Server(name, url=url.rstrip("/")).told(told)


def started_server(text: str) -> Server:
    name, _, command = text.partition("=")
    return Server(name, command=command)


def told_servers(servers: Sequence[Server], sets: Sequence[str]) -> list[Server]:
    """The servers with what --set says about them."""
    made = {server.name: server for server in servers}
    if len(made) < len(servers):
        raise LoadError(f"two servers have one name: {', '.join(server.name for server in servers)}")
    for text in sets:
        name, _, told = text.partition(":")
        if name not in made:
            raise LoadError(f"--set {text!r}: no server {name!r} among {', '.join(made) or 'none'}")
        made[name] = made[name].told(told)
    return list(made.values())


def read_workloads(names: str, requests: str) -> dict[str, Workload]:
    """The workloads named, with the number of requests that `requests` (W2=64,W5=8) gives them."""
    counts = {name: str(workload.requests) for name, workload in WORKLOADS.items()}
    for part in filter(None, requests.split(",")):
        name, _, count = part.partition("=")
        if name not in WORKLOADS or not count.isdigit() or int(count) < 1:
            raise LoadError(f"--requests {part}: not the name of a workload = a number of at least 1")
        counts[name] = count
    for name in names.split(","):
        if name not in WORKLOADS:
            raise LoadError(f"workload {name!r} is none of {', '.join(WORKLOADS)}")
    return {name: replace(WORKLOADS[name], requests=int(counts[name])) for name in names.split(",")}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    several: dict[str, Any] = {"action": "append", "default": []}
    in_turn = {**several, "dest": "servers"}
    parser.add_argument("--start", **in_turn, type=started_server, metavar="NAME=COMMAND", help="{port}: a free port")
    parser.add_argument(
        "--server", **in_turn, type=running_server, metavar="NAME=URL[,KEY=VALUE…]", help="runs already"
    )
    keys = "model, note, health (path), api (completions, chat), prompts (ids, text), ignore_eos (yes, no), pid"
    parser.add_argument("--set", **several, metavar="NAME:KEY=VALUE…", help=keys)
    parser.add_argument("--ours", help="comma list of our servers (default: names that begin with aengine)")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="comma list (default: %(default)s)")
    parser.add_argument("--requests", default="", metavar="W2=64,…", help="requests of a run")
    parser.add_argument("--starts", type=int, default=2, help="turns of each server (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=1, help="runs of each workload in a turn (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokenizer", default="smollm2-135m", metavar="MODEL", help="whose tokens prompts are made of")
    parser.add_argument("--log-dir", type=Path, help="where started servers' output goes (default: a new folder)")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="append each record to FILE as a JSON line")
    parser.add_argument("--read", **several, type=Path, metavar="FILE", help="also compare records kept earlier")
    return parser.parse_args(argv)


def end(*_: Any) -> None:
    """Leaves by way of the blocks that end servers; once, whoever asks again meanwhile."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit("peers.py: ended by SIGTERM")


def main(argv: Sequence[str] | None = None) -> None:
    try:
        args = arguments(argv)
        servers = told_servers(args.servers, args.set)
        chosen = read_workloads(args.workloads, args.requests)
        records: list[Record] = [json.loads(line) for path in args.read for line in path.read_text().splitlines()]
        prompts = prompts_of(args.tokenizer) if servers else Prompts(())
        args.log_dir = args.log_dir or Path(tempfile.mkdtemp(prefix="peers-"))
        args.log_dir.mkdir(parents=True, exist_ok=True)
    except (LoadError, AengineError, OSError, ValueError) as error:
        sys.exit(f"peers.py: {error}")
    config = {"workloads": args.workloads, "starts": args.starts, "runs": args.runs, "seed": args.seed}
    config |= {"requests": {name: workload.requests for name, workload in chosen.items()}, "logs": str(args.log_dir)}
    report = Report("peers", (__doc__ or "").split("\n", 1)[0].removeprefix("Claim: "), config)
    for server in servers:
        print(f"{server.name}: {server.note or 'no note'}: {server.command or server.url}")
    signal.signal(signal.SIGTERM, end)
    with contextlib.closing(turns(servers, prompts, chosen, args)) as coming:
        for record in coming:
            records.append(record)
            print(shown(record), flush=True)
            if args.keep:
                with args.keep.open("a") as file:
                    file.write(json.dumps(record) + "\n")
    names = list(dict.fromkeys(record["server"] for record in records))
    ours = args.ours.split(",") if args.ours else [name for name in names if name.startswith("aengine")]
    peers = [name for name in names if name not in ours]
    print("", *table(records, ours, peers), noise(records), sep="\n")
    report.figures |= {"servers": [asdict(server) for server in servers], "runs": records}
    judge(report, records, ours, peers)
    report.close()


if __name__ == "__main__":
    main()
