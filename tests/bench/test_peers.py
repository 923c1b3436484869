"""Comparing servers: which way is better, what a failure does to a row, and the script from start to table."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import peers
import pytest
from comparison import advantage, judge, medians, noise, table
from load import LoadError
from report import Report
from servers import READY_S, TICKS_PER_S, Server, Usage, rss_mib, tree, up

from .test_load import PROMPTS

FAKE = f"{sys.executable} {Path(__file__).with_name('fake_peer.py')} {{port}}"
DEAD = f"{sys.executable} -c 'raise SystemExit(\"no such model\")'"


def record(server: str, workload: str = "W1", **values: Any) -> dict[str, Any]:
    return {"server": server, "start": 0, "workload": workload, "failed": 0, **values}


RUNS = [
    record("aengine", output_tokens_per_s=30.0, itl_p50_ms=10.0),
    record("aengine", output_tokens_per_s=10.0, itl_p50_ms=30.0),
    record("aengine", output_tokens_per_s=20.0, itl_p50_ms=None),
    record("a", output_tokens_per_s=25.0, itl_p50_ms=40.0),
    record("b", output_tokens_per_s=5.0, itl_p50_ms=16.0),
    record("c", output_tokens_per_s=99.0, itl_p50_ms=1.0, failed=1),
]


def test_ratios_are_above_one_where_ours_is_better() -> None:
    assert advantage("output_tokens_per_s", 30, 20) == 1.5
    assert advantage("itl_p50_ms", 30, 15) == 0.5
    assert advantage("rss_mib", 100, 300) == 3


def test_medians_are_over_runs_and_a_failure_takes_the_server_out() -> None:
    assert medians(RUNS)["W1", "output_tokens_per_s"] == {"aengine": 20.0, "a": 25.0, "b": 5.0, "c": None}
    assert medians(RUNS)["W1", "itl_p50_ms"]["aengine"] == 20.0


def test_the_best_peer_is_chosen_row_by_row() -> None:
    lines = table(RUNS, ["aengine"], ["a", "b", "c", "d"])
    assert lines[0] == "| workload | figure | aengine | a | b | c | d | best peer | aengine: ratio |"
    assert lines[2] == "| W1 | output_tokens_per_s | 20.0 | 25.0 | 5.0 | failed | – | a | 0.80 |"
    assert lines[3] == "| W1 | itl_p50_ms | 20.0 | 40.0 | 16.0 | failed | – | b | 0.80 |"
    assert table(RUNS, ["c"], ["a"])[2].endswith("| failed | 25.0 | a | – |")
    assert table(RUNS, ["aengine"], [])[2].endswith("| 20.0 | – | – |")


def test_headlines_become_claims(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("peers", "as good", {})
    late = [record("aengine", "W5", steady_itl_p99_ms=50.0), record("a", "W5", steady_itl_p99_ms=100.0)]
    judge(report, RUNS + late, ["aengine"], ["a", "b", "c"])
    assert not report.close()
    printed = capsys.readouterr().out
    assert "MISSED  W1 output_tokens_per_s, aengine to a: 0.8 >= 1" in printed
    assert "holds   W5 steady_itl_p99_ms, aengine to a: 2 >= 1" in printed
    assert len(report.claims) == 2


def test_cost_is_processor_time_a_token() -> None:
    assert peers.cost({"output_tokens": 200}, 3.0) == {"cpu_per_token_ms": 15.0}
    assert peers.cost({"output_tokens": 200}, 0.0) == peers.cost({"steady_itl_p50_ms": 1.0}, 3.0) == {}


def test_other_load_is_told() -> None:
    assert noise([record("a")]) == "no run long enough to tell what else was busy"
    assert noise([record("a", others_cores=value) for value in (0.0, 0.5, 2.0)]).endswith("median 0.50, p90 2.00")


def test_what_others_kept_busy_is_a_share_of_what_the_machine_had(tmp_path: Path) -> None:
    def at(seconds: int, busy: int) -> Usage:
        """Two processors after `seconds`; ticks: user, nice, system, idle, iowait, irq, softirq, steal, guest …"""
        ticks = (busy // 2, 0, busy // 4, 150 * seconds - busy, 50 * seconds, 0, 0, busy // 4, busy // 4, 0)
        line = " ".join(map(str, ticks))
        path = tmp_path / "stat"
        path.write_text(f"cpu  {line}\ncpu0 {line}\ncpu1 {line}\nintr 7 8\nbtime 5\n")
        return replace(Usage.now(0, path), tree_s=seconds / 4)

    scale = 100 / TICKS_PER_S
    server_s, others = at(110, 1300).since(at(100, 0), 3.5 * scale)
    assert server_s == 2.5
    assert others == pytest.approx((13 * scale - 2.5 - 3.5 * scale) / (10 * scale))
    assert at(110, 400).since(at(100, 0), 9.0)[1] == 0.0  # fewer ticks than was used
    assert replace(at(102, 300), tree_s=0).since(replace(at(100, 0), tree_s=0), -9.0)[1] == 2.0
    assert at(100, 20).since(at(100, 0), 0.0) == (0.0, None)  # ticks in a lump, no time
    assert Usage.now(0).processors >= 1


def test_settings_of_a_server() -> None:
    made = Server("t", url="http://127.0.0.1:1").told("pid=7,ignore_eos=no,api=chat,prompts=text,model=m,note=v 1")
    assert (made.pid, made.ignore_eos, made.api, made.prompts, made.model, made.note) == (
        7,
        False,
        "chat",
        "text",
        "m",
        "v 1",
    )
    assert made.target("http://127.0.0.1:1").url == "http://127.0.0.1:1/v1/chat/completions"
    for wrong in ("color=red", "ignore_eos=maybe", "pid=x", "api=chat"):
        with pytest.raises(LoadError):
            made.told("prompts=ids").told(wrong) if wrong == "api=chat" else made.told(wrong)
    with pytest.raises(LoadError, match="loopback"):
        peers.running_server("far=http://192.168.0.1:80")


def test_a_started_server_is_ended_with_its_children(tmp_path: Path) -> None:
    with up(Server("fake", command=FAKE), tmp_path) as running:
        assert urllib.request.urlopen(running.url + "/health").status == 200
        assert running.pid in tree(os.getpid())
        assert rss_mib(running.pid) > 5
        used = Usage.now(running.pid)
        assert 0 < used.tree_s <= Usage.now(running.pid).tree_s
        assert Usage.now(0).tree_s == 0  # a pid that is not known
        assert running.ready_s is not None
        assert 0 < running.ready_s < READY_S
    assert running.pid not in tree(os.getpid())
    assert tree(0) == []


def test_the_script_measures_in_turn_and_goes_on_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "prompts_of", lambda model: PROMPTS)
    kept = tmp_path / "runs.jsonl"
    peers.main(
        [
            *("--start", f"aengine-fake={FAKE}", "--start", f"slow={FAKE} --token-s 0.006"),
            *("--start", f"dead={DEAD}", "--set", "slow:note=sleeps"),
            *("--workloads", "W3,W4", "--requests", "W3=3,W4=2", "--starts", "1"),
            *("--log-dir", str(tmp_path), "--keep", str(kept)),
        ]
    )
    printed = capsys.readouterr().out
    line = json.loads(printed.splitlines()[-1])
    runs = line["figures"]["runs"]
    assert [(run["server"], run["workload"]) for run in runs] == [
        *((server, workload) for server in ("aengine-fake", "slow") for workload in ("W3", "W4", "start")),
        ("dead", "start"),
    ]
    assert "no such model" in runs[-1]["error"]
    assert all(run["output_tokens_per_s"] > 0 for run in runs if run["workload"].startswith("W"))
    assert [claim["name"] for claim in line["claims"]] == [
        "W3 output_tokens_per_s, aengine-fake to slow",
        "W4 output_tokens_per_s, aengine-fake to slow",
    ]
    rates = {(run["server"], run["workload"]): run.get("output_tokens_per_s") for run in runs}
    ratios = [rates["aengine-fake", workload] / rates["slow", workload] for workload in ("W3", "W4")]
    assert [claim["value"] for claim in line["claims"]] == pytest.approx(ratios)
    assert [claim["holds"] for claim in line["claims"]] == [ratio >= 1 for ratio in ratios]
    assert [server["note"] for server in line["figures"]["servers"]] == ["", "sleeps", ""]
    peers.main(["--read", str(kept), "--ours", "slow"])
    (first, _) = json.loads(capsys.readouterr().out.splitlines()[-1])["claims"]
    assert (first["name"], first["value"]) == (
        "W3 output_tokens_per_s, slow to aengine-fake",
        pytest.approx(1 / ratios[0]),
    )


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--workloads", "W9"], "workload 'W9' is none of W1, W2, W3, W4, W5"),
        (["--requests", "W1=0"], "--requests W1=0: not the name of a workload = a number of at least 1"),
        (["--requests", "W2=8,W7=1"], "--requests W7=1: "),
        (["--set", "x:note=a"], "no server 'x' among none"),
        (["--start", "a=b", "--start", "a=c"], "two servers have one name"),
        (["--read", "/nowhere/runs.jsonl"], "No such file"),
    ],
)
def test_bad_command_lines_are_told(arguments: list[str], fault: str) -> None:
    with pytest.raises(SystemExit, match=fault):
        peers.main(arguments)
