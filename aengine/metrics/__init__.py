"""What an engine counts, and how Prometheus reads it.

Owns: counters and histograms, their sums over processes, their text.
Does not know: who calls it; requests, steps, sockets.
Invariants: see metrics (one thread, no global registry) and histogram (what observing costs).
"""

from aengine.metrics.histogram import Histogram
from aengine.metrics.metrics import CONTENT_TYPE, FAULTS, Counts, Metrics
from aengine.metrics.snapshot import Idle, Snapshot

__all__ = ["CONTENT_TYPE", "FAULTS", "Counts", "Histogram", "Idle", "Metrics", "Snapshot"]
