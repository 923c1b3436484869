"""Compile every kernel for NVIDIA devices on a machine that has none, as the launches of real steps would.

Owns: launches caught before they run, and what the compiler says of each: registers, spills, shared memory.
Does not know: how launches are sized; they come from the backend itself.
Invariants: a program; fails where a kernel does not compile, where attention or a product spills registers, and where
a program wants more shared memory than a core has.

    python -m tests.kernels.triton.compiled
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from aengine.kernels.ops import (
    AttentionSpec,
    CrossBatch,
    CrossItem,
    CrossSpan,
    Experts,
    LayerKV,
    LayerState,
    Linear,
    RopeTable,
    StatePart,
    StateSpec,
    StepBatch,
)
from aengine.kernels.quantised import Quantised
from aengine.kernels.triton import TritonOps, sampling
from aengine.kernels.triton.relay import fill_ids

CORES = {80: 163, 90: 227, 100: 227}  # compute capability, rising -> KiB of shared memory one program may have
FP8_CAPABILITY = 89
NO_SPILLS = ("prefill_kernel", "decode_kernel", "merge_kernel", "packed_linear_kernel", "grouped_linear_kernel")
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64", torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
}  # fmt: skip
BF16, I32 = torch.bfloat16, torch.int32


@dataclass(frozen=True)
class Launch:
    """What a launch is compiled for. Equal ones are one kernel."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]

    def label(self) -> str:
        names = ("D", "BM", "BN", "BITS", "GROUP", "WINDOW", "CROSS", "DIRECT")
        return " ".join(f"{name}={value}" for name, value in self.constants if name in names)


def caught(steps: Callable[[], None]) -> list[Launch]:
    """Run `steps` with every launch caught instead of run."""
    found: dict[Launch, None] = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        assert all(0 < size < 2**31 for size in grid), (self, grid)
        found[describe(self, args, kwargs)] = None

    original, JITFunction.run = JITFunction.run, run
    try:
        steps()
    finally:
        JITFunction.run = original
    return list(found)


def describe(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    """As Triton specialises: None and (unless told not to) 1 are constants, multiples of 16 are known to be so."""
    values = dict(zip(kernel.arg_names, args, strict=False))
    values |= {name: kwargs.pop(name) for name in kernel.arg_names if name in kwargs}
    assert list(values) == list(kernel.arg_names), f"{kernel} lacks {set(kernel.arg_names) - set(values)}"
    signature, constants, aligned = [], [], []
    for index, (parameter, (name, value)) in enumerate(zip(kernel.params, values.items(), strict=True)):
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and type(value) is int and value == 1):
            signature.append((name, "constexpr"))
            constants.append((name, value))
        elif isinstance(value, torch.Tensor):
            signature.append((name, "*" + TYPES[value.dtype]))
            aligned.append(index)
        else:
            signature.append((name, "fp32" if isinstance(value, float) else "i32" if value < 2**31 else "i64"))
            if special and isinstance(value, int) and value % 16 == 0:
                aligned.append(index)
    return Launch(kernel, tuple(signature), tuple(constants), tuple(aligned), tuple(sorted(kwargs.items())))


# ---- steps as models take them


def batch_of(counts: tuple[int, ...], context: int, kv: LayerKV | None = None, **more: Any) -> StepBatch:
    tokens, rows = sum(counts), len(counts)
    whole = torch.zeros(tokens, dtype=I32)
    return StepBatch(
        ids=whole, positions=whole, row_offsets=torch.zeros(rows + 1, dtype=I32), context=torch.zeros(rows, dtype=I32),
        tables=(torch.zeros((rows, 1024), dtype=I32),), kv=(kv,) if kv else (), max_context=context,
        host_counts=counts, host_starts=(0,) * rows, **more,
    )  # fmt: skip


def attend(ops: TritonOps, heads: int, kv_heads: int, dim: int, *, pages_of: torch.dtype = BF16, **kind: Any) -> None:
    spec, int8 = AttentionSpec(0, 0, heads, kv_heads, dim, dim**-0.5, **kind), pages_of is torch.int8
    pages, angles = torch.empty((2, 16, kv_heads, dim), dtype=pages_of), torch.empty((8192, dim // 2))
    scales = (torch.empty((2, 16, kv_heads)),) * 2 if int8 else (None, None)
    batch = batch_of((1, 300, 1), 500 if int8 else 8192, LayerKV(pages, pages, *scales))
    q, k = torch.empty((302, heads, dim), dtype=BF16), torch.empty((302, kv_heads, dim), dtype=BF16)
    sinks = torch.empty(heads) if kind.get("window") == 128 else None
    ops.attention(q, k, k, spec, batch, sinks, None if kind else RopeTable(angles, angles))


def attention_steps(ops: TritonOps) -> None:
    attend(ops, 32, 8, 128)
    attend(ops, 8, 4, 256, window=512, softcap=50.0)
    attend(ops, 64, 8, 64, window=128)
    attend(ops, 32, 8, 128, pages_of=torch.int8)
    attend(ops, 32, 8, 128, pages_of=torch.float8_e4m3fn)
    spec = AttentionSpec(0, 0, 32, 8, 128, 0.1, cross=True)
    pages = torch.empty((2, 16, 8, 128), dtype=BF16)
    item = CrossItem(torch.zeros(101, dtype=torch.int64), 1601)
    cross = CrossBatch(torch.zeros(80, dtype=torch.int64), (CrossSpan(0, 1, (item,)), CrossSpan(1, 79, (item, item))))
    q = torch.empty((80, 32, 128), dtype=BF16)
    ops.cross_attention(q, spec, batch_of((80,), 80, LayerKV(pages, pages), cross=cross))


def quantised(out: int, size: int, group: int, bits: int) -> Quantised:
    codes = torch.zeros((out, size), dtype=torch.uint8 if bits == 4 else torch.int8)
    scale = torch.zeros((out, size // group))
    return Quantised(codes, scale, scale if bits == 4 else None, group, bits)


def linear_steps(ops: TritonOps) -> None:
    shape = torch.empty((256, 512), dtype=BF16, device="meta")
    for group, bits in ((32, 4), (128, 4), (512, 8)):
        weight = ops.prepare(Linear(shape, None, (quantised(256, 512, group, bits),)))
        for rows in (1, 200):
            ops.linear(torch.empty((rows, 512), dtype=BF16), weight)
    ops.embed(weight, torch.zeros(4, dtype=I32))
    for bits in (0, 4):
        parts = [(quantised(256, 128, 32, bits),) if bits else () for _ in range(4)]
        narrow = [(quantised(128, 128, 32, bits),) if bits else () for _ in range(4)]
        plain = tuple(ops.prepare(Linear(torch.zeros((256, 128), dtype=BF16), None, part)) for part in parts)
        down = tuple(ops.prepare(Linear(torch.zeros((128, 128), dtype=BF16), None, part)) for part in narrow)
        experts = Experts(plain, down, 2, "softmax", "output")
        for rows in (4, 64):
            ops.mixture(torch.empty((rows, 128), dtype=BF16), torch.zeros((rows, 4)), experts)


def row_steps(ops: TritonOps) -> None:
    x, positions = torch.empty((4, 4096), dtype=BF16), torch.zeros(4, dtype=I32)
    weight = torch.empty(4096, dtype=BF16)
    ops.rms_norm(x, weight, 1e-5)
    ops.add_rms_norm(x, x, weight, 1e-5)
    ops.rms_norm(x.view(4, 32, 128), weight[:128], 1e-5)
    ops.rope(x.view(4, 32, 128), positions, RopeTable(torch.empty(64, 64), torch.empty(64, 64)))
    ops.silu_mul(x)
    ops.gelu_tanh_mul(x)
    fill_ids(positions, positions, positions, 1000)
    spec = StateSpec(0, 0, (StatePart("inputs", (2, 4096), BF16),))
    state = LayerState((torch.empty((3, 2, 4096), dtype=BF16),))
    ops.short_conv(x, torch.empty(3, 4096), None, spec, batch_of((1, 3), 9, states=(state,)))


def sampling_steps(_: TritonOps) -> None:
    slots, at, size = torch.zeros(2, dtype=I32), torch.zeros(2, dtype=torch.int64), (2, 8)
    parameters = sampling.slot_parameters(2, torch.device("cpu"))
    ids = torch.zeros(size, dtype=I32)
    rules = sampling.SlotRules(
        torch.zeros((2, 4000), dtype=I32), ids, torch.zeros(size), torch.zeros((*size, 3), dtype=I32), ids,
        torch.zeros(2, 3), torch.zeros((2, 100), dtype=I32), slots,
    )  # fmt: skip
    sampling.sample(torch.empty((2, 128000), dtype=BF16), slots, at, parameters, rules, slots)
    sampling.logprobs(torch.empty((2, 128000)), slots, 20)


# ---- the compiler


def compiled(launch: Launch, capability: int) -> tuple[int, int, int]:
    """-> (registers, octets spilled, octets of shared memory) of a program on a device."""
    attributes = {(index,): [["tt.divisibility", 16]] for index in launch.aligned}
    source = ASTSource(launch.kernel, dict(launch.signature), dict(launch.constants), attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(launch.options))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        told = subprocess.run([TOOL, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", told.stdout)
    assert found, told.stdout
    return int(found[1]), int(found[2]), int(made.metadata.shared)


def main() -> int:
    ops, faults, count = TritonOps(torch.device("cpu")), [], 0
    started = time.process_time()
    for steps in (attention_steps, linear_steps, row_steps, sampling_steps):
        for launch in caught(lambda steps=steps: steps(ops)):
            name = launch.kernel.__name__
            line = f"{name:22} {launch.label():58}"
            fp8 = any(kind == "*fp8e4nv" for _, kind in launch.signature)
            capable = [capability for capability in CORES if capability >= FP8_CAPABILITY or not fp8]
            # Without products of matrices the devices' programs are alike, and the first has least shared memory.
            for capability in capable if name in NO_SPILLS else capable[:1]:
                most = CORES[capability]
                registers, spilled, shared = compiled(launch, capability)
                count += 1
                line += f" | sm_{capability:<3} {registers:3} regs {spilled:4} spilled {shared / 1024:5.1f} KiB"
                if spilled and name in NO_SPILLS:
                    faults.append(f"{name} {launch.label()} spills {spilled} octets on sm_{capability}")
                if shared > most * 1024:
                    faults.append(f"{name} {launch.label()} wants {shared} octets of shared memory on sm_{capability}")
            print(line, flush=True)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = time.process_time() - started + children.ru_utime + children.ru_stime
    print(f"{count} programs compiled in {seconds:.0f} s of processor time")
    print(*faults, sep="\n", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
