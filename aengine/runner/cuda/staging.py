"""Pinned memory between a step's host values and the device.

Owns: the staging sets: where uploads are read from and downloads are written to, and when either may be used again.
Does not know: what the values mean.
Invariants: a set carries one step at a time. Its memory is written again only when the step's copies have run: the
guard is an event, recorded behind the last of them. With depth + 2 sets the guard was always reached long ago.

    host   | upload, upload ... launch ........ | (awaits the event) reads downloads | free
    compute|    H2D     H2D     step            |
    copy   |                         D2H -> event
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.runner.cuda.api import DeviceApi, Event

_ALIGN = 64
FIRST_BYTES = 64 * 1024


class _Chunks:
    """Pinned memory given out from front to back; grows by further pieces, which become one at the next reset."""

    def __init__(self, api: DeviceApi, n_bytes: int) -> None:
        self._api = api
        self._chunks = [api.pinned(n_bytes)]
        self._used = 0

    def reset(self) -> None:
        if len(self._chunks) > 1:
            self._chunks = [self._api.pinned(sum(len(chunk) for chunk in self._chunks))]
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor; valid until the next reset."""
        count = 1
        for size in shape:
            count *= size
        n_bytes = count * dtype.itemsize
        if self._used + n_bytes > len(self._chunks[-1]):
            self._chunks.append(self._api.pinned(max(2 * len(self._chunks[-1]), n_bytes)))
            self._used = 0
        first, self._used = self._used, self._used + -(-n_bytes // _ALIGN) * _ALIGN
        return self._chunks[-1][first : first + n_bytes].view(dtype).view(shape)


class StagingSet:
    """The pinned memory of one step."""

    def __init__(self, api: DeviceApi) -> None:
        self._device = api.device
        self._up, self._down = _Chunks(api, FIRST_BYTES), _Chunks(api, FIRST_BYTES)
        self.guard: Event | None = None

    def begin(self) -> None:
        if self.guard is not None:
            self.guard.wait()
            self.guard = None
        self._up.reset()
        self._down.reset()

    def upload(self, values: NDArray[np.generic]) -> Tensor:
        """A device tensor that holds `values` once the current stream gets here."""
        host = torch.from_numpy(np.ascontiguousarray(values))
        pinned = self._up.take(tuple(values.shape), host.dtype)
        pinned.numpy()[...] = values
        on_device = torch.empty(pinned.shape, dtype=pinned.dtype, device=self._device)
        return on_device.copy_(pinned, non_blocking=True)

    def download(self, values: Tensor) -> NDArray[np.generic]:
        """Where `values` will lie on the host once the current stream has got here; read it after the step's event."""
        pinned = self._down.take(tuple(values.shape), values.dtype)
        pinned.copy_(values, non_blocking=True)
        found: NDArray[np.generic] = pinned.numpy()
        return found


class CudaStaging:
    """`sets` staging sets, of which one carries the step that is being launched: calling it uploads by that one."""

    def __init__(self, api: DeviceApi, sets: int) -> None:
        self._sets = sets
        self._free: deque[StagingSet] = deque(StagingSet(api) for _ in range(sets))
        self.current: StagingSet | None = None

    def take(self, step: int) -> StagingSet:
        if not self._free:
            raise RuntimeError(f"step {step}: all {self._sets} staging sets are in flight")
        taken = self._free.popleft()
        taken.begin()
        self.current = taken
        return taken

    def give(self, used: StagingSet) -> None:
        self._free.append(used)

    def __call__(self, values: NDArray[np.generic]) -> Tensor:
        assert self.current is not None, "nothing can be uploaded outside a launch"
        return self.current.upload(values)
