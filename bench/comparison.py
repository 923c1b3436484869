"""Servers' runs side by side: medians, ours against the best peer, the table, the claims.

Owns: which way a figure is better, medians over runs, the best peer of a row, the Markdown table.
Does not know: how figures were measured, what a server is besides its name.
Invariants: a ratio is above 1 exactly where ours is better; a server with a failed request in a workload has no figure
there, because what went wrong is not in it; "best peer" is chosen row by row.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from report import Report

from aengine.cli.latency import percentile

HEADLINES = {f"W{n}": "output_tokens_per_s" for n in (1, 2, 3, 4)} | {"W5": "steady_itl_p99_ms"}

Record = dict[str, Any]


def medians(records: Sequence[Record]) -> dict[tuple[str, str], dict[str, float | None]]:
    """{(workload, figure): {server: median over its runs}} of rates, times and memory.

    None for a server with a failed request in that workload: its figures leave out what went wrong.
    """
    values: dict[tuple[str, str], dict[str, list[float]]] = {}
    broken = {(r["workload"], r["server"]) for r in records if r.get("failed")}
    for record in records:
        for figure, value in record.items():
            if figure.endswith(("_per_s", "_ms", "_mib")) and value is not None:
                row = values.setdefault((record["workload"], figure), {})
                row.setdefault(record["server"], []).append(value)
    return {
        key: {server: None if (key[0], server) in broken else statistics.median(each) for server, each in row.items()}
        for key, row in values.items()
    }


def advantage(figure: str, ours: float, theirs: float) -> float:
    """Above 1 where ours is better: rates ours / theirs, times and memory theirs / ours."""
    return ours / theirs if figure.endswith("_per_s") else theirs / ours


def best(figure: str, row: Mapping[str, float | None], peers: Sequence[str]) -> tuple[str, float] | None:
    """The best peer with a figure, and it."""
    known = [(name, value) for name in peers if (value := row.get(name))]
    if not known:
        return None
    return (max if figure.endswith("_per_s") else min)(known, key=lambda pair: pair[1])


def table(records: Sequence[Record], ours: Sequence[str], peers: Sequence[str]) -> list[str]:
    """A Markdown table: a row for each workload and figure, a column for each server, and ours / best peer."""
    head = ["workload", "figure", *ours, *peers, "best peer", *(f"{name}: ratio" for name in ours)]
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    for (workload, figure), row in medians(records).items():
        top = best(figure, row, peers)
        ratios = [_ratio(figure, row.get(name), top) for name in ours]
        cells = [workload, figure, *(_cell(row, name) for name in (*ours, *peers)), top[0] if top else "–", *ratios]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _cell(row: Mapping[str, float | None], name: str) -> str:
    if name not in row:
        return "–"
    value = row[name]
    return "failed" if value is None else f"{value:,.1f}"


def _ratio(figure: str, mine: float | None, top: tuple[str, float] | None) -> str:
    return "–" if not mine or top is None else f"{advantage(figure, mine, top[1]):.2f}"


def judge(report: Report, records: Sequence[Record], ours: Sequence[str], peers: Sequence[str]) -> None:
    """One claim for each workload and each of ours: the headline figure is no worse than the best peer's."""
    found = medians(records)
    for workload, figure in HEADLINES.items():
        row = found.get((workload, figure), {})
        top = best(figure, row, peers)
        for name in ours:
            mine = row.get(name)
            if mine and top is not None:
                report.at_least(f"{workload} {figure}, {name} to {top[0]}", advantage(figure, mine, top[1]), 1.0)


def noise(records: Sequence[Record]) -> str:
    """How busy the machine was with other things: the figures' first doubt."""
    others = [record["others_cores"] for record in records if "others_cores" in record]
    if not others:
        return "no run long enough to tell what else was busy"
    return f"cores busy with other things: median {statistics.median(others):.2f}, p90 {percentile(others, 90):.2f}"
