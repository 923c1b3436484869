"""The Grafana dashboard: it is whole, and asks for nothing that the server does not tell."""

from __future__ import annotations

import json
import re
from pathlib import Path

from aengine.metrics import Metrics
from aengine.timeline import CAUSES, STAGES

DASHBOARD = json.loads((Path(__file__).parent.parent / "docs/grafana/aengine.json").read_text(encoding="utf-8"))
NAME = re.compile(r"\b(?:vllm:|aengine:|process_)\w+")
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
VARIABLES = {each["name"]: each for each in DASHBOARD["templating"]["list"]}


def told() -> dict[str, set[str]]:
    """Names of samples -> the names of their labels, of an engine that has counted one of everything."""
    metrics = Metrics("m")
    metrics.bind_times(lambda: dict.fromkeys(STAGES, 1.0), lambda: dict.fromkeys(CAUSES, 1.0))
    metrics.request_rejected("queue_full")
    metrics.feature_disabled("x")
    found: dict[str, set[str]] = {}
    for line in metrics.render().decode().splitlines():
        if match := re.match(r"([\w:]+)(?:\{(.*)\})? ", line):
            found.setdefault(match[1], set()).update(re.findall(r"(\w+)=\"", match[2] or ""))
    return found


def test_every_metric_is_one_that_the_server_tells():
    known = told()
    asked = {name for query in QUERIES for name in NAME.findall(query)}
    asked |= set(NAME.findall(VARIABLES["model"]["query"]["query"]))
    assert len(asked) > 20
    assert asked <= set(known), asked - set(known)


def test_every_label_is_one_that_its_metric_has():
    known = told()
    for query in QUERIES:
        labels = set().union(*(known[name] for name in NAME.findall(query)))
        used = set(re.findall(r"(\w+)(?:=~|!=|=)\"", query)) | set(re.findall(r"by \((\w+)\)", query))
        assert used <= labels, query


def test_the_panels_are_whole_and_do_not_lie_on_each_other():
    assert DASHBOARD["schemaVersion"] >= 36
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["title"]
        assert panel["targets"]
        assert panel["datasource"]["uid"] == "${datasource}"


def test_variables_in_queries_are_defined():
    own = {"__rate_interval"}
    used = {name for query in QUERIES for name in re.findall(r"\$\{?(\w+)", query)} - own
    assert used <= set(VARIABLES)
    for query in QUERIES:
        assert query.count("(") == query.count(")")
        assert query.count("{") == query.count("}")
