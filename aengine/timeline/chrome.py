"""Spans as a file that Perfetto and chrome://tracing open.

Owns: the JSON object form of Chrome's trace events: complete events in microseconds, a lane (thread) each.
Does not know: where spans come from.
Invariants: events of a lane rise by time; an event's end is never before its beginning. "otherData" sums up the window:
its seconds, those the device was busy, and idle ones by cause; what sticks out of the window is cut off.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec
import numpy as np

from aengine.timeline.names import CAUSES, COPY, DEVICE, IDLE, LANE_OF, LANES, NAMES, VALUES
from aengine.timeline.ring import Spans

_COLOURS = {IDLE: "grey", IDLE + 1: "terrible", IDLE + 2: "bad", IDLE + 3: "yellow", DEVICE: "good"}


def chrome_trace(spans: Spans, from_s: float, to_s: float) -> bytes:
    pid = os.getpid()
    events: list[dict[str, Any]] = [_meta(pid, 0, "process_name", {"name": "aengine"})]
    for lane, name in enumerate(LANES):
        events.append(_meta(pid, lane + 1, "thread_name", {"name": name}))
        events.append(_meta(pid, lane + 1, "thread_sort_index", {"sort_index": lane}))
    codes = spans.code.tolist()
    begins = np.round(spans.began_s * 1e6, 3).tolist()
    lengths = np.round(np.maximum(spans.ended_s - spans.began_s, 0.0) * 1e6, 3).tolist()
    for code, began_us, length_us, value in zip(codes, begins, lengths, spans.value.tolist(), strict=True):
        event = {
            "name": NAMES[code],
            "cat": LANES[LANE_OF[code]],
            "ph": "X",
            "ts": began_us,
            "dur": length_us,
            "pid": pid,
            "tid": LANE_OF[code] + 1,
            "args": {VALUES.get(code, "step"): value},
        }
        if code in _COLOURS:
            event["cname"] = _COLOURS[code]
        events.append(event)
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": summary(spans, from_s, to_s)}
    return msgspec.json.encode(trace)


def _meta(pid: int, tid: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}


def summary(spans: Spans, from_s: float, to_s: float) -> dict[str, Any]:
    """Seconds of the device inside the window."""
    inside = np.maximum(np.minimum(spans.ended_s, to_s) - np.maximum(spans.began_s, from_s), 0.0)
    device = (spans.code >= DEVICE) & (spans.code < COPY)
    sums = np.bincount(spans.code[device] - DEVICE, inside[device], 1 + len(CAUSES)).tolist()
    return {
        "from_us": from_s * 1e6,
        "to_us": to_s * 1e6,
        "window_s": to_s - from_s,
        "busy_s": sums[0],
        "idle_s": dict(zip(CAUSES, sums[1:], strict=True)),
    }
