"""WHAT is already computed: the only reuse mechanism.

Owns: PrefixCache and the values its verbs take and return.
Does not know: requests, scheduling, tensors.
Invariants: see cache.
"""

from aengine.prefix_cache.cache import PrefixCache
from aengine.prefix_cache.keys import MediaItem
from aengine.prefix_cache.lease import Grown, Lease, TablePart
from aengine.prefix_cache.relocation import Compaction
from aengine.prefix_cache.stats import CacheStats

__all__ = ["CacheStats", "Compaction", "Grown", "Lease", "MediaItem", "PrefixCache", "TablePart"]
