"""What a span can be called.

Owns: the codes of spans, their names and lanes.
Does not know: who records them.
Invariants: a code is an index into NAMES; codes below len(STAGES) are stages of the event loop's thread; spans of one
lane never overlap unless one lies inside the other.
"""

from __future__ import annotations

DRAIN, PLAN, STAGE, LAUNCH, COMMIT, DETOKENISE, WRITE, GC = range(8)
STAGES = ("drain", "plan", "stage", "launch", "commit", "detokenise", "write", "gc")
"""drain: take over requests and aborts. stage, launch: copy a plan's values, enqueue the step. commit: account a step's
result. write: what readers of streams do with new tokens, from encoding to the socket."""

CAUSES = ("no_work", "host", "copy", "decide")
"""Why a device had nothing to do. no_work: nothing could run. host: the next step was planned or launched late. copy: a
result was on its way to the host, or a launched step on its way to the device. decide: it waited for masks."""

DEVICE = len(STAGES)
IDLE = DEVICE + 1  # and one for each cause
COPY = IDLE + len(CAUSES)
LAG = COPY + 1
OTHER_GC = LAG + 1  # a collection on another thread: everybody who needs the interpreter waits

NAMES = (*STAGES, "step", *(f"idle: {cause}" for cause in CAUSES), "copy", "loop lag", "gc")
LANES = ("loop", "output", "device", "copy", "GC", "loop lag")
LANE_OF = (
    *(0 for _ in range(DRAIN, DETOKENISE)),
    *(1, 1),  # detokenise, write
    4,  # gc
    *(2 for _ in range(DEVICE, COPY)),
    *(3, 5, 4),  # copy, loop lag, gc elsewhere
)
VALUES = {PLAN: "rows", DRAIN: "items", DETOKENISE: "tokens", GC: "generation", OTHER_GC: "generation"}
"""What the number of a span counts; that of all others is the step's."""
