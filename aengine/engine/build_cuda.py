"""An engine's parts on a CUDA device.

Owns: what is kept free for activations, the order in which kernels, weights, pages and graphs are made.
Does not know: requests, how a step runs, other devices.
Invariants: blocking code, called in a worker thread. Weights, pages and activations together stay within the share of
the device's memory that was given. What was chosen is told once, in the report.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import torch

from aengine.config import EngineConfig
from aengine.engine.ledger import Ledger, Made, served_names
from aengine.engine.page_groups import kv_dtype, plan_pages, table_columns
from aengine.engine.weights import dtype_of, hold_of, model_bytes
from aengine.errors import ConfigError
from aengine.kernels.cuda_ops import cuda_ops, importable
from aengine.kernels.ops import Model, Ops, state_specs
from aengine.memory.arena import Arena
from aengine.models.loader import ModelFiles, load_config, load_model
from aengine.runner.compiled import compile_forward
from aengine.runner.cuda.api import DeviceApi, TorchCuda
from aengine.runner.cuda.flash_sampling import FlashInferChooser
from aengine.runner.cuda.fused import SAMPLING, FusedChooser
from aengine.runner.cuda.graphs import capturable
from aengine.runner.cuda.profile import forward_peak
from aengine.runner.cuda.sampler import Chooser, MakeChooser
from aengine.runner.cuda.staging import CudaStaging
from aengine.runner.cuda.step import LOGIT_ROWS, CudaExecutor
from aengine.runner.cuda.stream import CudaStream
from aengine.runner.protocol import Runner
from aengine.runner.step import StreamRunner
from aengine.runner.upload import Upload

FP8_CAPABILITY = (8, 9)  # from which Triton and FlashInfer read e4m3
# Kernels' own workspaces, the library's handles, fragments of the allocator.
WORKSPACE_BYTES = 768 * 2**20
# Pieces of steps, as graphs, beside the memory they compute in; recording stops where they have taken it.
GRAPH_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes of the device: for steps, for pieces of steps beside them, and `left` for pages."""

    eager: int
    pieces: int
    left: int = 0


def make_cuda(config: EngineConfig, files: ModelFiles, ledger: Ledger) -> Made:
    """The parts on the first CUDA device. Raises ConfigError when it is too small for what is asked."""
    with ledger.phase("device"):
        api: DeviceApi = TorchCuda()
        ops, line = cuda_ops(config.device.attention_backend, api.device)
    ledger.lines.append(line)
    with ledger.phase("weights"):
        hold, dtype = hold_of(config, ops), dtype_of(config, torch.bfloat16)
        model = load_model(
            files, ops, dtype, ledger.progress, hold=hold, device=api.device, tell=ledger.lines.append
        )  # fmt: skip
    ledger.sizes.append(("weights", model_bytes(model)))
    if config.cache.kv_dtype == "fp8":
        _check_fp8(api, ops)
    if config.device.compile:
        with ledger.phase("compile"):
            ledger.lines.append(compile_forward(model, ops, api.device))
    name = str(dtype).removeprefix("torch.")
    with ledger.phase("KV pages"):
        steps = _steps_bytes(config, api, model, ops, ledger)
        pages, context = plan_pages(config, files, model, steps.left, 1.0)
        arena = Arena(pages, api.device)
    ledger.sizes.append(("KV pages", pages.arena_bytes))
    ledger.pages += pages.describe().splitlines()
    ledger.lines.append(f"context {context} tokens; {name}; KV {kv_dtype(config, model)}")
    stream = CudaStream(api)
    executor = CudaExecutor(
        stream,
        model,
        ops,
        arena.layer_kv([(spec.group, spec.layer) for spec in model.attention]),
        tuple(table_columns(group.spec, context) for group in pages.groups),
        config.scheduler.max_num_seqs,
        context,
        zero=arena.zero,
        move=arena.move,
        states=arena.layer_states([(spec.group, spec.layer) for spec in state_specs(model)]),
        staging=CudaStaging(api, config.scheduler.steps_in_flight + 1),  # and one that is being launched
        chooser=_flashinfer_chooser(config, ledger, _chooser(config, ledger)),
    )
    if config.device.capture:
        with ledger.phase("CUDA graphs"):
            tokens = _piece_tokens(config, ops)
            ledger.lines.append(executor.capture(ledger.progress, tokens=tokens, room_bytes=steps.pieces))
    else:
        ledger.lines.append("steps are launched one operation at a time: capture is off")

    def make_runner(loop: asyncio.AbstractEventLoop) -> Runner:
        return StreamRunner(stream, executor, loop)

    return Made(
        served_names(config, files), pages, context, model.vocab_size, name, make_runner, load_config(files).vision
    )  # fmt: skip


def _check_fp8(api: DeviceApi, ops: Ops) -> None:
    """Raise ConfigError where the kernels cannot read fp8 pages."""
    capability = api.capability()
    if ops.name != "reference" and capability < FP8_CAPABILITY:
        at, least = (".".join(map(str, version)) for version in (capability, FP8_CAPABILITY))
        raise ConfigError(
            f"kv_dtype fp8 needs compute capability {least}; this device has {at} (int8 takes about as many bytes)",
            param="kv_dtype",
        )


def _chooser(config: EngineConfig, ledger: Ledger) -> MakeChooser | None:
    """Sampling goes with the kernels: fused where there is Triton, unless plain torch was asked for."""
    if config.device.attention_backend != "reference":
        reason = importable(SAMPLING)
        if not reason:
            return FusedChooser
        ledger.lines.append(f"sampling in plain torch: no fused kernel ({reason})")
    return None


def _flashinfer_chooser(config: EngineConfig, ledger: Ledger, own: MakeChooser | None) -> MakeChooser | None:
    """`own`, or FlashInfer's kernels over it where they were asked for. Raises ConfigError when one of them is
    missing."""
    if config.device.sampling_backend != "flashinfer":
        return own
    reason = importable("flashinfer.sampling") if own is not None else "seeded rows need Triton's sampling beside it"
    if own is None or reason:
        text = f"sampling_backend is flashinfer, but it cannot be used: {reason} (pip install -e '.[cuda]')"
        raise ConfigError(text, param="sampling_backend")
    ledger.lines.append(
        "sampling by FlashInfer: tokens of requests without a seed depend on the batch; those with one, greedy and "
        "min_p ones are the engine's own"
    )

    def make(slots: int, device: torch.device, upload: Upload) -> Chooser:
        return FlashInferChooser(slots, own(slots, device, upload), upload)

    return make


def _piece_tokens(config: EngineConfig, ops: Ops) -> int:
    """The most tokens of a step that is recorded in pieces. A compiled forward is a program of its own."""
    pieces = config.device.capture and not config.device.compile and capturable(ops)
    return config.scheduler.max_batched_tokens if pieces else 0


def _steps_bytes(config: EngineConfig, api: DeviceApi, model: Model, ops: Ops, ledger: Ledger) -> StepBytes:
    """What steps take. `left` for KV pages is the device's share less what is used, by others too, and that."""
    try:
        steps = steps_bytes(config, api, model, ops)
    except torch.OutOfMemoryError as error:
        text = f"beside the weights, a step of {config.scheduler.max_batched_tokens} tokens does not fit: {error}"
        raise ConfigError(text, param="max_batched_tokens") from error
    free, total = api.memory()
    usable = int(total * config.device.gpu_memory_percent / 100) - (total - free)
    needed = steps.eager + steps.pieces
    ledger.sizes.append(("activations", needed))
    if usable <= needed:
        raise ConfigError(
            f"gpu_memory_percent {config.device.gpu_memory_percent} of {total:,} bytes leaves {max(usable, 0):,} bytes "
            f"beside the weights and what else is on the device; steps alone need {needed:,}",
            param="gpu_memory_percent",
        )
    return replace(steps, left=usable - needed)


def steps_bytes(config: EngineConfig, api: DeviceApi, model: Model, ops: Ops) -> StepBytes:
    """What a step takes beside weights and pages: its forward with the logits, measured; the copies of all points'
    logits that random sampling makes, or the logits of the largest graph; workspaces. Pieces have memory of their own:
    once more the largest forward, and what the graphs themselves take."""
    rows = config.scheduler.max_num_seqs
    points = max(min(LOGIT_ROWS, rows), rows if config.device.capture else 0)
    forward = forward_peak(
        api, model, ops, kv_dtype=getattr(torch, kv_dtype(config, model)), page_tokens=config.cache.page_tokens,
        tokens=config.scheduler.max_batched_tokens, rows=rows, points=LOGIT_ROWS,
        context=min(config.model.max_model_len or model.max_context, model.max_context),
    )  # fmt: skip
    pieces = forward + GRAPH_BYTES if _piece_tokens(config, ops) else 0
    return StepBytes(forward + 5 * points * model.vocab_size * 4 + WORKSPACE_BYTES, pieces)
