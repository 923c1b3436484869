"""The seam between the runner and a CUDA device: streams, events, pinned memory, graphs.

Owns: the `DeviceApi` protocol, and `TorchCuda`, which is torch.cuda behind it. No other file of the package calls
torch.cuda to order work.
Does not know: steps, models, what the work is.
Invariants: nothing here waits for the device but `Event.wait`, which sleeps (no spinning) with the GIL released, and
`settle` and `capture`, which run at start-up. Work of one stream runs in order; between streams only `Stream.wait`
orders it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Event(Protocol):
    """A point in a stream's work."""

    def wait(self) -> None:
        """Block the calling thread until the stream reached this point; raises what the device failed with."""
        ...

    def done(self) -> bool: ...

    def seconds_since(self, earlier: Event) -> float:
        """Device time between two timed events that were both reached."""
        ...


class Stream(Protocol):
    def record(self, *, timed: bool = False) -> Event: ...

    def wait(self, event: Event) -> None:
        """Work given to this stream from now on runs after `event`. Does not block the host."""
        ...


class Graph(Protocol):
    def replay(self) -> None:
        """Enqueue the captured work on the current stream."""
        ...


class DeviceApi(Protocol):
    device: torch.device

    def stream(self, name: str) -> Stream: ...

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Operations on tensors inside go to `stream`."""
        ...

    def pinned(self, n_bytes: int) -> Tensor:
        """uint8 host memory that the device copies from and to without the host's help."""
        ...

    def capture(self, stream: Stream, work: Callable[[], T]) -> tuple[Graph, T]:
        """Record `work` instead of running it; its tensors keep their addresses. All graphs share one memory pool."""
        ...

    def capture_pieces(self, stream: Stream, work: Callable[[Callable[[], None]], T]) -> tuple[tuple[Graph, ...], T]:
        """As `capture`, but several graphs in order: `work` gets a function that ends one and begins the next."""
        ...

    def alias(self, tensor: Tensor) -> Tensor:
        """A recorded tensor's memory, under a tensor that does not keep it: later recordings may use it too."""
        ...

    def settle(self) -> None:
        """Wait until what was made outside all streams (weights, pages, tables) is there. At start-up only."""
        ...

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the device."""
        ...

    def capability(self) -> tuple[int, int]:
        """The device's compute capability."""
        ...

    def peak(self, work: Callable[[], object]) -> int:
        """Run `work` to its end -> the most bytes of the device it held at once beside what was there before. At
        start-up only."""
        ...


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _CudaEvent)
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class _CudaStream:
    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, *, timed: bool = False) -> Event:
        event = torch.cuda.Event(enable_timing=timed, blocking=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return _CudaEvent(event)

    def wait(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        self.stream.wait_event(event.event)


def unowned(tensor: Tensor) -> Tensor:
    """The same elements of the same memory, which is freed as if this were not there."""
    held = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(held.data_ptr(), tensor.device, held.nbytes())
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


class TorchCuda:
    """`DeviceApi` of one CUDA device."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self._pool = torch.cuda.graph_pool_handle()

    def stream(self, name: str) -> Stream:
        return _CudaStream(self.device)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        assert isinstance(stream, _CudaStream)
        with torch.cuda.stream(stream.stream):
            yield

    def pinned(self, n_bytes: int) -> Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)

    def capture(self, stream: Stream, work: Callable[[], T]) -> tuple[Graph, T]:
        assert isinstance(stream, _CudaStream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream.stream):
            made = work()
        return graph, made

    def capture_pieces(self, stream: Stream, work: Callable[[Callable[[], None]], T]) -> tuple[tuple[Graph, ...], T]:
        assert isinstance(stream, _CudaStream)
        graphs: list[torch.cuda.CUDAGraph] = []
        recording: list[torch.cuda.CUDAGraph] = []  # at most one

        def begin() -> None:
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool)
            recording.append(graph)

        def end() -> None:
            graphs.append(recording.pop())
            graphs[-1].capture_end()

        def advance() -> None:
            end()
            begin()

        self.settle()
        collects = gc.isenabled()
        gc.disable()  # what it would free, a recording must not
        try:
            with torch.cuda.stream(stream.stream):
                begin()
                try:
                    made = work(advance)
                    end()
                except BaseException:
                    with suppress(RuntimeError):  # the first error tells more than that the recording is spoilt
                        if recording:
                            end()
                    raise
        finally:
            if collects:
                gc.enable()
        return tuple(graphs), made

    def alias(self, tensor: Tensor) -> Tensor:
        return unowned(tensor)

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    def memory(self) -> tuple[int, int]:
        torch.cuda.empty_cache()  # what loading left with the allocator is free
        free, total = torch.cuda.mem_get_info(self.device)
        return int(free), int(total)

    def capability(self) -> tuple[int, int]:
        return torch.cuda.get_device_capability(self.device)

    def peak(self, work: Callable[[], object]) -> int:
        self.settle()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        self.settle()
        return torch.cuda.max_memory_allocated(self.device) - before
