"""Each script at a small scale: it runs, prints its JSON line, and its figures are of the right kind."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from .conftest import json_line, run_bench


def test_memory_compares_the_schemes(small_traces: Path) -> None:
    done = run_bench("memory.py", "--traces", str(small_traces), "--scale", "0.02", "--stride", "32", "--only", "azure")
    figures = json_line(done)["figures"]
    assert len(figures) == 5
    for name, rows in figures.items():
        ours = rows["multi-size"]
        assert 0 <= ours["waste"] < 0.25, name
        for other in ("padded", "all-layers" if "all-layers" in rows else "max-page"):
            assert ours["concurrency"] > 0.8 * rows[other]["concurrency"], (name, other)
        naive = rows.get("all-layers", rows.get("max-page"))
        assert naive["waste"] > ours["waste"] + 0.1, name


@pytest.mark.parametrize("script", ["memory.py", "prefix_cache.py"])
def test_missing_traces_are_named(script: str, tmp_path: Path) -> None:
    done = run_bench(script, "--traces", str(tmp_path / "nowhere"))
    assert done.returncode == 1
    assert "--traces DIR" in done.stderr
    assert str(tmp_path / "nowhere") in done.stderr
    assert "Traceback" not in done.stderr


def test_prefix_cache_measures_hits_and_costs(small_traces: Path) -> None:
    figures = json_line(run_bench("prefix_cache.py", "--traces", str(small_traces), "--quick"))["figures"]
    dense, window, state = (figures[f"hits_{name}"]["hit_rate"] for name in ("dense", "window", "state"))
    assert dense > 0.4  # two of three turns repeat what came before
    assert 0.5 * dense < state <= dense
    assert 0.5 * dense < window <= dense
    curve = list(figures["hit_rate_by_million_tokens"].values())
    assert curve == sorted(curve)
    assert curve[-1] <= dense
    assert all(0 < value < 5000 for value in figures["costs"].values())


def test_scheduler_measures_steps_and_arrivals(tmp_path: Path) -> None:
    peer = tmp_path / "peer.py"
    peer.write_text("import os, sys\nprint(os.environ['MODEL'], 'rows=', *sys.argv[1:])\n")
    done = run_bench(
        "scheduler.py",
        *("--quick", "--rows", "8,16", "--long-prompt", "4096"),
        *("--vllm-python", sys.executable, "--vllm-script", str(peer), "--vllm-model", "folder"),
    )
    figures = json_line(done)["figures"]
    assert figures["peer"] == ["folder rows= 8 16"]
    for kind in ("free", "full", "cache_off"):
        steady = figures[f"steady_16_{kind}"]
        assert 0 < steady["plan_us"] <= steady["sum_us"] <= steady["sum_median_us"] <= steady["sum_p99_us"]
    assert figures["long_4096_by_2048"]["steps"] >= 2
    assert figures["burst_64x512"]["us_per_arrival"] > 0


def test_output_path_measures_the_servers_streams() -> None:
    figures = json_line(run_bench("output_path.py", "--streams", "8", "--steps", "4"))["figures"]
    for endpoint in ("chat", "completion", "completion_with_ids"):
        row = figures[endpoint]
        assert 0 < row["least_us"] <= row["median_us"]
        assert 0.8 < row["writes"] <= 1  # a write for each token that has text
        assert row["bytes"] > 150


def test_overlap_compares_modes_over_http(unused_tcp_port: int) -> None:
    done = run_bench(
        "overlap.py",
        *("--clients", "4", "--prompt-tokens", "40", "--max-tokens", "12", "--sim-scale", "0.5", "--watch-s", "0.05"),
        *("--port", str(unused_tcp_port), "--only", "depth 1"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])["modes"]["depth 1"]
    assert told["answered"] == 4
    assert told["failed"] == 0
    assert told["tokens"] == 4 * 12
    assert 0 <= told["idle_whole"]["total"] <= 100


def test_overlap_s_limits_are_found_by_bisection() -> None:
    import overlap

    for edge in range(8):
        asked: list[int] = []

        def good(rung: int, asked: list[int] = asked, edge: int = edge) -> bool:
            asked.append(rung)
            return rung >= edge

        assert overlap.first_good(range(7), good) == (edge if edge < 7 else None)
        assert len(asked) <= 3
    answers = iter([True, None])
    assert overlap.first_good(range(7), lambda _: next(answers)) == 3


def test_gpu_check_runs_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    done = run_bench("gpu_check.py", "--device", "cpu", "--tiny", "--out", str(out))
    figures = json_line(done)["figures"]
    assert figures["tiny_tokens"]["runs"] == 3 + 1 + 2  # plain, fp8 pages, compiled
    assert figures["tiny_tokens"]["failed"] == {}
    assert figures["tiny_tokens"]["wrong"] == 0
    assert figures["tiny_times"]["decode_3_eager"]["device_ms"] > 0
    assert figures["tiny_times"]["prefill_24_eager"]["host_ms"] > 0
    assert json.loads(out.read_text())["figures"]["copies"] == figures["copies"]


def test_gpu_check_knows_a_wrong_token() -> None:
    import gpu_check
    import torch

    cpu = torch.device("cpu")
    model = gpu_check.make_model(gpu_check.SHAPES["tiny"], cpu, 64)
    prompt = [5, 9, 2, 77]
    right = int(gpu_check.reference_logits(model, prompt, cpu)[-1].argmax())
    assert gpu_check.wrong_tokens(model, prompt, [right], cpu) == []
    wrong = int(gpu_check.reference_logits(model, prompt[1:], cpu)[-1].argmin())
    assert "token 0 of 1" in gpu_check.wrong_tokens(model, prompt, [wrong], cpu)[0]


def test_gpu_check_records_pieces_and_times_them() -> None:
    import gpu_check
    import torch

    from tests.runner.cuda.fake import FakeCuda
    from tests.runner.cuda.steady import SteadyOps

    device, shape = FakeCuda(eager=0.9), gpu_check.SHAPES["tiny"]
    model = gpu_check.make_model(shape, torch.device("cpu"), 64)
    figures = gpu_check.time_prefill(device, model, shape, SteadyOps(), {"matmul_flops_per_s": 1e12})
    assert {"prefill_24_eager", "prefill_24_pieces", "prefill_recording_s"} == set(figures)
    assert device.counts["replay piece"] == gpu_check.PREFILLS * (1 + shape.layers)


def test_a_peer_that_fails_is_reported(tmp_path: Path) -> None:
    peer = tmp_path / "peer.py"
    peer.write_text("raise SystemExit('no such model')\n")
    done = run_bench(
        "scheduler.py",
        *("--quick", "--rows", "8", "--long-prompt", "2048"),
        *("--vllm-python", sys.executable, "--vllm-script", str(peer)),
    )
    assert done.returncode == 1
    assert "no such model" in done.stderr
