"""Percentiles and the summary of a load test."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.cli import latency
from aengine.cli.load import Sample


def sample(ttft_s=0.1, gaps_s=(0.02, 0.02), completion=3, error=None):
    e2e_s = (ttft_s or 0.0) + sum(gaps_s)
    return Sample(0.0, ttft_s, e2e_s, list(gaps_s), prompt_tokens=10, completion_tokens=completion, error=error)


@pytest.mark.parametrize(("p", "value"), [(0, 1), (1, 1), (50, 50), (50.5, 51), (90, 90), (99, 99), (100, 100)])
def test_percentile_is_nearest_rank(p, value):
    assert latency.percentile(range(100, 0, -1), p) == value


def test_percentile_of_nothing_is_nan():
    assert math.isnan(latency.percentile([], 50))


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_a_percentile_is_a_sample_that_enough_samples_do_not_exceed(values, p):
    value = latency.percentile(values, p)
    assert value in values
    assert sum(v <= value for v in values) >= p / 100 * len(values) - 1e-6


def test_summary_of_good_requests():
    figures = latency.summary([sample(), sample(ttft_s=0.3)], took_s=2.0)
    assert (figures["requests"], figures["failed"], figures["errors"]) == (2, 0, {})
    assert (figures["prompt_tokens"], figures["completion_tokens"]) == (20, 6)
    assert (figures["requests_per_s"], figures["output_tokens_per_s"], figures["total_tokens_per_s"]) == (
        1.0,
        3.0,
        13.0,
    )
    assert figures["ttft_ms"] == {"mean": 200.0, "p50": 100.0, "p90": 300.0, "p99": 300.0, "max": 300.0}
    assert figures["itl_ms"]["p50"] == 20.0
    assert figures["tpot_ms"]["mean"] == pytest.approx(20.0)
    assert figures["e2e_ms"]["max"] == pytest.approx(340.0)


def test_failures_are_counted_and_leave_the_times_alone():
    figures = latency.summary([sample(), sample(ttft_s=9.0, error="HTTP 429: full")], took_s=1.0)
    assert (figures["requests"], figures["failed"]) == (2, 1)
    assert figures["errors"] == {"HTTP 429: full": 1}
    assert figures["ttft_ms"]["max"] == 100.0
    assert figures["completion_tokens"] == 3


def test_all_failed_gives_no_times_and_a_text():
    figures = latency.summary([sample(ttft_s=None, gaps_s=(), error="refused")], took_s=1.0)
    assert figures["ttft_ms"] is None
    assert "error (1×): refused" in latency.as_text(figures)


def test_text_has_a_line_for_each_figure():
    text = latency.as_text(latency.summary([sample()], took_s=1.0))
    assert [line.split()[0] for line in text.splitlines()[-4:]] == ["TTFT", "ITL", "TPOT", "E2E"]
