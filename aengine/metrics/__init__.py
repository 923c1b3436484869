"""What an engine counts, and how Prometheus reads it."""

from aengine.metrics.histogram import Histogram
from aengine.metrics.metrics import CONTENT_TYPE, FAULTS, Counts, Metrics
from aengine.metrics.snapshot import Idle, Snapshot

__all__ = ["CONTENT_TYPE", "FAULTS", "Counts", "Histogram", "Idle", "Metrics", "Snapshot"]
