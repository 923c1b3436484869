"""Counters and histograms, and their names on the wire."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from aengine.metrics import CONTENT_TYPE, Histogram, Idle, Metrics
from tests.counting import calls


def values(metrics):
    """name with labels, without model_name -> value, read back by Prometheus' own parser."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model_name")
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_names_are_those_that_dashboards_know():
    found = {re.sub(r"\{.*", "", name) for name in values(Metrics("m"))}
    assert {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:num_preemptions_total",
        "vllm:request_success_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket",
        "vllm:request_queue_time_seconds_bucket",
        "vllm:request_prompt_tokens_sum",
        "vllm:request_generation_tokens_count",
        "aengine:steps_total",
        "aengine:steps_overlapped_total",
        "aengine:step_seconds_bucket",
        "aengine:zombie_rows_total",
        "aengine:media_items_placed_total",
        "aengine:media_items_computed_total",
        "aengine:step_failures_total",
        "aengine:loop_lag_seconds_bucket",
        "process_resident_memory_bytes",
    } <= found


def test_every_sample_of_ours_carries_the_model_name():
    text = Metrics("a-model").render().decode()
    samples = [line for line in text.splitlines() if line.startswith(("vllm:", "aengine:"))]
    assert len(samples) > 100
    assert all('model_name="a-model"' in line for line in samples)


def test_the_exposition_is_the_classic_text_format():
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")
    text = Metrics("m").render().decode()
    assert text.endswith("\n")
    assert "# TYPE vllm:prompt_tokens_total counter\n" in text
    assert "# TYPE vllm:time_to_first_token_seconds histogram\n" in text


def test_the_life_of_a_request():
    metrics = Metrics("m")
    metrics.request_admitted(0.03, prompt_tokens=100, cached_tokens=64)
    metrics.observe_first_token(0.2)
    metrics.observe_itl(0.02)
    metrics.observe_itl(0.04, tokens=2)
    metrics.request_finished("stop", prompt_tokens=100, generated_tokens=4, e2e_s=0.3)
    found = values(metrics)
    assert found["vllm:prompt_tokens_total"] == 100
    assert found["vllm:prompt_tokens_cached_total"] == 64
    assert found["vllm:generation_tokens_total"] == 4
    assert found["vllm:request_queue_time_seconds_sum"] == pytest.approx(0.03)
    assert found["vllm:time_to_first_token_seconds_bucket{le=0.1}"] == 0
    assert found["vllm:time_to_first_token_seconds_bucket{le=0.25}"] == 1
    assert found["vllm:inter_token_latency_seconds_count"] == 3
    assert found["vllm:inter_token_latency_seconds_sum"] == pytest.approx(0.06)
    assert found["vllm:inter_token_latency_seconds_bucket{le=0.02}"] == 3
    assert found["vllm:request_success_total{finished_reason=stop}"] == 1
    assert found["vllm:request_success_total{finished_reason=length}"] == 0
    assert found["vllm:request_generation_tokens_bucket{le=2.0}"] == 0
    assert found["vllm:request_generation_tokens_bucket{le=5.0}"] == 1


def test_steps():
    metrics = Metrics("m")
    metrics.step(0.02, 0.015, overlapped=True)
    metrics.step(0.02, 0.015, overlapped=False)
    metrics.step_failed()
    metrics.loop_lag(0.003)
    found = values(metrics)
    assert found["aengine:steps_total"] == 2
    assert found["aengine:steps_overlapped_total"] == 1
    assert found["aengine:step_seconds_sum"] == pytest.approx(0.04)
    assert found["aengine:step_device_seconds_sum"] == pytest.approx(0.03)
    assert found["aengine:step_failures_total"] == 1
    assert found["aengine:loop_lag_seconds_count"] == 1


def test_refusals_and_lost_features_are_counted_by_kind():
    metrics = Metrics("m")
    metrics.request_rejected("queue_full")
    metrics.request_rejected("queue_full")
    metrics.feature_disabled("native_kernels")
    found = values(metrics)
    assert found["aengine:requests_rejected_total{reason=queue_full}"] == 2
    assert found["aengine:features_disabled_total{feature=native_kernels}"] == 1


def test_bound_figures_are_read_at_each_scrape():
    metrics = Metrics("m")
    now = Idle(running=3, waiting=2, kv_usage=0.25, preemptions=7, zombie_rows=5, prefix_queries=90, prefix_hits=60)
    now = replace(now, media_items=9, media_computed=4)
    now = replace(now, kv_waste=0.02, kv_stranded_bytes=4096, kv_moved_bytes=512)
    metrics.bind(lambda: now)
    found = values(metrics)
    assert found["vllm:num_requests_running"] == 3
    assert found["aengine:kv_waste_perc"] == 0.02
    assert found["aengine:kv_stranded_bytes"] == 4096
    assert found["aengine:kv_moved_bytes_total"] == 512
    assert found["vllm:num_requests_waiting"] == 2
    assert found["vllm:kv_cache_usage_perc"] == 0.25
    assert found["vllm:num_preemptions_total"] == 7
    assert found["aengine:zombie_rows_total"] == 5
    assert found["aengine:media_items_placed_total"] == 9
    assert found["aengine:media_items_computed_total"] == 4
    assert found["vllm:prefix_cache_queries_total"] == 90
    assert found["vllm:prefix_cache_hits_total"] == 60
    now = replace(now, running=0)
    assert values(metrics)["vllm:num_requests_running"] == 0


def test_engines_in_one_process_do_not_mix():
    one, other = Metrics("one"), Metrics("other")
    one.step(0.1, 0.1, overlapped=False)
    assert values(one)["aengine:steps_total"] == 1
    assert values(other)["aengine:steps_total"] == 0


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5)), max_size=50))
def test_a_histogram_counts_what_is_at_or_below_each_bound(observations):
    histogram = Histogram((0.5, 1.0, 10.0))
    for value, times in observations:
        histogram.observe(value, times)
    flat = [value for value, times in observations for _ in range(times)]
    for bound, count in histogram.buckets():
        assert count == sum(value <= float(bound) for value in flat)
    assert histogram.count == len(flat)
    assert histogram.total == pytest.approx(sum(flat))


def test_observing_is_cheap():
    """In calls, which a busy machine does not change."""
    metrics = Metrics("m")
    assert calls(lambda: [metrics.observe_itl(0.0123) for _ in range(100)]) <= 100 * 4
