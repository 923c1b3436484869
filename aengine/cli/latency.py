"""Figures of a load test.

Owns: percentiles, the summary as a dict and as text.
Does not know: HTTP.
Invariants: figures come from successful requests alone, failures are counted beside them; times are shown in
milliseconds; a percentile is the smallest sample that at least p % of the samples do not exceed (nearest rank).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from aengine.cli.load import Sample

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], p: float) -> float:
    """Nearest rank; NaN without values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(p / 100 * len(ordered)) - 1)]


def summary(samples: Sequence[Sample], took_s: float) -> dict[str, Any]:
    """Counts, rates (a second) and, in ms, mean, p50, p90, p99 and max of TTFT, ITL, TPOT and E2E."""
    good = [sample for sample in samples if sample.error is None]
    output_tokens = sum(sample.completion_tokens for sample in good)
    input_tokens = sum(sample.prompt_tokens for sample in good)
    return {
        "requests": len(samples),
        "failed": len(samples) - len(good),
        "errors": dict(Counter(sample.error for sample in samples if sample.error).most_common(5)),
        "duration_s": round(took_s, 3),
        "prompt_tokens": input_tokens,
        "completion_tokens": output_tokens,
        "requests_per_s": _rate(len(good), took_s),
        "output_tokens_per_s": _rate(output_tokens, took_s),
        "total_tokens_per_s": _rate(output_tokens + input_tokens, took_s),
        "ttft_ms": _spread([sample.ttft_s for sample in good if sample.ttft_s is not None]),
        "itl_ms": _spread([gap for sample in good for gap in sample.gaps_s]),
        "tpot_ms": _spread([per for sample in good if (per := _per_token_s(sample)) is not None]),
        "e2e_ms": _spread([sample.e2e_s for sample in good]),
    }


def _per_token_s(sample: Sample) -> float | None:
    """Time per output token after the first."""
    if sample.ttft_s is None or sample.completion_tokens < 2:
        return None
    return (sample.e2e_s - sample.ttft_s) / (sample.completion_tokens - 1)


def _rate(count: int, took_s: float) -> float:
    return round(count / took_s, 3) if took_s > 0 else 0.0


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    made = {"mean": sum(seconds) / len(seconds)}
    made |= {f"p{p}": percentile(seconds, p) for p in PERCENTILES}
    made["max"] = max(seconds)
    return {name: round(1000 * value, 3) for name, value in made.items()}


def as_text(figures: dict[str, Any]) -> str:
    lines = [
        f"{figures['requests']} requests, {figures['failed']} failed, in {figures['duration_s']:.2f} s",
        f"{figures['prompt_tokens']} prompt tokens, {figures['completion_tokens']} generated",
        f"{figures['requests_per_s']:.2f} requests/s, {figures['output_tokens_per_s']:.1f} generated tokens/s, "
        f"{figures['total_tokens_per_s']:.1f} tokens/s in all",
        "",
        f"{'ms':<6}" + "".join(f"{name:>11}" for name in ("mean", "p50", "p90", "p99", "max")),
    ]
    for name in ("ttft", "itl", "tpot", "e2e"):
        spread = figures[f"{name}_ms"]
        if spread is not None:
            lines.append(f"{name.upper():<6}" + "".join(f"{value:>11.1f}" for value in spread.values()))
    lines += [f"error ({count}×): {error}" for error, count in figures["errors"].items()]
    return "\n".join(lines)
