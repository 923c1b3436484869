"""An engine's parts on the CPU.

Owns: the choice of CPU kernels and of the number of threads, the order in which a model and its pages are made.
Does not know: requests, other devices.
Invariants: blocking code, called in a worker thread; nothing is downgraded without a line in the report.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from aengine.config import EngineConfig, usable_home
from aengine.engine.ledger import Ledger, Made, Touch, served_names
from aengine.engine.page_groups import kv_dtype, plan_pages, table_columns
from aengine.engine.sizing import free_bytes
from aengine.errors import ConfigError
from aengine.models.loader import ModelFiles, load_config, load_model
from aengine.runner.protocol import Runner
from aengine.runner.step import StreamRunner
from aengine.runner.stream import ThreadStream

if TYPE_CHECKING:
    from aengine.kernels.ops import Model, Ops
    from aengine.memory.arena import Arena


DRAFT_TOKENS = 12  # native kernels give a row the same bits whatever runs beside it, so drafts change no token
STEP_MS = 100.0  # at full speed a long prompt would hold everybody's next token for seconds


def make_cpu(config: EngineConfig, files: ModelFiles, ledger: Ledger) -> Made:
    import torch

    with ledger.phase("import kernels"):
        from aengine.engine.weights import model_bytes
        from aengine.kernels.ops import state_specs
        from aengine.memory.arena import Arena
        from aengine.runner.captured_step import CapturedExecutor
        from aengine.runner.executor import make_executor

    ops, model = load_for_cpu(config, files, ledger)
    if config.cache.kv_dtype == "fp8" and ops.name != "reference":
        raise ConfigError(
            f"kv_dtype fp8 is not for {ops.name} kernels; on the CPU int8 takes about as many bytes (kernels reference "
            "can, at a fraction of the speed)",
            param="kv_dtype",
        )
    torch_threads, dtype = torch.get_num_threads(), model.dtype
    ledger.sizes.append(("weights", model_bytes(model)))
    name = str(dtype).removeprefix("torch.")
    with ledger.phase("KV pages"):
        pages, context = plan_pages(config, files, model, free_bytes())
        arena = Arena(pages)
    ledger.sizes.append(("KV pages", pages.arena_bytes))
    ledger.pages += pages.describe().splitlines()
    kv = kv_dtype(config, model)
    ledger.lines.append(f"context {context} tokens; {ops.name} kernels; {name}; KV {kv}")

    if config.device.compile:
        from aengine.runner.compiled import compile_forward

        with ledger.phase("compile"):
            ledger.lines.append(compile_forward(model, ops, torch.device("cpu")))

    with ledger.phase("capture"):
        executor, line = make_executor(
            model,
            ops,
            arena.layer_kv([(spec.group, spec.layer) for spec in model.attention]),
            arena.layer_states([(spec.group, spec.layer) for spec in state_specs(model)]),
            tuple(table_columns(group.spec, context) for group in pages.groups),
            slots=config.scheduler.max_num_seqs,
            step_tokens=config.scheduler.max_batched_tokens,
            context=context,
            zero=arena.zero,
            move=arena.move,
            capture=config.device.capture,
        )
    ledger.lines.append(line)

    def make_runner(loop: asyncio.AbstractEventLoop) -> Runner:
        # A captured step is in one foreign call after some 0.2 ms; others hold the interpreter again and again.
        hand_over = isinstance(executor, CapturedExecutor)
        stream = ThreadStream(initialise=lambda: torch.set_num_threads(torch_threads), hand_over=hand_over)
        return StreamRunner(stream, executor, loop)

    vision = load_config(files).vision
    names = served_names(config, files)
    drafts = 0 if ops.name == "reference" else DRAFT_TOKENS
    return Made(
        names,
        pages,
        context,
        model.vocab_size,
        name,
        make_runner,
        vision,
        step_ms=STEP_MS,
        draft_tokens=drafts,
        touch=_touching(ops, arena),
    )


def _touching(ops: Ops, arena: Arena) -> Touch | None:
    """None: these kernels cannot."""
    from aengine.kernels.native import NativeOps

    if not isinstance(ops, NativeOps):
        return None
    return lambda start, stop: ops.touch(arena.buffer[start:stop])


def load_for_cpu(config: EngineConfig, files: ModelFiles, ledger: Ledger) -> tuple[Ops, Model]:
    """Kernels and weights as `config` asks for them; sets the number of torch's own threads."""
    import torch

    from aengine.engine.weights import dtype_of, hold_of

    threads = config.device.threads or available_cores()
    with ledger.phase("kernels"):
        ops, torch_threads = _ops(config, threads, ledger)
    torch.set_num_threads(torch_threads)
    with ledger.phase("weights"):
        hold, dtype = hold_of(config, ops), dtype_of(config)
        return ops, load_model(files, ops, dtype, ledger.progress, hold=hold, tell=ledger.lines.append)


def available_cores() -> int:
    """Cores this process may use (its affinity mask, where the system has one)."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def describe_kernels(config: EngineConfig) -> str:
    """The kernels that steps on the CPU would use, as far as it can be told without compiling them.

    Raises ConfigError when `cpu_isa` names an instruction set that the processor lacks.
    """
    from aengine.kernels.native import lack_of, machine_isas

    if config.device.kernels == "reference":
        return "plain torch"
    isa = config.device.cpu_isa
    if isa == "auto":
        return f"native, {machine_isas()[0]}"
    if (lack := lack_of(isa)) is not None:
        raise ConfigError(f"cpu_isa is set to {isa}, but: {lack}", param="cpu_isa")
    return f"native, {isa} (cpu_isa; the best here is {machine_isas()[0]})"


def _compiling(ledger: Ledger) -> None:
    if ledger.progress is not None:
        ledger.progress("compile kernels, once", 0, 0)


def _ops(config: EngineConfig, threads: int, ledger: Ledger) -> tuple[Ops, int]:
    """(kernels, threads for torch's own operators).

    Native kernels have a thread pool of their own; torch then gets one thread, because its OpenMP pool spins without
    bound and takes the cores from the kernels and the event loop (steps of 3 ms became 106 ms).
    """
    from aengine.kernels.native import Unavailable, load_native_ops
    from aengine.kernels.reference import ReferenceOps

    if config.device.kernels == "reference":
        return ReferenceOps(), threads
    if config.device.compile:
        ledger.lines.append("compile is on: plain torch takes the place of native kernels, whose steps are faster")
        return ReferenceOps(), threads
    isa = None if config.device.cpu_isa == "auto" else config.device.cpu_isa
    native = load_native_ops(usable_home() / "native", threads, isa=isa, on_compile=lambda: _compiling(ledger))
    if not isinstance(native, Unavailable):
        return native, 1
    if isa is not None:
        raise ConfigError(f"cpu_isa is set to {isa}, but: {native.reason}", param="cpu_isa")
    if config.device.kernels == "native":
        raise ConfigError(f"kernels are set to native, but: {native.reason}", param="kernels")
    ledger.lines.append(f"no native kernels ({native.reason}): plain torch serves, at a fraction of the speed")
    return ReferenceOps(), threads
