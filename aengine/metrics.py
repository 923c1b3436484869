"""Counters and histograms of one engine, under vLLM's names and aengine's own.

Owns: what has been counted and observed, and its Prometheus text.
Does not know: who calls it, and where running, waiting and pool figures come from (a bound callable is read at scrape).
Invariants: no global registry, so engines in one process do not mix; observing costs half a microsecond (one bisection
and three additions; prometheus_client's own histogram: 1.4 µs); all methods are called from the event loop's thread, so
there is no lock. Times are seconds.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from aengine.types import FinishReason, HttpFigures

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.registry import CollectorRegistry

    Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_WAITS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_TIMES_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 40.0),
)
_REQUEST_TIMES_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0)
_STEP_TIMES_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 5.0, 20.0)
_LAGS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
FAULTS = ("step", "detokenizer", "tokenizer", "loop_blocked", "step_overdue", "request_stalled", "frontend_stopped")
_TOKEN_COUNTS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


class Snapshot(Protocol):
    """What is read at scrape time. All but `running`, `waiting`, `kv_usage`, `kv_waste` and `kv_stranded_bytes` only
    grow."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def kv_usage(self) -> float: ...  # used part of the KV pool, 0 to 1
    @property
    def kv_waste(self) -> float: ...  # part of the KV pool that holds nothing and cannot, 0 to 1
    @property
    def kv_stranded_bytes(self) -> int: ...  # free, but out of reach of the group of layers that has it worst
    @property
    def kv_moved_bytes(self) -> int: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def zombie_rows(self) -> int: ...
    @property
    def prefix_queries(self) -> int: ...  # tokens
    @property
    def prefix_hits(self) -> int: ...  # tokens
    @property
    def drafts(self) -> int: ...  # rows with draft tokens, one a step
    @property
    def drafted_tokens(self) -> int: ...
    @property
    def accepted_tokens(self) -> int: ...
    @property
    def accepted_by_position(self) -> tuple[int, ...]: ...
    @property
    def forced_tokens(self) -> int: ...  # taken over from grammars
    @property
    def media_items(self) -> int: ...  # placed for rows
    @property
    def media_computed(self) -> int: ...  # of these, computed rather than found in the cache


@dataclass(frozen=True, slots=True)
class Idle:
    """A snapshot of an engine that has done nothing."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    kv_waste: float = 0.0
    kv_stranded_bytes: int = 0
    kv_moved_bytes: int = 0
    preemptions: int = 0
    zombie_rows: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()
    forced_tokens: int = 0
    media_items: int = 0
    media_computed: int = 0


class Histogram:
    """Counts by bucket. `bounds` are upper bounds, rising; a value equal to a bound is inside it."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last is beyond every bound
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, "+Inf" last: the exposition's form."""
        running, out = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            out.append((bound, float(running)))
        return out


class Counts(msgspec.Struct, frozen=True):
    """All that one process has counted, by the names of Metrics' attributes; sums of several have a meaning.

    `labelled` holds (label, count); `histograms` (counts by bucket, sum); `http` includes what is open just now."""

    numbers: Mapping[str, int | float]
    labelled: Mapping[str, tuple[tuple[Any, int | float], ...]]
    histograms: Mapping[str, tuple[tuple[int, ...], float]]
    http: HttpFigures


class Metrics:
    """All metrics of one engine, labelled with its model's name. `model_name` may be set once the model is known."""

    def __init__(self, model_name: str = "") -> None:
        self.model_name = model_name
        self._snapshot: Callable[[], Snapshot] = Idle
        self._stages: Callable[[], Mapping[str, float]] = dict
        self._device_idle: Callable[[], Mapping[str, float]] = dict
        self._http: Callable[[], HttpFigures] = HttpFigures
        self._others_http: tuple[HttpFigures, ...] = ()
        self._registry: CollectorRegistry | None = None
        self._ttft = Histogram(_WAITS_S)
        self._itl = Histogram(_TOKEN_TIMES_S)
        self._e2e = Histogram(_REQUEST_TIMES_S)
        self._queue = Histogram(_WAITS_S)
        self._prompt_lengths = Histogram(_TOKEN_COUNTS)
        self._generation_lengths = Histogram(_TOKEN_COUNTS)
        self._step = Histogram(_STEP_TIMES_S)
        self._step_device = Histogram(_STEP_TIMES_S)
        self._lag = Histogram(_LAGS_S)
        self._gc = Histogram(_LAGS_S)
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generation_tokens = 0
        self._steps_overlapped = 0
        self._step_failures = 0
        self._finished: Counter[str] = Counter({reason.value: 0 for reason in FinishReason})
        self._rejected: Counter[str] = Counter()
        self._disabled: Counter[str] = Counter()
        self._faults: Counter[str] = Counter(dict.fromkeys(FAULTS, 0))
        self._http_faults: Counter[str] = Counter()  # of processes that are gone
        self._frontends_lost = 0

    def bind(self, snapshot: Callable[[], Snapshot]) -> None:
        """Where gauges come from; called on the event loop at each scrape, must not wait."""
        self._snapshot = snapshot

    def bind_times(
        self, stages: Callable[[], Mapping[str, float]], device_idle: Callable[[], Mapping[str, float]]
    ) -> None:
        """Where the seconds of the event loop's thread by stage, and of the idle device by cause, come from."""
        self._stages, self._device_idle = stages, device_idle

    def bind_http(self, told: Callable[[], HttpFigures]) -> None:
        """Where this process's figures of its sockets come from."""
        self._http = told

    # ---- observations

    def request_admitted(self, queue_s: float, prompt_tokens: int, cached_tokens: int) -> None:
        """A request got its slot after `queue_s`; `cached_tokens` of its prompt need no computing."""
        self._queue.observe(queue_s)
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += cached_tokens

    def observe_first_token(self, seconds: float) -> None:
        """Time from submission to the first token, which is counted as generated."""
        self._ttft.observe(seconds)
        self._generation_tokens += 1

    def observe_itl(self, seconds: float, tokens: int = 1) -> None:
        """`tokens` further tokens came `seconds` after the one before; several share the time evenly."""
        self._itl.observe(seconds / tokens, tokens)
        self._generation_tokens += tokens

    def observe_itls(self, seconds: float, requests: int) -> None:
        """A token came for each of `requests` requests, `seconds` after the one before."""
        self._itl.observe(seconds, requests)
        self._generation_tokens += requests

    def request_finished(self, reason: str, prompt_tokens: int, generated_tokens: int, e2e_s: float) -> None:
        self._finished[reason] += 1
        self._e2e.observe(e2e_s)
        self._prompt_lengths.observe(prompt_tokens)
        self._generation_lengths.observe(generated_tokens)

    def request_rejected(self, reason: str) -> None:
        """Refused before it was queued; `reason` is an error code such as queue_full."""
        self._rejected[reason] += 1

    def step(self, step_s: float, device_s: float, *, overlapped: bool) -> None:
        """A step retired: `step_s` from launch to result, `device_s` of it computing."""
        self._step.observe(step_s)
        self._step_device.observe(device_s)
        self._steps_overlapped += overlapped

    def step_failed(self) -> None:
        self._step_failures += 1

    def loop_lag(self, seconds: float) -> None:
        """How late the event loop woke up."""
        self._lag.observe(seconds)

    def gc_pause(self, seconds: float) -> None:
        """The garbage collector held everybody up."""
        self._gc.observe(seconds)

    def fault(self, kind: str) -> None:
        """Something went wrong that must not: one of FAULTS."""
        self._faults[kind] += 1

    def feature_disabled(self, feature: str) -> None:
        """A feature that was asked for runs on a slower path or not at all."""
        self._disabled[feature] += 1

    def frontend_lost(self, requests: int) -> None:
        """A front-end process ended unasked, with that many sequences open."""
        self._frontends_lost += 1
        self._finished[FinishReason.ABORT.value] += requests

    # ---- sums over processes

    def counts(self) -> Counts:
        mine = vars(self)
        return Counts(
            {name: value for name, value in mine.items() if isinstance(value, int | float)},
            {name: tuple(value.items()) for name, value in mine.items() if isinstance(value, Counter)},
            {name: (tuple(value.counts), value.total) for name, value in mine.items() if isinstance(value, Histogram)},
            self._http(),
        )

    def absorb(self, counts: Counts) -> None:
        """Count what another process, which is gone, has counted as well."""
        self._add(counts)
        self._http_faults.update(counts.http.faults)

    def _add(self, counts: Counts) -> None:
        mine = vars(self)
        for name, number in counts.numbers.items():
            mine[name] += number
        for name, labelled in counts.labelled.items():
            for label, number in labelled:
                mine[name][tuple(label) if isinstance(label, list) else label] += number
        for name, (buckets, total) in counts.histograms.items():
            mine[name].counts = [a + b for a, b in zip(mine[name].counts, buckets, strict=True)]
            mine[name].total += total

    def with_others(self, others: Iterable[Counts]) -> Metrics:
        """A copy that counts for other processes too; the gauges are this one's, but those of sockets are sums."""
        made = copy.copy(self)
        made._registry = None
        for name, value in vars(self).items():
            if isinstance(value, Counter | Histogram):
                setattr(made, name, copy.copy(value))
        for counts in others:
            made._add(counts)
            made._others_http += (counts.http,)
        return made

    # ---- exposition

    def render(self) -> bytes:
        """Prometheus text, of type CONTENT_TYPE; ends with this process's CPU, memory and file figures."""
        from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

        if self._registry is None:
            self._registry = CollectorRegistry(auto_describe=False)
            self._registry.register(self)
            ProcessCollector(registry=self._registry)
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Family]:
        """The protocol of prometheus_client's collectors."""
        yield from self._bound(self._snapshot())
        yield from self._counters()
        yield from self._histograms()
        yield from self._sockets()

    def _sockets(self) -> Iterator[Family]:
        every = (self._http(), *self._others_http)
        faults = Counter(self._http_faults)
        for each in every:
            for kind, count in each.faults.items():  # a kind that has not happened is told as 0
                faults[kind] += count
        yield self._by("aengine:http_faults", "Connections and requests that were cut.", "kind", faults)
        for name, text, value in (
            ("connections", "Open connections.", sum(each.connections for each in every)),
            ("connections_busy", "Connections with a request under way.", sum(each.connections_busy for each in every)),
            ("upload_bytes", "Bytes of bodies that are being read.", sum(each.upload_bytes for each in every)),
        ):
            yield self._gauge(f"aengine:http_{name}", text, value)

    def _bound(self, now: Snapshot) -> Iterator[Family]:
        yield self._gauge("vllm:num_requests_running", "Requests in the running batch.", now.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting for a slot.", now.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Used part of the KV pool, 0 to 1.", now.kv_usage)
        yield self._gauge("aengine:kv_waste_perc", "Part of the KV pool that nothing can use, 0 to 1.", now.kv_waste)
        yield self._gauge(
            "aengine:kv_stranded_bytes", "Free bytes that one group of layers cannot use.", now.kv_stranded_bytes
        )
        yield self._counter("aengine:kv_moved_bytes", "Bytes copied to keep pages together.", now.kv_moved_bytes)
        yield self._counter("vllm:num_preemptions", "Preemptions.", now.preemptions)
        yield self._counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", now.prefix_queries)
        yield self._counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", now.prefix_hits)
        yield self._counter("vllm:spec_decode_num_drafts", "Rows of steps that brought draft tokens.", now.drafts)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens.", now.drafted_tokens)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", now.accepted_tokens)
        yield self._by(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their place in a row.",
            "position",
            {str(position): count for position, count in enumerate(now.accepted_by_position)},
        )
        yield self._counter("aengine:forced_tokens", "Tokens taken over from grammars unsampled.", now.forced_tokens)
        yield self._counter("aengine:media_items_placed", "Images placed for running requests.", now.media_items)
        yield self._counter("aengine:media_items_computed", "Images computed, not found cached.", now.media_computed)
        yield self._counter("aengine:zombie_rows", "Rows computed for requests that had ended.", now.zombie_rows)

    def _counters(self) -> Iterator[Family]:
        yield self._counter("vllm:prompt_tokens", "Prompt tokens of admitted requests.", self._prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Generated tokens.", self._generation_tokens)
        yield self._counter("vllm:prompt_tokens_cached", "Prompt tokens that needed no computing.", self._cached_tokens)
        yield self._counter("aengine:steps", "Device steps that retired.", self._step.count)
        yield self._counter("aengine:steps_overlapped", "Steps retired with another in flight.", self._steps_overlapped)
        yield self._counter("aengine:step_failures", "Device steps that raised.", self._step_failures)
        yield self._counter("aengine:frontends_lost", "Front-end processes that ended unasked.", self._frontends_lost)
        yield self._by("vllm:request_success", "Ended requests.", "finished_reason", self._finished)
        yield self._by(
            "aengine:requests_rejected", "Requests refused before they were queued.", "reason", self._rejected
        )
        yield self._by("aengine:faults", "Faults that were contained.", "kind", self._faults)
        yield self._by("aengine:features_disabled", "Features asked for and not in effect.", "feature", self._disabled)
        yield self._by(
            "aengine:stage_seconds", "Wall time of the event loop's thread, exclusive.", "stage", self._stages()
        )
        yield self._by(
            "aengine:device_idle_seconds", "Time the device had nothing to do.", "cause", self._device_idle()
        )

    def _histograms(self) -> Iterator[Family]:
        for name, text, histogram in (
            ("vllm:time_to_first_token_seconds", "Submission to first token.", self._ttft),
            ("vllm:inter_token_latency_seconds", "Between tokens of a request.", self._itl),
            ("vllm:e2e_request_latency_seconds", "Submission to end.", self._e2e),
            ("vllm:request_queue_time_seconds", "Submission to slot.", self._queue),
            ("vllm:request_prompt_tokens", "Prompt tokens of ended requests.", self._prompt_lengths),
            ("vllm:request_generation_tokens", "Generated tokens of ended requests.", self._generation_lengths),
            ("aengine:step_seconds", "Launch of a step to its result.", self._step),
            ("aengine:step_device_seconds", "Time the device computed a step.", self._step_device),
            ("aengine:loop_lag_seconds", "How late the event loop woke up.", self._lag),
            ("aengine:gc_pause_seconds", "Pauses of the garbage collector.", self._gc),
        ):
            yield self._histogram(name, text, histogram)

    def _gauge(self, name: str, text: str, value: float) -> Family:
        from prometheus_client.core import GaugeMetricFamily

        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self.model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Family:
        """On the wire the name ends in _total."""
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self.model_name], value)
        return family

    def _by(self, name: str, text: str, label: str, counts: Mapping[str, float]) -> Family:
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(name, text, labels=["model_name", label])
        for key, count in sorted(counts.items()):
            family.add_metric([self.model_name, key], count)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Family:
        from prometheus_client.core import HistogramMetricFamily

        family = HistogramMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self.model_name], histogram.buckets(), sum_value=histogram.total)
        return family
