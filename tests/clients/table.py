"""Results of the client matrix: kept between runs, shown in docs/clients.md.

Owns: Result, `load` and `save` (JSON beside the environments), `write_table`.
Does not know: how a client is run.
Invariants: the table has a row for every client of the catalogue, in its order; what has not been run says so.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.clients.catalogue import CLIENTS
from tests.clients.environments import cache

TABLE = Path(__file__).parents[2] / "docs" / "clients.md"
HEAD = """# Real clients against aengine

Written by `tests/clients/run`, which installs each client into an environment of its own, starts
`aengine serve smollm2-135m` on the CPU for it, and runs its script in `tests/clients/`. A check is a function of that
script with assertions about what came back (texts, counts, types, streamed against whole), not only a status;
behind each script the server must be idle again, with no page in use.

| client | versions | result | checks | date | commit |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Result:
    """`verdict`: "passed" or "failed". `passed`: names of checks. `failures`: `name: why`."""

    verdict: str
    passed: list[str]
    failures: list[str]
    versions: list[str]
    seconds: float
    date: str
    commit: str


def load() -> dict[str, Result]:
    file = cache() / "results.json"
    if not file.exists():
        return {}
    return {name: Result(**fields) for name, fields in json.loads(file.read_text()).items()}


def save(results: dict[str, Result]) -> None:
    fields = {name: asdict(result) for name, result in results.items()}
    (cache() / "results.json").write_text(json.dumps(fields, indent=1))


def write_table(results: dict[str, Result]) -> Path:
    rows, faults = [], []
    for client in CLIENTS:
        result = results.get(client.name)
        if result is None:
            rows.append(f"| {client.about} | | not run | | | |")
            continue
        checks = ", ".join(name.replace("_", " ") for name in result.passed)
        total = len(result.passed) + len(result.failures)
        verdict = f"{result.verdict}, {len(result.passed)} of {total}"
        versions = ", ".join(result.versions)
        rows.append(f"| {client.about} | {versions} | {verdict} | {checks} | {result.date} | {result.commit} |")
        faults += [f"* **{client.about}**: {_cell(failure)}" for failure in result.failures]
    text = HEAD + "\n".join(rows) + "\n"
    if faults:
        text += "\n## What failed\n\n" + "\n".join(faults) + "\n"
    TABLE.write_text(text)
    return TABLE


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
