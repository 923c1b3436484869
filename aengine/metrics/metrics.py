"""Counters and histograms of one engine, under vLLM's names and aengine's own.

Owns: what has been counted and observed, its names on the wire, sums over processes.
Does not know: who calls it, and where running, waiting and pool figures come from (a bound callable is read at scrape).
Invariants: no global registry, so engines in one process do not mix; all methods are called from the event loop's
thread, so there is no lock. Times are seconds.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from aengine.metrics.exposition import Families
from aengine.metrics.histogram import (
    LAGS_S,
    REQUEST_TIMES_S,
    STEP_TIMES_S,
    TOKEN_COUNTS,
    TOKEN_TIMES_S,
    WAITS_S,
    Histogram,
)
from aengine.metrics.snapshot import Idle, Snapshot
from aengine.types import FinishReason, HttpFigures

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

    from aengine.metrics.exposition import Family

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FAULTS = ("step", "detokenizer", "tokenizer", "loop_blocked", "step_overdue", "request_stalled", "frontend_stopped")


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
        self._ttft = Histogram(WAITS_S)
        self._itl = Histogram(TOKEN_TIMES_S)
        self._e2e = Histogram(REQUEST_TIMES_S)
        self._queue = Histogram(WAITS_S)
        self._prompt_lengths = Histogram(TOKEN_COUNTS)
        self._generation_lengths = Histogram(TOKEN_COUNTS)
        self._step = Histogram(STEP_TIMES_S)
        self._step_device = Histogram(STEP_TIMES_S)
        self._lag = Histogram(LAGS_S)
        self._gc = Histogram(LAGS_S)
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
        families = Families(self.model_name)
        yield from families.snapshot(self._snapshot())
        yield from self._counters(families)
        yield from self._histograms(families)
        yield from families.sockets((self._http(), *self._others_http), self._http_faults)

    def _counters(self, families: Families) -> Iterator[Family]:
        yield families.counter("vllm:prompt_tokens", "Prompt tokens of admitted requests.", self._prompt_tokens)
        yield families.counter("vllm:generation_tokens", "Generated tokens.", self._generation_tokens)
        yield families.counter(
            "vllm:prompt_tokens_cached", "Prompt tokens that needed no computing.", self._cached_tokens
        )
        yield families.counter("aengine:steps", "Device steps that retired.", self._step.count)
        yield families.counter(
            "aengine:steps_overlapped", "Steps retired with another in flight.", self._steps_overlapped
        )
        yield families.counter("aengine:step_failures", "Device steps that raised.", self._step_failures)
        yield families.counter(
            "aengine:frontends_lost", "Front-end processes that ended unasked.", self._frontends_lost
        )
        yield families.by("vllm:request_success", "Ended requests.", "finished_reason", self._finished)
        yield families.by(
            "aengine:requests_rejected", "Requests refused before they were queued.", "reason", self._rejected
        )
        yield families.by("aengine:faults", "Faults that were contained.", "kind", self._faults)
        yield families.by(
            "aengine:features_disabled", "Features asked for and not in effect.", "feature", self._disabled
        )
        yield families.by(
            "aengine:stage_seconds", "Wall time of the event loop's thread, exclusive.", "stage", self._stages()
        )
        yield families.by(
            "aengine:device_idle_seconds", "Time the device had nothing to do.", "cause", self._device_idle()
        )

    def _histograms(self, families: Families) -> Iterator[Family]:
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
            yield families.histogram(name, text, histogram)
