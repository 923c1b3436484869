"""The server against its own document, by schemathesis: no body, header or method makes it fail or say what
`/openapi.json` does not.

    aengine serve --device sim --max-model-len 512 --port 8000 &
    python bench/surface.py http://127.0.0.1:8000 --schemathesis VENV/bin/schemathesis

Operations one by one, each in a process of its own; failures are printed whole. Of the document only list lengths above
a thousand are left out: at them schemathesis builds bodies of half a gigabyte. Left out of its checks is that every
body which the document admits is accepted: fields bound each other, and the model's limits are not in it.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from report import Report

# 501 is documented where it comes; another check holds statuses to the document.
SETTINGS = """
[checks.negative_data_rejection]
expected-statuses = ["400", "401", "403", "404", "405", "408", "413", "429", "501"]
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", "501"]
"""
LONG = 1000
CASES = re.compile(r"(\d+) generated(?:.*?(\d+) found)?")


def shortened(node: Any) -> Any:
    if isinstance(node, list):
        return [shortened(child) for child in node]
    if not isinstance(node, dict):
        return node
    lengths = ("maxItems", "maxProperties")
    long = {key for key in lengths if isinstance(node.get(key), int) and node[key] > LONG}
    return {key: shortened(value) for key, value in node.items() if key not in long}


def tested(folder: Path, args: argparse.Namespace, path: str) -> tuple[str, int, int, str]:
    """(path, cases, cases that found something, what schemathesis printed)."""
    command = [args.schemathesis, "--config-file", str(folder / "settings.toml"), "run", str(folder / "openapi.json")]
    command += ["--url", args.url, "--include-path", path, "--phases", "examples,coverage,fuzzing,stateful"]
    command += ["--checks", "all", "--exclude-checks", "positive_data_acceptance", "--continue-on-failure"]
    command += ["--no-shrink", "--request-timeout", "30"]
    command += ["--max-examples", str(args.max_examples), "--seed", str(args.seed)]
    if args.key:
        command += ["--header", f"Authorization:Bearer {args.key}"]
    place = folder / re.sub(r"\W", "_", path)
    place.mkdir()
    done = subprocess.run(command, cwd=place, capture_output=True, text=True)
    told = CASES.search(done.stdout)
    cases, found = (int(told[1]), int(told[2] or 0)) if told else (0, 0)
    return path, cases, found or int(done.returncode != 0), done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--schemathesis", default="schemathesis", help="its command")
    parser.add_argument("--max-examples", type=int, default=200, help="random cases an operation")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--key", default="", help="the server's API key")
    parser.add_argument("--only", action="append", default=[], help="this path (may be repeated)")
    parser.add_argument("--lanes", type=int, default=2, help="operations at a time")
    args = parser.parse_args()
    config = {"max_examples": args.max_examples, "seed": args.seed, "key": bool(args.key)}
    report = Report("surface", "no case finds a fault", config)
    asked = urllib.request.Request(f"{args.url}/openapi.json", headers={"Authorization": f"Bearer {args.key}"})
    with urllib.request.urlopen(asked) as response:
        document = shortened(json.load(response))
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(args.lanes) as lanes:
        folder = Path(name)
        (folder / "openapi.json").write_text(json.dumps(document))
        (folder / "settings.toml").write_text(SETTINGS)
        paths = args.only or document["paths"]
        for path, cases, found, told in lanes.map(partial(tested, folder, args), paths):
            print(f"{path}: {cases} cases, {found} found a fault", flush=True)
            if found:
                print(told)
            report.figures[path] = {"cases": cases, "found": found}
    report.at_least("fewest cases of an operation", min(row["cases"] for row in report.figures.values()), 1)
    report.at_most("cases with a fault", sum(row["found"] for row in report.figures.values()), 0)
    report.figures["all"] = sum(row["cases"] for row in report.figures.values())
    return 0 if report.close() else 1


if __name__ == "__main__":
    sys.exit(main())
