"""Claim: the timeline costs less than 1 % of a step, so it is always on.

Times a span in a loop, then all that one step records (spans of drain, plan, stage, launch, commit, detokenise and
write, the device's account), against a step of --step-ms; and what a trace of a full ring costs.

    python -m bench.timeline [--step-ms 5] [--seconds 1]
"""

from __future__ import annotations

import argparse
import json
import time

from aengine.timeline import StepTimes, Timeline, chrome_trace


def one_step(timeline: Timeline, step: int) -> None:
    now_s = time.perf_counter()
    with timeline.drain as span:
        span.value = 1
    with timeline.plan as span:
        span.value = step
    with timeline.launch as span:
        span.after(timeline.stage, now_s)
    with timeline.detokenise as span:
        span.value = step
    with timeline.write:
        with timeline.commit as span:
            span.value = step
        timeline.device.step(StepTimes(step, now_s, now_s, now_s + 1e-6, now_s + 1e-6, 1e-6))


def least_us(work, seconds: float, times: int = 2000) -> float:
    """Microseconds of processor time of one call: the least over repeats, as others use the machine too."""
    least, until_s = float("inf"), time.monotonic() + seconds
    while time.monotonic() < until_s:
        began = time.process_time()
        for step in range(times):
            work(step)
        least = min(least, (time.process_time() - began) / times)
    return 1e6 * least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=1.0)
    args = parser.parse_args()
    timeline = Timeline()

    def span(_: int) -> None:
        with timeline.plan:
            pass

    empty_us = least_us(lambda _: None, args.seconds / 2)
    figures = {
        "span_us": least_us(span, args.seconds) - empty_us,
        "ring_us": least_us(lambda _: timeline.ring.add(1, 1.0, 2.0, 3), args.seconds) - empty_us,
        "step_us": least_us(lambda step: one_step(timeline, step), args.seconds),
    }
    figures["share_of_step"] = figures["step_us"] / (1e3 * args.step_ms)
    began_s = time.perf_counter()
    spans = timeline.last(30.0)
    figures["copy_ms"] = 1e3 * (time.perf_counter() - began_s)
    body = chrome_trace(*spans)
    figures["encode_ms"] = 1e3 * (time.perf_counter() - began_s) - figures["copy_ms"]
    print(f"{len(spans[0]):,} spans in the ring, {len(body):,} bytes of JSON")
    print("  ".join(f"{name} {value:.4g}" for name, value in figures.items()))
    print(json.dumps({"bench": "timeline", "args": vars(args), **figures}))


if __name__ == "__main__":
    main()
