"""Where time goes: the room's public names.

Owns: `Timeline` (spans of the last seconds, stages of the loop's thread, idle time of the device by cause).
Does not know: what a step, a request or a page is.
Invariants: recording never waits, never raises and keeps no object alive.
"""

from aengine.timeline.chrome import chrome_trace
from aengine.timeline.device import DeviceClock, StepTimes
from aengine.timeline.names import CAUSES, STAGES
from aengine.timeline.ring import KEPT_S, Ring, Spans
from aengine.timeline.stages import Span, StageClock
from aengine.timeline.timeline import Timeline

__all__ = [
    "CAUSES",
    "KEPT_S",
    "STAGES",
    "DeviceClock",
    "Ring",
    "Span",
    "Spans",
    "StageClock",
    "StepTimes",
    "Timeline",
    "chrome_trace",
]
