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
    events = [_meta(pid, 0, "process_name", {"name": "aengine"})]
    for lane, name in enumerate(LANES):
        events.append(_meta(pid, lane + 1, "thread_name", {"name": name}))
        events.append(_meta(pid, lane + 1, "thread_sort_index", {"sort_index": lane}))
    forms = [_form(pid, code) for code in range(len(NAMES))]
    begins = (spans.began_s * 1e6).tolist()
    lengths = (np.maximum(spans.ended_s - spans.began_s, 0.0) * 1e6).tolist()
    rows = zip(spans.code.tolist(), begins, lengths, spans.value.tolist(), strict=True)
    events.extend(forms[code] % (began_us, length_us, value) for code, began_us, length_us, value in rows)
    told = msgspec.json.encode(summary(spans, from_s, to_s)).decode()
    return f'{{"traceEvents":[{",".join(events)}],"displayTimeUnit":"ms","otherData":{told}}}'.encode()


def _meta(pid: int, tid: int, name: str, args: dict[str, Any]) -> str:
    event = {"name": name, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}
    return msgspec.json.encode(event).decode()


def _form(pid: int, code: int) -> str:
    """An event of this code as JSON, but for its beginning, its length and its number: encoding a dictionary for each
    takes twice as long, in which the event loop shares its interpreter."""
    lane = LANE_OF[code]
    colour = f',"cname":"{_COLOURS[code]}"' if code in _COLOURS else ""
    return (
        f'{{"name":"{NAMES[code]}","cat":"{LANES[lane]}","ph":"X","ts":%.3f,"dur":%.3f,'
        f'"pid":{pid},"tid":{lane + 1}{colour},"args":{{"{VALUES.get(code, "step")}":%d}}}}'
    )


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
