"""A CUDA device that is not there: operations on CPU tensors, run later, in any order that streams allow.

Owns: `FakeCuda` (the `DeviceApi`), its streams, events, graphs; the check that nothing waits and nothing is copied from
or to pageable memory.
Does not know: steps, models.
Invariants: inside `on(stream)` an operation that reads or writes tensor data is only recorded; its outputs are filled
with garbage until it runs. One operation of a random stream runs at a time, at random moments; an event is reached when
the operations before it have run, and a stream that waits for an event stands still until then. Views are made at once:
they touch no data.
"""

from __future__ import annotations

import gc
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten
# What makes the host wait on a real device: the size or the value of its result is read back.
SYNCHRONISING = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive",
    "is_nonzero", "bincount", "_assert_async",
}  # fmt: skip
HOST_READS = {"cpu", "numpy", "tolist", "item", "__bool__", "__int__", "__float__", "__index__", "__contains__"}


class Synchronises(AssertionError):
    """On a real device the host would have waited here."""


class PageableMemory(AssertionError):
    """On a real device this tensor would lie in ordinary host memory."""


class FakeEvent:
    def __init__(self, device: FakeCuda) -> None:
        self._device, self.reached = device, False

    def wait(self) -> None:
        self._device.host_waits += 1
        self._device.run_until(lambda: self.reached)

    def done(self) -> bool:
        return self.reached

    def seconds_since(self, earlier: FakeEvent) -> float:
        assert self.reached
        assert earlier.reached
        return 1e-3


class FakeStream:
    def __init__(self, device: FakeCuda, name: str) -> None:
        self.device, self.name = device, name
        self.queue: deque[Callable[[], None] | tuple[str, FakeEvent]] = deque()

    def record(self, *, timed: bool = False) -> FakeEvent:
        event = FakeEvent(self.device)
        with self.device.lock:
            self.queue.append(("reach", event))
        return event

    def wait(self, event: FakeEvent) -> None:
        with self.device.lock:
            self.queue.append(("wait", event))


class FakeGraph:
    def __init__(self, device: FakeCuda, work: list[Callable[[], None]], kind: str = "replay") -> None:
        self._device, self._work, self._kind = device, work, kind

    def replay(self) -> None:
        self._device.enqueue(lambda: [one() for one in self._work])
        self._device.counts[self._kind] += 1


class FakeCuda:
    """`DeviceApi`. `eager`: how likely an operation runs soon after it was enqueued."""

    device = torch.device("cpu")
    version, peak_bytes = (9, 0), 2**20

    def __init__(self, seed: int = 0, eager: float = 0.3) -> None:
        self._rng, self._eager = random.Random(seed), eager
        self.lock = threading.RLock()
        self.streams: list[FakeStream] = []
        self.current: FakeStream | None = None
        self.recording: list[Callable[[], None]] | None = None
        self.host_waits = 0
        self.counts: Counter[str] = Counter()
        self._pinned: dict[int, Tensor] = {}
        self._known: set[int] = set()

    # ---- DeviceApi

    def stream(self, name: str) -> FakeStream:
        self.streams.append(FakeStream(self, name))
        return self.streams[-1]

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            if before is not None:  # the modes are on already
                yield
            else:
                with _Deferred(self), _NoHostReads(self):
                    yield
        finally:
            self.current = before

    def pinned(self, n_bytes: int) -> Tensor:
        with _disable_current_modes():
            memory = torch.full((n_bytes,), 0xA5, dtype=torch.uint8)
        self._pinned[_storage(memory)] = memory
        self._known.discard(_storage(memory))
        return memory

    def capture(self, stream: FakeStream, work: Callable[[], object]) -> tuple[FakeGraph, object]:
        self.recording = []
        try:
            with self.on(stream):
                made = work()
            return FakeGraph(self, self.recording), made
        finally:
            self.recording = None

    def capture_pieces(self, stream: FakeStream, work: Callable) -> tuple[tuple[FakeGraph, ...], object]:
        parts: list[list[Callable[[], None]]] = [[]]

        def advance() -> None:
            parts.append([])
            self.recording = parts[-1]

        self.recording = parts[0]
        try:
            with self.on(stream):
                made = work(advance)
            return tuple(FakeGraph(self, part, "replay piece") for part in parts), made
        finally:
            self.recording = None

    def alias(self, tensor: Tensor) -> Tensor:
        return tensor

    def capability(self) -> tuple[int, int]:
        return self.version

    def peak(self, work: Callable[[], object]) -> int:
        work()
        self.run_until(lambda: all(not stream.queue for stream in self.streams))
        return self.peak_bytes

    def memory(self) -> tuple[int, int]:
        return 2**31, 2**31

    # ---- running

    def settle(self) -> None:
        """All tensors that exist now are the device's: weights, pages, tables."""
        for one in gc.get_objects():
            if type(one) is Tensor or type(one) is torch.nn.Parameter:
                self.know(one)

    def is_pinned(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self._pinned

    def know(self, tensor: Tensor) -> None:
        if _storage(tensor) not in self._pinned:
            self._known.add(_storage(tensor))

    def check(self, name: str, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            at = _storage(tensor)
            if at in self._pinned:
                if name != "copy_":
                    raise PageableMemory(f"{name} works on pinned host memory")
            elif tensor.numel() and at not in self._known:
                raise PageableMemory(f"{name} gets {tuple(tensor.shape)} {tensor.dtype} from ordinary host memory")

    def enqueue(self, work: Callable[[], None]) -> None:
        if self.recording is not None:
            self.recording.append(work)
            return
        assert self.current is not None
        with self.lock:
            self.current.queue.append(work)
            while self._rng.random() < self._eager and self.run_one():
                pass

    def run_one(self) -> bool:
        """Run one operation of a random stream that may go on; False: none may."""
        with self.lock:
            able = [stream for stream in self.streams if self._advance(stream)]
            if not able:
                return False
            work = self._rng.choice(able).queue.popleft()
            with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode():
                work()
            return True

    def _advance(self, stream: FakeStream) -> bool:
        """Pass events; whether an operation is next."""
        while stream.queue and isinstance(stream.queue[0], tuple):
            kind, event = stream.queue[0]
            if kind == "wait" and not event.reached:
                return False
            if kind == "reach":
                event.reached = True
            stream.queue.popleft()
        return bool(stream.queue)

    def run_until(self, reached: Callable[[], bool]) -> None:
        while True:
            with self.lock:
                for stream in self.streams:
                    self._advance(stream)
                if reached():
                    return
                moved = self.run_one()
                if not moved and not reached():
                    raise AssertionError("deadlock: the event is never reached")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _NoHostReads(TorchFunctionMode):
    """`.cpu()` of a CPU tensor is no operation, so it is caught by name. Pinned memory is the host's to read."""

    def __init__(self, device: FakeCuda) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in HOST_READS and not (name == "numpy" and self._device.is_pinned(args[0])):
            raise Synchronises(f"Tensor.{name}")
        return func(*args, **(kwargs or {}))


class _Deferred(TorchDispatchMode):
    def __init__(self, device: FakeCuda) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        unsized = func._overloadname in ("Tensor", "self_Tensor") and kwargs.get("output_size") is None
        if name in SYNCHRONISING or (name == "repeat_interleave" and unsized):
            raise Synchronises(name)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        flat, _ = tree_flatten((args, kwargs))
        tensors = [value for value in flat if isinstance(value, Tensor)]
        if name in ("index", "index_put_", "index_put") and any(
            t.dtype is torch.bool for t in (args[1] or ()) if isinstance(t, Tensor)
        ):
            raise Synchronises(f"{name} by a mask")
        returns = func._schema.returns
        if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            return func(*args, **kwargs)  # a view
        self._device.counts[name] += 1
        if not (name == "copy_" or tensors == []):
            self._device.check(name, [t for t in tensors if t.dim() or _storage(t) in self._device._known])
        elif name == "copy_":
            self._device.check(name, tensors)
        if name in ("empty", "empty_strided", "empty_like", "new_empty"):
            made = func(*args, **kwargs)
            _spoil(made)
            self._device.know(made)
            return made
        if any(r.alias_info is not None and r.alias_info.is_write for r in returns) or func._schema.is_mutable:
            self._device.enqueue(lambda: func(*args, **kwargs))
            return _written(func, args, kwargs)
        made = self._outputs(func, args, kwargs)
        filled, _ = tree_flatten(made)

        def work() -> None:
            results, _ = tree_flatten(func(*args, **kwargs))
            for target, result in zip(filled, results, strict=True):
                target.copy_(result)

        self._device.enqueue(work)
        return made

    def _outputs(self, func, args, kwargs):
        """Tensors of the right shapes that hold garbage."""

        def meta(value):
            if isinstance(value, Tensor):
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            return torch.device("meta") if isinstance(value, torch.device) else value

        shapes = func(*tree_map(meta, args), **tree_map(meta, kwargs))

        def real(value):
            if not isinstance(value, Tensor):
                return value
            made = torch.empty(value.shape, dtype=value.dtype)
            _spoil(made)
            self._device.know(made)
            return made

        if not tree_flatten((args, kwargs))[0] or not any(isinstance(v, Tensor) for v in tree_flatten(shapes)[0]):
            return shapes
        return tree_map(real, shapes)


def _written(func, args, kwargs):
    """What an operation that writes to its arguments returns."""
    if not func._schema.returns:
        return None
    names = [argument.name for argument in func._schema.arguments]
    written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    found = [kwargs[name] if name in kwargs else args[names.index(name)] for name in written]
    return found[0] if len(found) == 1 else tuple(found)


def _spoil(tensor: Tensor) -> None:
    if tensor.dtype is torch.bool:
        tensor.fill_(True)
    elif tensor.numel() and tensor.is_contiguous():
        tensor.view(-1).view(torch.uint8).fill_(0x7B)
