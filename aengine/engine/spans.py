"""A trace of each request for an OpenTelemetry collector.

Owns: `RequestSpans`: which spans a request has, their times and attributes; loading the optional packages.
Does not know: how spans travel.
Invariants: off unless asked for, and nothing is imported then; a span is told when all of it is over, so nothing is
open in between; exporting happens on the library's own thread, which drops spans rather than let them pile up.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from aengine.errors import ConfigError
from aengine.types import FinishReason

MISSING = "otlp_endpoint is set, but its packages are not installed: pip install 'aengine[otlp]' ({error})"


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Seconds of time.monotonic; 0.0 for what did not happen."""

    arrived_s: float
    admitted_s: float
    first_s: float
    last_s: float
    ended_s: float


class RequestSpans:
    """`tracer` and `provider` are OpenTelemetry's; the provider is shut down by `close`."""

    def __init__(self, tracer: Any, provider: Any, model: str) -> None:
        from opentelemetry import trace

        self._tracer = tracer
        self._provider = provider
        self._model = model
        self._inside = trace.set_span_in_context
        self._error = trace.Status(trace.StatusCode.ERROR)
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def ended(self, name: str, times: RequestTimes, reason: str, tokens: tuple[int, int, int]) -> None:
        """The reader of a choice has all of it. `tokens`: of the prompt, of these cached, generated."""
        now_s = time.monotonic()
        prompt, cached, generated = tokens
        attributes = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": self._model,
            "gen_ai.response.id": name,
            "gen_ai.response.finish_reasons": (reason,),
            "gen_ai.usage.input_tokens": prompt,
            "gen_ai.usage.output_tokens": generated,
            "aengine.cached_tokens": cached,
        }
        whole = self._tracer.start_span("request", start_time=self._ns(times.arrived_s), attributes=attributes)
        if reason == FinishReason.ERROR.value:
            whole.set_status(self._error)
        inside = self._inside(whole)
        for part, from_s, to_s in _parts(times, now_s):
            span = self._tracer.start_span(part, context=inside, start_time=self._ns(from_s))
            span.end(end_time=self._ns(to_s))
        whole.end(end_time=self._ns(now_s))

    def close(self) -> None:
        """Send what is left; waits for the collector, so not for the loop's thread."""
        self._provider.shutdown()

    def _ns(self, at_s: float) -> int:
        return int(at_s * 1e9) + self._epoch_ns


def _parts(times: RequestTimes, now_s: float) -> list[tuple[str, float, float]]:
    """queue: until there was a slot; prefill: to the first token; decode: to the last; stream: until it was read."""
    marks = [("queue", times.admitted_s), ("prefill", times.first_s), ("decode", times.last_s), ("stream", now_s)]
    parts, at_s = [], times.arrived_s
    for name, until_s in marks:
        if until_s:
            parts.append((name, at_s, max(at_s, until_s)))
            at_s = max(at_s, until_s)
    return parts


def load_spans(endpoint: str, model: str) -> RequestSpans:
    """Export to `endpoint` (OTLP over HTTP). Raises ConfigError when it is no URL or the packages are missing."""
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"otlp_endpoint is {endpoint!r}, not an http(s) URL", param="otlp_endpoint")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(MISSING.format(error=error), param="otlp_endpoint") from error
    provider = TracerProvider(resource=Resource.create({"service.name": "aengine"}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return RequestSpans(provider.get_tracer("aengine"), provider, model)
