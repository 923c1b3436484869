"""`aengine trace`: fetch a running server's timeline.

Owns: the command's flags, the request, the file.
Does not know: what is in a trace.
Invariants: nothing is written unless the server sent a whole trace.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from aengine.cli.options import Parser, UsageError
from aengine.errors import AengineError

TIMEOUT_S = 60.0


def parser() -> Parser:
    made = Parser(
        "trace",
        "Fetch what a running server did in the last seconds,\n"
        "as a file for https://ui.perfetto.dev or chrome://tracing.",
        epilog="The server's page /trace draws the same live.",
    )
    made.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="base URL (default: %(default)s)")
    made.add_argument("-o", "--output", metavar="FILE", default="trace.json", help="file to write, - is stdout")
    made.add_argument("--seconds", type=float, default=30.0, metavar="X", help="how far back, 30 at most (default: 30)")
    made.add_argument("--api-key", metavar="TEXT", help="bearer token")
    return made


def run(args: argparse.Namespace) -> int:
    if not args.url.startswith(("http://", "https://")):
        raise UsageError(f"{args.url} is not an http:// or https:// URL")
    body = _fetch(args.url.rstrip("/").removesuffix("/v1"), args.seconds, args.api_key)
    told = json.loads(body)
    if args.output == "-":
        sys.stdout.buffer.write(body)
        return 0
    Path(args.output).write_bytes(body)
    print(f"{args.output}: {len(told['traceEvents']):,} events, {sentence(told['otherData'])}")
    return 0


def _fetch(base: str, seconds: float, key: str | None) -> bytes:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{base}/debug/trace?seconds={seconds:g}", headers=headers)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=TIMEOUT_S) as response:
            body: bytes = response.read()
            return body
    except urllib.error.HTTPError as error:
        raise AengineError(_message(error)) from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ConnectionRefusedError):
            raise AengineError(f"no server listens on {base}; aengine serve starts one") from None
        raise AengineError(f"{base}: {reason}") from None


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {error.code} {error.reason}"


def sentence(told: dict[str, Any]) -> str:
    """device busy 99.2 %, bubbles 0.8 % = 0.5 host + 0.3 copy; of the time in which there was work."""
    idle = {cause: seconds for cause, seconds in told["idle_s"].items() if cause != "no_work"}
    whole = told["busy_s"] + sum(idle.values())
    if not whole:
        return "the device had no work"
    parts = " + ".join(f"{100 * seconds / whole:.1f} {cause}" for cause, seconds in idle.items() if seconds) or "none"
    bubbles = 100 * sum(idle.values()) / whole
    return f"device busy {100 - bubbles:.1f} %, bubbles {bubbles:.1f} % = {parts}"
