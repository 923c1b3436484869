"""The last seconds of spans.

Owns: `Ring`, a fixed piece of memory that spans are written into, round and round.
Does not know: clocks, what a code means.
Invariants: writing a span takes a third of a microsecond and makes no object that lives on; memory is touched as it
fills and never grows. Threads may write: at worst two of them meet and one span is lost.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

KEPT_S = 30.0
CAPACITY = 1 << 17  # spans; ten a step are 30 s of steps of 2.3 ms (3.1 MB)
_FORMAT = struct.Struct("=ddii")
_RECORD = np.dtype([("began_s", "f8"), ("ended_s", "f8"), ("code", "i4"), ("value", "i4")])


@dataclass(frozen=True, slots=True)
class Spans:
    """Columns of equal length, by rising beginning. Seconds of the clock they were written with."""

    began_s: NDArray[np.float64]
    ended_s: NDArray[np.float64]
    code: NDArray[np.int32]
    value: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.code)


class Ring:
    def __init__(self, capacity: int = CAPACITY) -> None:
        self._memory = bytearray(capacity * _FORMAT.size)
        self._end = capacity * _FORMAT.size
        self._at = 0
        self._pack = _FORMAT.pack_into

    def add(self, code: int, began_s: float, ended_s: float, value: int = 0) -> None:
        at = self._at
        self._pack(self._memory, at, began_s, ended_s, code, value & 0x7FFFFFFF)
        at += 24
        self._at = at if at < self._end else 0

    def since(self, from_s: float) -> Spans:
        """A copy of the spans that ended at or after `from_s`."""
        records = np.frombuffer(bytes(self._memory), _RECORD)
        records = records[(records["ended_s"] >= from_s) & (records["ended_s"] > 0)]
        records = records[np.argsort(records["began_s"], kind="stable")]
        return Spans(*(np.ascontiguousarray(records[name]) for name in ("began_s", "ended_s", "code", "value")))
