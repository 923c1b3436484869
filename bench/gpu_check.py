"""What a CUDA device does with the engine's steps: right tokens first, then times against the device's own limits.

    python bench/gpu_check.py --out gpu.json          8 minutes at most on an H100 or H200
    python bench/gpu_check.py --device cpu --tiny     the script itself, without a GPU

Models are Llama-shaped with random weights made on the device. Every backend, depth and form of step (eager, graphs)
generates tokens by the real scheduler, cache and runner; plain torch then computes the whole sequences at once, and a
token whose logit there is far below the best one is wrong: the script fails. Times follow for the best backend.

Owns: the models, the check, what is timed.
Does not know: servers, checkpoints.
Invariants: device times come from events, host times from one clock; a limit is measured in the same run.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import Report
from torch import Tensor

from aengine.engine.page_groups import kv_groups, table_columns
from aengine.errors import ConfigError
from aengine.kernels.cuda_ops import cuda_ops, importable
from aengine.kernels.ops import AttentionSpec, LayerKV, Ops, StepBatch
from aengine.kernels.reference import ReferenceOps
from aengine.memory import Pool, plan
from aengine.memory.arena import Arena
from aengine.models.config import ModelConfig, RopeConfig
from aengine.models.llama import LlamaModel
from aengine.models.placing import place
from aengine.prefix_cache import PrefixCache
from aengine.runner.compiled import compile_forward
from aengine.runner.cuda.api import TorchCuda
from aengine.runner.cuda.fused import SAMPLING, FusedChooser
from aengine.runner.cuda.step import CudaExecutor
from aengine.runner.cuda.stream import CudaStream
from aengine.runner.upload import plain_upload
from aengine.scheduler import Scheduler
from aengine.types import Request, SamplingParams, SlotSetup, StepPlan, StepResult, TableDelta, TokenRules

PAGE = 16
# A token is right if its logit by the reference lies within this many standard deviations of the best one. A token
# from a wrong page lies about four below; bf16 sums in another order move logits by about a hundredth.
TOLERANCE = 0.25
PREFILLS = 4  # timed, of which the best counts
GREEDY = SamplingParams(temperature=0.0, max_tokens=1)


@dataclass(frozen=True)
class Shape:
    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    batches: tuple[int, ...]
    context: int  # of decode rows that are timed
    prefill: tuple[int, ...]
    long: int  # context of the two layouts

    @property
    def kv_token_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * 2


BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SHAPES = {
    "1b": Shape("1b", 2048, 16, 32, 8, 64, 8192, 128_256, BATCHES, 512, (40, 256, 512, 2048, 8192), 32_768),
    "8b": Shape("8b", 4096, 32, 32, 8, 128, 14_336, 128_256, (1, 8, 64, 256, 512), 512, (40, 512, 2048, 8192), 32_768),
    "tiny": Shape("tiny", 64, 2, 4, 2, 16, 128, 256, (1, 3), 40, (24,), 64),
}


class RandomWeights:
    """A checkpoint of random numbers, made where they are used. Implements `Checkpoint`."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self._generator = torch.Generator(device).manual_seed(7)

    def names(self) -> frozenset[str]:
        return frozenset()

    def shape(self, name: str) -> tuple[int, ...]:
        raise KeyError(name)

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        s = self._shape
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        rows = {"q_proj": q, "k_proj": kv, "v_proj": kv, "gate_proj": s.ffn, "up_proj": s.ffn, "lm_head": s.vocab}
        kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
        if "norm" in kind:
            return torch.ones(s.hidden, dtype=dtype, device=self._device)
        size_in = {"o_proj": q, "down_proj": s.ffn}.get(kind, s.hidden)
        size = (s.vocab if kind == "embed_tokens" else rows.get(kind, s.hidden), size_in)
        made = torch.empty(size, dtype=dtype, device=self._device).normal_(generator=self._generator)
        return made if kind == "embed_tokens" else made.mul_(size_in**-0.5)

    def quantised(self, name: str) -> None:
        return None

    def fitted(self, name: str, weight: Tensor) -> None:
        return None


def make_model(shape: Shape, device: torch.device, context: int) -> LlamaModel:
    config = ModelConfig(
        family="llama", architecture="LlamaForCausalLM", vocab_size=shape.vocab, hidden=shape.hidden,
        layers=shape.layers, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim, ffn=shape.ffn,
        norm_eps=1e-5, rope=RopeConfig(500_000.0, shape.head_dim), tied_embeddings=False, max_positions=context,
        windows=(0,) * shape.layers, attention_scale=shape.head_dim**-0.5,
    )  # fmt: skip
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = LlamaModel.load(config, RandomWeights(shape, device), ReferenceOps(), dtype)
    place(model, device)
    return model


# ---- a host without a device, for --device cpu


class HostApi:
    """`DeviceApi` whose work is done when it is enqueued."""

    device = torch.device("cpu")

    def stream(self, name: str) -> HostStream:
        return HostStream()

    @contextmanager
    def on(self, stream: object) -> Iterator[None]:
        yield

    def pinned(self, n_bytes: int) -> Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8)

    def capture(self, stream: object, work: Callable[[], Any]) -> tuple[Any, Any]:
        raise NotImplementedError("plain torch is never captured")

    def settle(self) -> None:
        pass

    def memory(self) -> tuple[int, int]:
        return 2**32, 2**32


class HostStream:
    def record(self, *, timed: bool = False) -> HostEvent:
        return HostEvent(time.perf_counter())

    def wait(self, event: object) -> None:
        pass


@dataclass
class HostEvent:
    at_s: float

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True

    def seconds_since(self, earlier: HostEvent) -> float:
        return self.at_s - earlier.at_s


# ---- an engine without its loop


class Bench:
    """Pages, an executor and a scheduler over a model. `launch` returns a function that waits for the result."""

    def __init__(
        self, api: Any, model: LlamaModel, ops: Ops, *, slots: int, context: int, pages: int, graphs: bool,
        cut_tokens: int = 0, kv_dtype: torch.dtype | None = None,
    ):  # fmt: skip
        """`graphs`: decode steps are, and other steps of up to `cut_tokens` tokens are in pieces."""
        name = str(kv_dtype or model.dtype).removeprefix("torch.")
        groups = kv_groups(model.attention, name, PAGE)
        self.plan = plan(groups, (pages + 8) * groups[0].payload_bytes)
        self.arena = Arena(self.plan, api.device)
        self.stream = CudaStream(api)
        self.slots, self.context = slots, context
        columns = tuple(table_columns(group.spec, context) for group in self.plan.groups)
        kv = self.arena.layer_kv([(spec.group, spec.layer) for spec in model.attention])
        fused = api.device.type == "cuda" and ops.name != "reference" and not importable(SAMPLING)
        self.executor = CudaExecutor(
            self.stream, model, ops, kv, columns, slots, context, zero=self.arena.zero, move=self.arena.move,
            chooser=FusedChooser if fused else None,
        )  # fmt: skip
        self.line = self.executor.capture(tokens=cut_tokens) if graphs else "eager"
        self.step = 0

    def launch(self, step: StepPlan) -> Callable[[], StepResult]:
        staged = self.executor.stage(step)
        made: list[Any] = []
        self.stream.launch(lambda: made.append(self.executor.run(staged)))
        point = self.stream.record()

        def result() -> StepResult:
            point.wait()
            found: StepResult = made[0].collect()
            return found

        return result

    def generate(self, prompts: list[list[int]], counts: list[int], depth: int, budget: int) -> list[list[int]]:
        scheduler = Scheduler(
            PrefixCache(Pool(self.plan)), max_seqs=self.slots, budget_tokens=budget, max_tokens=self.context
        )
        for handle, (prompt, count) in enumerate(zip(prompts, counts, strict=True), 1):
            ids, params = np.array(prompt, np.int32), replace_tokens(count)
            scheduler.submit(
                Request(handle, str(handle), ids, params, TokenRules(), max_total_tokens=len(ids) + count, seed=0)
            )
        tokens: dict[int, list[int]] = {handle: [] for handle in range(1, len(prompts) + 1)}
        in_flight: deque[Callable[[], StepResult]] = deque()

        def take(outputs: Any) -> None:
            for handle, token in zip(outputs.handles.tolist(), outputs.tokens.tolist(), strict=True):
                tokens[handle].append(token)

        while scheduler.has_unfinished or in_flight:
            step = scheduler.plan()
            if step is not None:
                in_flight.append(self.launch(step))
            take(scheduler.flush())
            if len(in_flight) > depth or (in_flight and step is None):
                result = in_flight.popleft()()
                if result.failed:
                    raise RuntimeError(f"rows failed: {result.failed}")
                take(scheduler.commit(result))
        return [tokens[handle] for handle in sorted(tokens)]

    def decode_plan(self, rows: int, start: int, first: bool) -> StepPlan:
        """All of `rows` slots at position `start`; the first of a run brings tables and an id for each."""
        self.step += 1
        slots = np.arange(rows, dtype=np.int32)
        tables: tuple[TableDelta, ...] = ()
        setups: tuple[SlotSetup, ...] = ()
        if first:
            each = -(-self.context // PAGE)
            most = self.plan.groups[0].slots * self.plan.large_pages - 1
            pages = (1 + np.arange(rows * each, dtype=np.int64) % most).astype(np.int32)
            where = np.repeat(slots.astype(np.int64), each), np.tile(np.arange(each, dtype=np.int64), rows)
            tables = (TableDelta(0, *where, pages),)
            none = np.zeros(0, np.int32)
            setups = tuple(SlotSetup(slot, slot + 1, 1, GREEDY, TokenRules(), 0, none) for slot in range(rows))
        ones = np.ones(rows, np.int32)
        ids = slots % 100 if first else np.zeros(0, np.int32)
        return StepPlan(
            step=self.step, slots=slots, handles=slots.astype(np.int64) + 1, starts=ones * start, counts=ones,
            samples=ones, relay=np.full(rows, not first), ids=ids, tables=tables, setups=setups,
        )  # fmt: skip


def replace_tokens(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


# ---- tokens


def reference_logits(
    model: LlamaModel, ids: list[int], device: torch.device, kv_dtype: torch.dtype | None = None
) -> Tensor:
    """fp32 [len(ids), V] of one forward over the whole sequence in plain torch, with pages of `kv_dtype`."""
    pages, count, spec = -(-len(ids) // PAGE) + 1, len(ids), model.attention[0]
    shape = (pages, PAGE, spec.kv_heads, spec.head_dim)
    kv = tuple(
        LayerKV(*(torch.zeros(shape, dtype=kv_dtype or model.dtype, device=device) for _ in range(2)))
        for _ in model.attention
    )
    batch = StepBatch(
        ids=torch.tensor(ids, dtype=torch.int32, device=device),
        positions=torch.arange(count, dtype=torch.int32, device=device),
        row_offsets=torch.tensor([0, count], dtype=torch.int32, device=device),
        context=torch.tensor([count], dtype=torch.int32, device=device),
        tables=(torch.arange(1, pages, dtype=torch.int32, device=device).unsqueeze(0),),
        kv=kv, max_context=count, host_counts=(count,), host_starts=(0,),
    )  # fmt: skip
    ops = ReferenceOps()
    with torch.inference_mode():
        return model.logits(ops, model.forward(ops, batch))


def wrong_tokens(
    model: LlamaModel, prompt: list[int], tokens: list[int], device: torch.device, kv_dtype: torch.dtype | None = None
) -> list[str]:
    logits = reference_logits(model, prompt + tokens[:-1], device, kv_dtype)[len(prompt) - 1 :]
    own = logits.gather(1, torch.tensor(tokens, device=device).unsqueeze(1)).squeeze(1)
    short = ((logits.amax(-1) - own) / logits.std(-1)).tolist()
    return [f"token {at} of {len(tokens)}: {gap:.2f} deviations" for at, gap in enumerate(short) if gap > TOLERANCE]


def check_tokens(
    api: Any, model: LlamaModel, shape: Shape, backends: dict[str, Ops], small: bool, compiled: bool
) -> dict[str, Any]:
    """Every backend, depth and form against the reference -> figures; `wrong` counts tokens. `compiled`: the best
    backend also by torch.compile. Pages of fp8 are compared with a reference that has them too."""
    rng = np.random.default_rng(1)
    lengths, counts = ([5, 17, 30], [6, 4, 9]) if small else ([5, 17, 100, 333, 64, 900], [24, 16, 32, 8, 32, 12])
    prompts = [rng.integers(0, shape.vocab, length).tolist() for length in lengths]
    context, pages = (64, 24) if small else (1024, 256)
    budgets = (48, 20) if small else (256, 100, 37)  # cut otherwise, and filled up to other pieces
    figures: dict[str, Any] = {"wrong": 0, "runs": 0, "messages": [], "failed": {}, "waits": {}, "prompt_waits": {}}
    seen: dict[str, list[list[int]]] = {}

    def run(name: str, ops: Ops, graphs: bool, *, of: LlamaModel = model, kv_dtype: torch.dtype | None = None) -> None:
        whole, plain = budgets[0], kv_dtype is None
        bench = Bench(
            api, of, ops, slots=8, context=context, pages=pages, graphs=graphs,
            cut_tokens=whole if of is model else 0, kv_dtype=kv_dtype,
        )  # fmt: skip
        ways = [(0, whole), (1, whole)] if plain else [(1, whole)]
        if plain and of is model:
            ways += [(1, budget) for budget in budgets[1:]]
        for depth, budget in ways:
            got = bench.generate(prompts, counts, depth, budget)
            label = f"{name} depth {depth} steps of {budget} {form(graphs)}"
            seen[label] = got
            figures["runs"] += 1
            for prompt, tokens in zip(prompts, got, strict=True):
                bad = wrong_tokens(model, prompt, tokens, api.device, kv_dtype)
                figures["wrong"] += len(bad)
                figures["messages"] += [f"{label}, prompt of {len(prompt)}: {text}" for text in bad[:2]]
        if name != "reference":
            figures["waits"][f"{name} {form(graphs)}"] = waits(bench)
            figures["prompt_waits"][f"{name} {form(graphs)}"] = waits(bench, chunk=20)

    def attempt(name: str, graphs: bool, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # the others are still worth knowing about
            figures["failed"][f"{name} {form(graphs)}"] = f"{type(error).__name__}: {error}"[:500]
            print(f"FAILED {name} {form(graphs)}")
            traceback.print_exc()

    reads_fp8 = small or torch.cuda.get_device_capability() >= (8, 9)
    for name, ops in list(backends.items()):
        able = capturable(ops)
        for graphs in (False, True) if able else (False,):
            attempt(name, graphs, partial(run, name, ops, graphs))
        if reads_fp8:
            attempt(f"{name}-fp8-kv", able, partial(run, f"{name}-fp8-kv", ops, able, kv_dtype=torch.float8_e4m3fn))
        if any(label.startswith(f"{name} ") for label in figures["failed"]):
            del backends[name]
    if compiled and backends:
        name, ops = list(backends.items())[-1]
        attempt(f"{name}-compiled", capturable(ops), lambda: run(
            f"{name}-compiled", ops, capturable(ops), of=compiled_copy(model, ops, api.device, small)
        ))  # fmt: skip
    first = next(iter(seen.values()), [])
    figures["identical_runs"] = sum(got == first for got in seen.values())
    print(
        f"{shape.name}: {figures['runs']} runs, {figures['wrong']} wrong tokens, {figures['identical_runs']} identical"
    )
    for message in figures["messages"][:20]:
        print("  wrong:", message)
    return figures


def compiled_copy(model: LlamaModel, ops: Ops, device: torch.device, small: bool) -> LlamaModel:
    """The same weights under a forward of its own. A tiny model checks the calls, not the compiler."""
    made, began = copy.copy(model), time.monotonic()
    print(compile_forward(made, ops, device, backend="eager" if small else "inductor"), flush=True)
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    return made


def check_fp8_product(api: Any, tokens: int, size: int) -> dict[str, float]:
    """Products with fp8 weights: off by how much of the result's size, and device time against bf16."""
    from aengine.kernels.triton import fp8

    x = torch.randn(tokens, size, device=api.device).bfloat16()
    dense = torch.randn(size, size, device=api.device) * size**-0.5
    weight = fp8.Fp8Weight(*fp8.quantise_rows(dense), None)
    if not fp8.multiplies(weight):
        return {}
    want, plain = x.float() @ weight.dequantise(torch.float32).t(), dense.bfloat16()
    off = ((fp8.linear(x, weight, x.dtype).float() - want).norm() / want.norm()).item()
    assert off < 0.06, f"fp8 products are off by {off:.3f} of their size"
    figures = {
        "off": off,
        "fp8_ms": timed_s(api, lambda: fp8.linear(x, weight, x.dtype), 10) * 1e3,
        "bf16_ms": timed_s(api, lambda: x @ plain.t(), 10) * 1e3,
    }
    print(f"fp8 products of {tokens} x {size}: {figures}", flush=True)
    return figures


def check_flashinfer_sampling(api: Any, vocab: int) -> dict[str, float]:
    """Rows that one token dominates get it, by either kernel; device time of 256 plain rows against the engine's."""
    from aengine.runner.cuda.flash_sampling import FlashInferChooser

    rows, upload = 256, plain_upload(api.device)
    own = FusedChooser(rows, api.device, upload)
    chooser = FlashInferChooser(rows, own, upload)
    best = torch.arange(rows, device=api.device) * 7 % vocab
    logits = torch.zeros(rows, vocab, device=api.device).index_put_((torch.arange(rows, device=api.device), best),
                                                                    torch.tensor(60.0, device=api.device))  # fmt: skip
    slots, positions = np.arange(rows, dtype=np.int32), np.arange(rows)
    figures = {}
    for kind, params in {"plain": SamplingParams(), "filtered": SamplingParams(top_k=50, top_p=0.9)}.items():
        for slot in range(rows):
            chooser.setup(SlotSetup(slot, slot + 1, 1, params, TokenRules(), slot, np.zeros(0, np.int32)))
        tokens, faults = chooser.choose(logits.clone(), slots, positions)
        assert torch.equal(tokens, best), f"{kind}: {int((tokens != best).sum())} of {rows} rows drew another token"
        assert not faults.any()
        for name, one in (("flashinfer", chooser), ("own", own)):
            figures[f"{kind}_{name}_ms"] = timed_s(api, partial(one.choose, logits, slots, positions), 10) * 1e3
    print(f"sampling of {rows} rows: {figures}", flush=True)
    return figures


def release() -> None:
    """Memory of what was deleted goes back to the device: graphs and pages of a large model fit once."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def form(graphs: bool) -> str:
    return "graphs" if graphs else "eager"


def capturable(ops: Ops) -> bool:
    return bool(getattr(ops, "capturable", ops.name == "triton"))


def waits(bench: Bench, chunk: int = 0) -> str:
    """What torch says of the first call in a steady decode step, or in one that computes a chunk of a prompt, that
    makes the host wait; "" for none."""
    if not torch.cuda.is_available():
        return ""
    bench.launch(bench.decode_plan(4, 40, True))()
    for at in (41, 42):
        step = bench.decode_plan(1 if chunk else 4, at, False)
        if chunk:
            step = replace_rows(step, chunk, np.arange(chunk, dtype=np.int32))
        torch.cuda.set_sync_debug_mode("error" if at == 42 else "default")
        try:
            result = bench.launch(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        try:
            result()
        except RuntimeError as error:
            return str(error).splitlines()[0]
    return ""


# ---- limits and times


def timed_s(api: Any, work: Callable[[], object], repeats: int) -> float:
    """Least device seconds of `work`, which is enqueued once to warm up."""
    stream, best = api.stream("timing"), float("inf")
    with api.on(stream):
        work()
        for _ in range(repeats):
            began = stream.record(timed=True)
            work()
            ended = stream.record(timed=True)
            ended.wait()
            best = min(best, ended.seconds_since(began))
    return max(best, 1e-9)


def limits(api: Any, tiny: bool) -> dict[str, float]:
    """Read bandwidth in bytes/s and bf16 matmul in FLOP/s, as this device reaches them now."""
    n_bytes, n = (2**22, 128) if tiny else (2**31, 8192)
    source = torch.ones(n_bytes // 4, device=api.device)
    dtype = torch.float32 if tiny else torch.bfloat16
    a, b = (torch.randn(n, n, device=api.device).to(dtype) for _ in range(2))
    return {
        "read_bytes_per_s": n_bytes / timed_s(api, source.sum, 5),
        "matmul_flops_per_s": 2 * n**3 / timed_s(api, lambda: a @ b, 5),
    }


def time_decode(bench: Bench, rows: int, start: int, steps: int) -> dict[str, float]:
    """Steps one after another with two in flight, as the engine runs them at depth 1."""
    result = bench.launch(bench.decode_plan(rows, start, True))
    result()
    in_flight: deque[Callable[[], StepResult]] = deque()
    device, host = [], []
    began = time.perf_counter()
    for at in range(1, steps + 1):
        step = bench.decode_plan(rows, start + at, False)
        before = time.perf_counter()
        in_flight.append(bench.launch(step))
        host.append(time.perf_counter() - before)
        if len(in_flight) > 1:
            device.append(in_flight.popleft()().device_s)
    device += [result().device_s for result in in_flight]
    wall = (time.perf_counter() - began) / steps
    busy = statistics.median(device)
    return {
        "device_ms": busy * 1e3,
        "host_ms": statistics.median(host) * 1e3,
        "achieved_ms": wall * 1e3,
        "bubbles": max(0.0, 1 - sum(device) / steps / wall),
    }


def weight_bytes(shape: Shape, element: int) -> int:
    q, kv = shape.heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim
    layer = shape.hidden * (2 * q + kv + 3 * shape.ffn)
    return element * (shape.layers * layer + shape.vocab * shape.hidden)


def time_model(
    api: Any, model: LlamaModel, shape: Shape, ops: Ops, limit: dict[str, float], steps: int
) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    context = shape.context + steps + PAGE
    most, element = max(shape.batches), model.dtype.itemsize
    pages = max(most * context, max(shape.prefill) + PAGE) // PAGE + 2
    able = capturable(ops)
    for graphs in (True, False) if able else (False,):
        bench = Bench(api, model, ops, slots=most, context=context, pages=pages, graphs=graphs)
        for rows in shape.batches if graphs or not able else shape.batches[:: max(1, len(shape.batches) // 3)]:
            told = time_decode(bench, rows, shape.context, steps)
            bytes_read = weight_bytes(shape, element) + rows * shape.context * shape.kv_token_bytes * element // 2
            told["floor_ms"] = bytes_read / limit["read_bytes_per_s"] * 1e3
            figures[f"decode_{rows}_{form(graphs)}"] = told
            print(
                f"{shape.name} decode {rows:4} rows {form(graphs)}: device {told['device_ms']:8.3f} ms, "
                f"floor {told['floor_ms']:8.3f} ({told['floor_ms'] / told['device_ms']:.0%}), "
                f"host {told['host_ms']:.3f}, "
                f"achieved {told['achieved_ms']:8.3f}, bubbles {told['bubbles']:.0%}, "
                f"{rows / told['achieved_ms'] * 1e3:,.0f} tokens/s",
                flush=True,
            )
        del bench
        release()
    figures |= time_prefill(api, model, shape, ops, limit)
    return figures


def time_prefill(api: Any, model: LlamaModel, shape: Shape, ops: Ops, limit: dict[str, float]) -> dict[str, Any]:
    """One prompt a step, one operation at a time and in pieces; `host_ms`: what enqueuing takes."""
    figures: dict[str, Any] = {}
    most = max(shape.prefill)
    for cut in (False, True) if capturable(ops) else (False,):
        began = time.monotonic()
        bench = Bench(
            api, model, ops, slots=1, context=most + PAGE, pages=most // PAGE + 4, graphs=cut, cut_tokens=most
        )  # fmt: skip
        if cut:
            figures["prefill_recording_s"] = time.monotonic() - began
            print(f"{bench.line}: {figures['prefill_recording_s']:.1f} s", flush=True)
        for tokens in shape.prefill:
            device, host = [], []
            for _ in range(PREFILLS):
                ids = (np.arange(tokens) * 31 % shape.vocab).astype(np.int32)
                step = replace_rows(bench.decode_plan(1, 0, True), tokens, ids)
                before = time.perf_counter()
                result = bench.launch(step)
                host.append(time.perf_counter() - before)
                device.append(result().device_s)
            best = max(min(device), 1e-9)
            linear = 2 * tokens * (weight_bytes(shape, 1) - shape.vocab * shape.hidden)
            attention = 2 * shape.layers * shape.heads * shape.head_dim * tokens * tokens
            ceiling = (linear + attention) / limit["matmul_flops_per_s"]
            name = f"prefill_{tokens}_{'pieces' if cut else 'eager'}"
            figures[name] = {"device_ms": best * 1e3, "host_ms": min(host) * 1e3, "ceiling_ms": ceiling * 1e3}
            print(
                f"{shape.name} {name}: device {best * 1e3:.2f} ms, ceiling {ceiling * 1e3:.2f} ({ceiling / best:.0%}), "
                f"host {min(host) * 1e3:.3f}, {tokens / best:,.0f} tokens/s",
                flush=True,
            )
        del bench
        release()
    return figures


def replace_rows(step: StepPlan, tokens: int, ids: Any) -> StepPlan:
    import msgspec

    return msgspec.structs.replace(step, counts=np.array([tokens], np.int32), relay=np.zeros(1, bool), ids=ids)


def time_layouts(api: Any, shape: Shape, ops: Ops, dtype: torch.dtype, rows: int) -> dict[str, float]:
    """Decode attention of all layers over pages that hold all layers (page-major) and over a buffer for each layer."""
    pages, device = rows * shape.long // PAGE + 1, api.device
    part = PAGE * shape.kv_heads * shape.head_dim
    layers = min(shape.layers, 8)
    buffer = torch.zeros(pages * layers * 2 * part, dtype=dtype, device=device)
    inner = (shape.kv_heads * shape.head_dim, shape.head_dim, 1)
    size = (pages, PAGE, shape.kv_heads, shape.head_dim)

    def kv(layer: int, page_major: bool) -> LayerKV:
        stride = layers * 2 * part if page_major else part
        first = layer * 2 * part if page_major else layer * 2 * pages * part
        second = first + (part if page_major else pages * part)
        return LayerKV(*(buffer.as_strided(size, (stride, *inner), at) for at in (first, second)))

    order = torch.randperm(pages - 1, device=device).int().add_(1).view(rows, -1)
    figures = {}
    q = torch.randn(rows, shape.heads, shape.head_dim, device=device).to(dtype)
    k = torch.randn(rows, shape.kv_heads, shape.head_dim, device=device).to(dtype)
    for page_major in (True, False):
        batch = StepBatch(
            ids=torch.zeros(rows, dtype=torch.int32, device=device),
            positions=torch.full((rows,), shape.long - 1, dtype=torch.int32, device=device),
            row_offsets=torch.arange(rows + 1, dtype=torch.int32, device=device),
            context=torch.full((rows,), shape.long, dtype=torch.int32, device=device),
            tables=(order,), kv=tuple(kv(layer, page_major) for layer in range(layers)), max_context=shape.long,
            host_counts=(1,) * rows, host_starts=(shape.long - 1,) * rows,
        )  # fmt: skip

        def work(batch: StepBatch = batch) -> None:
            for layer in range(layers):
                spec = AttentionSpec(layer, 0, shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5)
                ops.attention(q, k, k, spec, batch)

        with torch.inference_mode():
            seconds = timed_s(api, work, 5) / layers
        read = 2 * rows * shape.long * shape.kv_heads * shape.head_dim * dtype.itemsize
        figures["page_major_ms" if page_major else "layer_major_ms"] = seconds * 1e3
        figures["page_major_bytes_per_s" if page_major else "layer_major_bytes_per_s"] = read / seconds
    print(
        f"{shape.name} attention of {rows} rows of {shape.long}: page-major {figures['page_major_ms']:.3f} ms, "
        f"layer-major {figures['layer_major_ms']:.3f} ms a layer",
        flush=True,
    )
    return figures


def time_copies(api: Any, tiny: bool) -> dict[str, dict[str, float]]:
    figures = {}
    for n_bytes in (4096,) if tiny else (4096, 32_768, 131_072, 2**20, 2**23, 2**26):
        count = max(1, min(64, 2**26 // n_bytes))
        host = [api.pinned(n_bytes) for _ in range(count)]
        device = [torch.zeros(n_bytes, dtype=torch.uint8, device=api.device) for _ in range(count)]

        def move(to: list[Tensor], come_from: list[Tensor]) -> None:
            for target, source in zip(to, come_from, strict=True):
                target.copy_(source, non_blocking=True)

        up = timed_s(api, lambda: move(device, host), 5)  # noqa: B023  # called at once
        down = timed_s(api, lambda: move(host, device), 5)  # noqa: B023
        figures[str(n_bytes)] = {"h2d_bytes_per_s": count * n_bytes / up, "d2h_bytes_per_s": count * n_bytes / down}
        print(f"copies of {n_bytes:>10,} B: to the device {count * n_bytes / up / 1e9:.2f} GB/s, back "
              f"{count * n_bytes / down / 1e9:.2f} GB/s", flush=True)  # fmt: skip
    return figures


def time_wake(api: Any, repeats: int) -> dict[str, float]:
    """From enqueuing a tiny copy to the host knowing: asleep on the event, and asking again and again."""
    stream, memory = api.stream("wake"), torch.zeros(16, device=api.device)
    asleep, asking = [], []
    with api.on(stream):
        for _ in range(repeats):
            for times in (asleep, asking):
                time.sleep(0.0005)
                began = time.perf_counter()
                memory.add_(1)
                event = stream.record()
                if times is asleep:
                    event.wait()
                else:
                    while not event.done():
                        pass
                times.append(time.perf_counter() - began)
    figures = {"asleep_us": statistics.median(asleep) * 1e6, "asking_us": statistics.median(asking) * 1e6}
    print(f"host knows after {figures['asleep_us']:.0f} us asleep, {figures['asking_us']:.0f} us asking", flush=True)
    return figures


def backends_of(api: Any) -> dict[str, Ops]:
    found: dict[str, Ops] = {"reference": ReferenceOps()}
    if api.device.type != "cuda":
        return found
    for name in ("triton", "flashinfer"):
        try:
            found[name] = cuda_ops(name, api.device)[0]
        except (ConfigError, ImportError) as error:
            print(f"backend {name} is left out: {error}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="one tiny model: checks the script")
    parser.add_argument("--models", default="1b,8b")
    parser.add_argument("--budget-s", type=float, default=420.0, help="no further part begins after this many seconds")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device", file=sys.stderr)
        return 2
    api: Any = TorchCuda() if given.device == "cuda" else HostApi()
    names = ["tiny"] if given.tiny else given.models.split(",")
    claim = "every backend, depth and form of step gives the reference's tokens"
    config = {"device": given.device, "models": ",".join(names), "torch": torch.__version__}
    if given.device == "cuda":
        config["name"] = torch.cuda.get_device_name()
    report = Report("gpu_check", claim, config)
    began, steps = time.monotonic(), 4 if given.tiny else 30
    figures = report.figures
    figures["limits"] = limit = limits(api, given.tiny)
    print(
        f"limits: read {limit['read_bytes_per_s'] / 1e12:.3f} TB/s, matmul {limit['matmul_flops_per_s'] / 1e12:.1f} T/s"
    )
    wrong = failed = waiting = 0
    for name in names:
        shape = SHAPES[name]
        backends = backends_of(api)
        model = make_model(shape, api.device, max(shape.long, *shape.prefill) + 1024)
        api.settle()
        figures[f"{name}_tokens"] = checked = check_tokens(
            api, model, shape, backends, given.tiny, compiled=name == names[0]
        )
        wrong, failed = wrong + checked["wrong"], failed + len(checked["failed"])
        waiting += sum(bool(text) for text in checked["waits"].values())
        if not backends:
            continue
        best = list(backends)[-1]
        parts: list[tuple[str, Callable[[], Any]]] = [
            ("times", partial(time_model, api, model, shape, backends[best], limit, steps))
        ]
        for kind, ops in backends.items():
            if kind != "reference" or given.tiny:
                rows = 1 if given.tiny else 8
                parts.append((f"layouts_{kind}", partial(time_layouts, api, shape, ops, model.dtype, rows)))
        if name == names[0] and given.device == "cuda":
            parts.append(("fp8_product", partial(check_fp8_product, api, 2048, 4096)))
            if not importable("flashinfer.sampling"):
                parts.append(("flashinfer_sampling", partial(check_flashinfer_sampling, api, shape.vocab)))
        for part, work in parts:
            if time.monotonic() - began > given.budget_s:
                print(f"{name} {part}: left out, {given.budget_s:.0f} s are over")
                continue
            try:
                figures[f"{name}_{part}"] = work()
            except Exception as error:  # what follows is still worth knowing
                failed += 1
                figures[f"{name}_{part}"] = {"failed": f"{type(error).__name__}: {error}"[:500]}
                traceback.print_exc()
        model = parts = None  # its memory is for the next one
        release()
    figures["copies"], figures["wake"] = time_copies(api, given.tiny), time_wake(api, 5 if given.tiny else 200)
    figures["seconds"] = time.monotonic() - began
    report.at_most("wrong tokens", wrong, 0)
    report.at_most("backends and parts that failed", failed, 0)
    report.at_most("forms of a decode step that wait for the device", waiting, 0)
    held = report.close()
    if given.out:
        given.out.write_text(json.dumps({"config": config, "figures": figures}, indent=1) + "\n", encoding="utf-8")
    return 0 if held else 1


if __name__ == "__main__":
    raise SystemExit(main())
