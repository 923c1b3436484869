"""Recording what a model does with `NativeOps` into a program that one foreign call replays.

Owns: the recording of operations instead of their execution, the memory of their outputs, the sizes that vary.
Does not know: what a model computes, steps, plans.
Invariants: a recording is made with the largest sizes and again with others of each; every 8-byte member of an argument
struct must be constant or rise evenly with one size, and what that predicts for sizes of two each must be what is
recorded then (of one, torch writes other strides for the single row). So no list says which member of which operation
counts rows, and a model or an operation that cannot be replayed is found out when it is recorded. Anything that reads a
value or copies one outside of an operation raises NotCapturable, because it would not happen again in a replay.

    forward(max sizes) -> calls, args        forward(fewer tokens) -> args, same calls
                             \\----- differences: args[i] = constant[i] + slope[i] * tokens
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from aengine.kernels.native.library import CALL, Block, Context, check
from aengine.kernels.native.ops import NativeOps
from aengine.kernels.ops import Linear

T = TypeVar("T")
WORD = 8


class NotCapturable(Exception):
    """What was recorded would not do the same when replayed."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What varies from step to step: tokens, rows, positions whose logits are wanted, the longest context."""

    tokens: int
    rows: int
    points: int
    context: int


class HostOnly(tuple[int, ...]):
    """Stands for host values of a batch that a recording must not depend on."""

    def _refuse(self) -> None:
        raise NotCapturable("an operation chooses by the host's row counts or positions")

    def __iter__(self) -> Iterator[int]:
        self._refuse()
        return super().__iter__()

    def __len__(self) -> int:
        self._refuse()
        return super().__len__()

    def __getitem__(self, at: Any) -> Any:
        self._refuse()
        return super().__getitem__(at)


# What may be asked of a tensor besides views of it and its properties: nothing that depends on its content.
_METADATA = {"data_ptr", "stride", "size", "dim", "numel", "element_size", "is_contiguous", "storage_offset", "__len__"}
_PROPERTIES = (torch.Size, torch.dtype, torch.device, torch.layout, int)


class _ViewsOnly(TorchFunctionMode):
    """Lets torch tell about tensors and make views of them, and nothing else."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", None) or str(func)
        if name in _METADATA or (name == "__get__" and isinstance(made, _PROPERTIES)):
            return made
        memory = {_storage(value) for value in args if isinstance(value, Tensor)}
        for value in made if isinstance(made, tuple | list) else (made,):
            view = isinstance(value, Tensor) and _storage(value) in memory and not _writes(name)
            if not view and not (name == "__get__" and not isinstance(value, Tensor)):
                raise NotCapturable(f"it calls torch's {name}, which is no operation of the backend and no view")
        return made


def _writes(name: str) -> bool:
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Buffers:
    """Memory for outputs: a buffer is used again when no tensor holds it any more.

    A recording made again takes the same buffers in the same order, whatever smaller shapes it asks for. They have the
    system's ordinary pages, of which a step touches those that its rows need: with huge ones the first decode step
    zeroed 2 MiB for a row of each.
    """

    def __init__(self) -> None:
        self._free: list[Block] = []
        self._taken: list[Block] = []
        self._again: Iterator[Block] | None = None
        self.bytes = 0

    def rewind(self) -> None:
        self._again = iter(self._taken)

    def take(self, size: int) -> ctypes.Array[ctypes.c_char]:
        if self._again is None:
            block = self._reuse(size) or self._allocate(size)
            self._taken.append(block)
        else:
            block = next(self._again, None) or self._refuse(size)
            if block.size < size:
                self._refuse(size)
        held = (ctypes.c_char * max(size, 1)).from_address(block.address)
        if self._again is None:
            weakref.finalize(held, self._free.append, block)
        return held

    def _reuse(self, size: int) -> Block | None:
        """The smallest free one that is large enough and not wastefully so: it may be wanted for larger ones."""
        fitting = [block for block in self._free if size <= block.size <= 2 * size]
        if not fitting:
            return None
        best = min(fitting, key=lambda block: block.size)
        self._free.remove(best)
        return best

    def _allocate(self, size: int) -> Block:
        self.bytes += size
        memory = mmap.mmap(-1, max(size, 1))
        return Block(ctypes.addressof(ctypes.c_char.from_buffer(memory)), size, memory)

    def _refuse(self, size: int) -> Block:
        raise NotCapturable(f"recorded again it asks for an output of {size} bytes that it did not ask for before")


class RecordingOps(NativeOps):
    """`NativeOps` that note each operation and run none; tensors have addresses and no content."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.name += "-recording"
        self.buffers = _Buffers()
        self.views_only = _ViewsOnly()
        self.calls: list[tuple[str, bytes]] = []
        self.cuts: list[int] = []

    def prepare(self, linear: Linear) -> Linear:
        raise NotCapturable("it prepares a weight")

    def cut(self) -> None:
        """What follows can be replayed apart from what came before."""
        self.cuts.append(len(self.calls))

    def rewind(self) -> None:
        self.calls, self.cuts = [], []
        self.buffers.rewind()

    def _new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        count = math.prod(shape)
        with torch._C.DisableTorchFunction():  # the recorder's own calls are not the model's
            held = self.buffers.take(count * dtype.itemsize)
            if not count:
                return torch.empty(tuple(shape), dtype=dtype)
            return torch.frombuffer(held, dtype=dtype, count=count).view(tuple(shape))

    def _run(self, name: str, args: bytes) -> None:
        self.calls.append((name, args))


@dataclass(frozen=True, slots=True)
class _Slope:
    """Members `at` of the arguments are constant + slope * size."""

    at: NDArray[np.int64]
    constant: NDArray[np.int64]
    slope: NDArray[np.int64]


class Recording:
    """Operations with their arguments, which `resize` brings to the sizes of a step.

    `calls`: (operation, address of its arguments) in order; `cuts`: where parts begin; `outputs`: what the recorded
    function returned, at the largest sizes; `bytes`: memory of all outputs.
    """

    def __init__(self, ops: RecordingOps, outputs: Any, limits: Sizes, slopes: dict[str, _Slope]) -> None:
        self.outputs, self.limits = outputs, limits
        self.cuts, self.bytes = tuple(ops.cuts), ops.buffers.bytes
        self._ops = ops  # holds memory that the arguments point to
        self._words = _words(ops.calls)
        self._slopes = slopes
        self._sizes = limits
        address, calls = self._words.ctypes.data, []
        for name, args in ops.calls:
            calls.append((name, address))
            address += len(args)
        self.calls = tuple(calls)

    def resize(self, sizes: Sizes) -> None:
        """Raises ValueError when a size exceeds its limit."""
        if sizes == self._sizes:
            return
        for name, slope in self._slopes.items():
            size = getattr(sizes, name)
            if size > getattr(self.limits, name):
                raise ValueError(f"{size} {name} in a step, recorded for {getattr(self.limits, name)} at most")
            if size != getattr(self._sizes, name):
                self._words[slope.at] = slope.constant + slope.slope * size
        self._sizes = sizes


def record(ops: NativeOps, function: Callable[[RecordingOps, Sizes], T], limits: Sizes) -> Recording:
    """Record what `function` does with the ops it is given, for steps of up to `limits`.

    The function is called once per size and twice more; no operation runs. Raises NotCapturable.
    """
    recorder = RecordingOps(ops.context)
    with recorder.views_only:
        outputs = function(recorder, limits)
        first, cuts = recorder.calls, recorder.cuts

        def again(sizes: Sizes) -> NDArray[np.int64]:
            recorder.rewind()
            function(recorder, sizes)
            if _outline(recorder.calls) != _outline(first) or recorder.cuts != cuts:
                raise NotCapturable(f"it does not do the same operations for {sizes}")
            return _words(recorder.calls)

        words = _words(first)
        slopes = {}
        predicted = words.copy()
        few = Sizes(*(min(2, getattr(limits, size.name)) for size in fields(Sizes)))
        for size in fields(Sizes):
            most = getattr(limits, size.name)
            if most > 1:
                fewer = most // 2
                slope = _find_slope(words, again(replace(limits, **{size.name: fewer})), most, fewer, size.name)
                if slope.at.size:
                    slopes[size.name] = slope
                predicted[slope.at] += slope.slope * (getattr(few, size.name) - most)
        if not np.array_equal(predicted, again(few)):
            raise NotCapturable("an operation's arguments do not rise evenly with the sizes of a step")
        again(Sizes(1, 1, 1, 1))
    recorder.calls, recorder.cuts = first, cuts
    return Recording(recorder, outputs, limits, slopes)


def _find_slope(words: NDArray[np.int64], fewer: NDArray[np.int64], most: int, least: int, name: str) -> _Slope:
    at = np.flatnonzero(words != fewer)
    slope, rest = np.divmod(words[at] - fewer[at], most - least)
    if rest.any():
        raise NotCapturable(f"an operation's arguments do not rise evenly with the number of {name}")
    return _Slope(at, words[at] - slope * most, slope)


def _outline(calls: Sequence[tuple[str, bytes]]) -> list[tuple[str, int]]:
    return [(name, len(args)) for name, args in calls]


def _words(calls: Sequence[tuple[str, bytes]]) -> NDArray[np.int64]:
    return np.frombuffer(b"".join(args for _, args in calls), dtype=np.int64).copy()


class Program:
    """A flat list of operations, run in one foreign call; `calls`: (operation, address of its arguments).

    Who holds the arguments' memory keeps it as long as the program.
    """

    def __init__(self, context: Context, calls: Sequence[tuple[str, int]]) -> None:
        self._context = context
        packed = b"".join(CALL.pack(context.operation_number(name), address) for name, address in calls)
        self._calls = np.frombuffer(packed, dtype=np.int64).copy()
        self._address = self._calls.ctypes.data
        self._count = len(calls)

    def run(self, first: int = 0, end: int | None = None) -> None:
        """Run operations first .. end - 1."""
        count = (self._count if end is None else end) - first
        check(self._context.run_program(self._address + first * CALL.size, count), "program")
