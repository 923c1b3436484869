"""Figures as Prometheus reads them: families of samples, labelled with the model's name.

Owns: how a figure becomes a family; the names and texts of what a snapshot and the sockets tell.
Does not know: what `Metrics` counts, when it is asked.
Invariants: prometheus_client is imported when something is told, not before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from aengine.metrics.histogram import Histogram
from aengine.metrics.snapshot import Snapshot
from aengine.types import HttpFigures

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Families:
    """Makes the families of one model's figures."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name

    def snapshot(self, now: Snapshot) -> Iterator[Family]:
        yield self.gauge("vllm:num_requests_running", "Requests in the running batch.", now.running)
        yield self.gauge("vllm:num_requests_waiting", "Requests waiting for a slot.", now.waiting)
        yield self.gauge("vllm:kv_cache_usage_perc", "Used part of the KV pool, 0 to 1.", now.kv_usage)
        yield self.gauge("aengine:kv_waste_perc", "Part of the KV pool that nothing can use, 0 to 1.", now.kv_waste)
        yield self.gauge(
            "aengine:kv_stranded_bytes", "Free bytes that one group of layers cannot use.", now.kv_stranded_bytes
        )
        yield self.counter("aengine:kv_moved_bytes", "Bytes copied to keep pages together.", now.kv_moved_bytes)
        yield self.counter("vllm:num_preemptions", "Preemptions.", now.preemptions)
        yield self.counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", now.prefix_queries)
        yield self.counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", now.prefix_hits)
        yield self.counter("vllm:spec_decode_num_drafts", "Rows of steps that brought draft tokens.", now.drafts)
        yield self.counter("vllm:spec_decode_num_draft_tokens", "Draft tokens.", now.drafted_tokens)
        yield self.counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", now.accepted_tokens)
        yield self.by(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their place in a row.",
            "position",
            {str(position): count for position, count in enumerate(now.accepted_by_position)},
        )
        yield self.counter("aengine:forced_tokens", "Tokens taken over from grammars unsampled.", now.forced_tokens)
        yield self.counter("aengine:media_items_placed", "Images placed for running requests.", now.media_items)
        yield self.counter("aengine:media_items_computed", "Images computed, not found cached.", now.media_computed)
        yield self.counter("aengine:zombie_rows", "Rows computed for requests that had ended.", now.zombie_rows)

    def sockets(self, every: Sequence[HttpFigures], lost: Mapping[str, int]) -> Iterator[Family]:
        """Sums over processes; `lost`: faults that processes which are gone have told."""
        faults = Counter(lost)
        for each in every:
            for kind, count in each.faults.items():  # a kind that has not happened is told as 0
                faults[kind] += count
        yield self.by("aengine:http_faults", "Connections and requests that were cut.", "kind", faults)
        for name, text, value in (
            ("connections", "Open connections.", sum(each.connections for each in every)),
            ("connections_busy", "Connections with a request under way.", sum(each.connections_busy for each in every)),
            ("upload_bytes", "Bytes of bodies that are being read.", sum(each.upload_bytes for each in every)),
        ):
            yield self.gauge(f"aengine:http_{name}", text, value)

    def gauge(self, name: str, text: str, value: float) -> Family:
        from prometheus_client.core import GaugeMetricFamily

        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def counter(self, name: str, text: str, value: float) -> Family:
        """On the wire the name ends in _total."""
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def by(self, name: str, text: str, label: str, counts: Mapping[str, float]) -> Family:
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(name, text, labels=["model_name", label])
        for key, count in sorted(counts.items()):
            family.add_metric([self._model_name, key], count)
        return family

    def histogram(self, name: str, text: str, histogram: Histogram) -> Family:
        from prometheus_client.core import HistogramMetricFamily

        family = HistogramMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model_name], histogram.buckets(), sum_value=histogram.total)
        return family
