"""Putting an engine together: the one place that knows every room.

Owns: the start-up phases, their times, the memory ledger, the choice of device and dtype.
Does not know: requests.
Invariants: blocking code, called in a worker thread; every phase is reported when it ends; nothing is downgraded
without a line in the report.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aengine.config import EngineConfig, home, usable_home
from aengine.engine.facts import ModelInfo, StartupReport
from aengine.engine.images import Images
from aengine.engine.sizing import free_bytes, in_flight_tokens, size_pool
from aengine.engine.text import TextProcessor
from aengine.errors import ConfigError
from aengine.memory import Chunk, Full, GroupSpec, LayerSpec, PagePlan, Part, Pool, State, Window, attention_group
from aengine.memory.lifetimes import Cross, Lifetime
from aengine.metrics import Metrics
from aengine.models.chat import FALLBACK_STOPS
from aengine.models.holding import Hold
from aengine.models.images import ImageProcessor
from aengine.models.loader import (
    ModelFiles,
    hold_open,
    load_config,
    load_model,
    load_tokenizer,
    outline,
    weights_digest,
)
from aengine.models.store import present, resolve
from aengine.models.tokenizer import Tokenizer
from aengine.models.vision_config import VisionConfig
from aengine.prefix_cache import PrefixCache
from aengine.runner.protocol import Runner
from aengine.runner.sim import SimExecutor, SimGroup, SimProfile
from aengine.runner.step import StreamRunner
from aengine.runner.stream import ThreadStream
from aengine.scheduler import Scheduler

if TYPE_CHECKING:
    import torch

    from aengine.kernels.ops import AttentionSpec, Model, Ops, StateSpec

PhaseHook = Callable[[str, float], None]
ProgressHook = Callable[[str, int, int], None]
RunnerFactory = Callable[[asyncio.AbstractEventLoop], Runner]


@dataclass(slots=True)
class Parts:
    """All that an AsyncEngine runs on. `make_runner` starts the device's threads."""

    model: ModelInfo
    text: TextProcessor
    images: Images
    metrics: Metrics
    scheduler: Scheduler
    make_runner: RunnerFactory
    report: StartupReport

    def close(self) -> None:
        """End the worker threads; does not wait for what they are doing."""
        self.text.close()
        self.images.close()


@dataclass(slots=True)
class Ledger:
    """What start-up tells: times, bytes, notes."""

    hook: PhaseHook
    progress: ProgressHook | None
    phases: list[tuple[str, float]] = field(default_factory=list)
    sizes: list[tuple[str, int]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began_s = time.monotonic()
        yield
        seconds = time.monotonic() - began_s
        self.phases.append((name, seconds))
        self.hook(name, seconds)

    def report(self) -> StartupReport:
        return StartupReport(tuple(self.phases), tuple(self.sizes), tuple(self.lines))


def build(config: EngineConfig, on_phase: PhaseHook, on_progress: ProgressHook | None = None) -> Parts:
    """Load everything `config` names. Raises ModelNotFound, ModelLoadError or ConfigError."""
    ledger = Ledger(on_phase, on_progress)
    with ledger.phase("find model"):
        files = resolve(config.model.model, home=usable_home(), progress=on_progress)
    shared = hold_open(files)
    make = _sim if config.device.device == "sim" else _cpu
    with ThreadPoolExecutor(1, thread_name_prefix="aengine-tokenizer") as side:  # weights hardly hold the interpreter
        reading = side.submit(_tokenizer, config, files, ledger)
        made = make(config, files, ledger)
        tokenizer, template = reading.result()
    del shared
    images = _images(files, made.vision, ledger)
    metrics = Metrics(model_name=made.names[0])
    cache = PrefixCache(
        Pool(made.pages),
        weights_digest=weights_digest(files),
        enabled=config.cache.prefix_caching,
        in_flight_tokens=in_flight_tokens(config.scheduler),
    )
    scheduler = Scheduler(
        cache,
        max_seqs=config.scheduler.max_num_seqs,
        budget_tokens=config.scheduler.max_batched_tokens,
        max_tokens=made.context,
        page_tokens=config.cache.page_tokens,
        step_s=config.scheduler.step_ms / 1e3,
    )
    model = ModelInfo(
        names=made.names,
        max_model_len=made.context,
        vocab_size=made.vocab,
        eos_ids=tuple(tokenizer.eos_ids),
        has_chat_template=tokenizer.has_chat_template or template is not None,
        created=int(time.time()),
        dtype=made.dtype,
        chat_stops=() if tokenizer.has_chat_template or template is not None else FALLBACK_STOPS,
        image_token=None if made.vision is None else made.vision.image_token,
    )
    text = TextProcessor(tokenizer, max_context=made.context, chat_template=template)
    return Parts(model, text, images, metrics, scheduler, made.make_runner, ledger.report())


def _tokenizer(config: EngineConfig, files: ModelFiles, ledger: Ledger) -> tuple[Tokenizer, str | None]:
    """-> (tokenizer, chat template that takes the place of its own)."""
    with ledger.phase("tokenizer"):
        tokenizer = load_tokenizer(files)
        template = _template(config.model.chat_template)
        if not tokenizer.has_chat_template and template is None:
            ledger.lines.append("the model has no chat template (a base model?): chat uses a plain fallback template")
    return tokenizer, template


@dataclass(frozen=True, slots=True)
class _Made:
    """A device's share of the parts."""

    names: tuple[str, ...]
    pages: PagePlan
    context: int
    vocab: int
    dtype: str
    make_runner: RunnerFactory
    vision: VisionConfig | None = None


def _template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template {path!r} cannot be read: {error}", param="chat_template") from error


def _images(files: ModelFiles, vision: VisionConfig | None, ledger: Ledger) -> Images:
    if vision is None:
        return Images(None)
    with ledger.phase("image processor"):
        return Images(ImageProcessor(files.path, vision))


def _names(config: EngineConfig, files: ModelFiles) -> tuple[str, ...]:
    return config.model.served_model_name or (files.name,)


def kv_groups(attention: Sequence[AttentionSpec], dtype: str, page_tokens: int) -> list[GroupSpec]:
    """The page groups of a model's attention layers: layers with one group number share pages and lifetime."""
    groups = []
    for number in range(1 + max(spec.group for spec in attention)):
        specs = [spec for spec in attention if spec.group == number]
        lifetime = _lifetime(specs[0])
        name = type(lifetime).__name__.lower()
        layers = [f"layer{spec.layer}" for spec in specs]
        groups.append(
            attention_group(
                name,
                lifetime,
                layers,
                kv_heads=specs[0].kv_heads,
                head_dim=specs[0].head_dim,
                dtype=dtype,
                tokens_per_page=page_tokens,
            )
        )
    return groups


def kv_dtype(config: EngineConfig, model: Model) -> str:
    """The element type of KV pages. Raises ConfigError for one that some layer's kernels cannot read."""
    if config.cache.kv_dtype == "auto":
        return str(model.dtype).removeprefix("torch.")
    cross = sum(spec.cross for spec in model.attention)
    if config.cache.kv_dtype == "int8" and cross:
        text = f"kv_dtype int8 is not for models with cross-attention: {cross} of {len(model.attention)} layers have it"
        raise ConfigError(text, param="kv_dtype")
    return config.cache.kv_dtype


def state_groups(states: Sequence[StateSpec], page_tokens: int) -> list[GroupSpec]:
    """The page groups of a model's recurrent layers, which follow those of attention; checkpoints of a state stand at
    multiples of `page_tokens`."""
    groups = []
    for number in sorted({spec.group for spec in states}):
        layers = []
        for spec in (spec for spec in states if spec.group == number):
            parts = (Part(part.name, part.shape, str(part.dtype).removeprefix("torch.")) for part in spec.parts)
            layers.append(LayerSpec(f"state{spec.layer}", tuple(parts)))
        groups.append(GroupSpec("state", State(), tuple(layers), page_tokens))
    return groups


def table_columns(spec: GroupSpec, context: int) -> int:
    """Width of a slot's block table: one entry per page, (page read, page written) for recurrent state, none for media
    items, whose placements bring their pages."""
    if spec.lifetime.per_item:
        return 0
    return 2 if isinstance(spec.lifetime, State) else -(-context // spec.tokens_per_page)


def _lifetime(spec: AttentionSpec) -> Lifetime:
    if spec.cross:
        return Cross()
    if spec.window:
        return Window(spec.window)
    return Chunk(spec.chunk) if spec.chunk else Full()


def describe_pages(config: EngineConfig) -> tuple[str, ...]:
    """The planner's table for `config.model`, without loading weights; empty when the model is not on this machine.

    Raises ModelLoadError or ConfigError as `build` would.
    """
    files = present(config.model.model, home=home())
    if files is None:
        return ()
    import torch

    model = outline(files, _dtype(config, torch))
    pages, context = _plan_pages(config, files, model)
    return (*pages.describe().splitlines(), f"context {context} tokens")


def _plan_pages(config: EngineConfig, files: ModelFiles, model: Model) -> tuple[PagePlan, int]:
    """(page plan, context length in tokens) of all the model's groups."""
    from aengine.kernels.ops import state_specs

    groups = kv_groups(model.attention, kv_dtype(config, model), config.cache.page_tokens)
    groups += state_groups(state_specs(model), config.cache.page_tokens)
    vision = load_config(files).vision
    return size_pool(
        groups,
        config.cache,
        config.scheduler,
        model_context=model.max_context,
        max_model_len=config.model.max_model_len,
        free=free_bytes(),
        media_tokens=() if vision is None else (vision.max_tokens,),
    )


# ---- cpu


def _cpu(config: EngineConfig, files: ModelFiles, ledger: Ledger) -> _Made:
    with ledger.phase("import torch"):
        import torch

        from aengine.kernels.ops import state_specs
        from aengine.memory.arena import Arena
        from aengine.runner.executor import make_executor

    ops, model = load_for_cpu(config, files, ledger)
    torch_threads, dtype = torch.get_num_threads(), model.dtype
    ledger.sizes.append(("weights", model_bytes(model)))
    name = str(dtype).removeprefix("torch.")
    with ledger.phase("KV pages"):
        pages, context = _plan_pages(config, files, model)
        arena = Arena(pages)
    ledger.sizes.append(("KV pages", pages.arena_bytes))
    ledger.lines += pages.describe().splitlines()
    kv = kv_dtype(config, model)
    ledger.lines.append(f"context {context} tokens; {ops.name} kernels; {name}; KV {kv}")

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
        stream = ThreadStream(initialise=lambda: torch.set_num_threads(torch_threads))
        return StreamRunner(stream, executor, loop)

    return _Made(_names(config, files), pages, context, model.vocab_size, name, make_runner, load_config(files).vision)


def load_for_cpu(config: EngineConfig, files: ModelFiles, ledger: Ledger) -> tuple[Ops, Model]:
    """Kernels and weights as `config` asks for them; sets the number of torch's own threads."""
    import torch

    threads = config.device.threads or available_cores()
    with ledger.phase("kernels"):
        ops, torch_threads = _ops(config, threads, ledger)
    torch.set_num_threads(torch_threads)
    with ledger.phase("weights"):
        hold, dtype = hold_of(config, ops), _dtype(config, torch)
        return ops, load_model(files, ops, dtype, ledger.progress, hold=hold, tell=ledger.lines.append)


def available_cores() -> int:
    """Cores this process may use (its affinity mask, where the system has one)."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _ops(config: EngineConfig, threads: int, ledger: Ledger) -> tuple[Ops, int]:
    """(kernels, threads for torch's own operators).

    Native kernels have a thread pool of their own; torch then gets one thread, because its OpenMP pool spins without
    bound and takes the cores from the kernels and the event loop (steps of 3 ms became 106 ms).
    """
    from aengine.kernels.native import Unavailable, load_native_ops
    from aengine.kernels.reference import ReferenceOps

    if config.device.kernels == "reference":
        return ReferenceOps(), threads
    native = load_native_ops(usable_home() / "native", threads)
    if not isinstance(native, Unavailable):
        return native, 1
    if config.device.kernels == "native":
        raise ConfigError(f"kernels are set to native, but: {native.reason}", param="kernels")
    ledger.lines.append(f"no native kernels ({native.reason}): plain torch serves, at a fraction of the speed")
    return ReferenceOps(), threads


def _dtype(config: EngineConfig, torch_module: object) -> torch.dtype:
    """fp32 unless asked: bf16 arithmetic without hardware support is slower than fp32 and less exact."""
    import torch

    return torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32


def hold_of(config: EngineConfig, ops: Ops) -> Hold:
    """What linears are held as. A dtype that was asked for means exact arithmetic in it, so dense weights; plain torch
    computes with dense weights only, so integers would be kept for nothing."""
    from aengine.kernels.reference import ReferenceOps

    wanted = config.model.quantize
    if wanted == "auto":
        return "stored" if config.model.dtype == "auto" and not isinstance(ops, ReferenceOps) else "plain"
    return "plain" if wanted == "none" else wanted


def model_bytes(model: Model) -> int:
    """Bytes of all weights a model holds, each once: tensors with memory, and packed blocks."""
    sizes: dict[int, int] = {}
    _weigh(list(vars(model).values()), sizes)
    return sum(sizes.values())


def _weigh(found: Iterable[object], sizes: dict[int, int]) -> None:
    import torch

    from aengine.kernels.native.library import Block

    for value in found:
        if isinstance(value, torch.Tensor):
            if value.device.type != "meta":  # the shape of a packed weight
                sizes[id(value)] = value.nbytes
        elif isinstance(value, Block):
            sizes[value.address] = value.size
        elif isinstance(value, list | tuple):
            _weigh(value, sizes)
        elif is_dataclass(value) and not isinstance(value, type):
            _weigh([getattr(value, leaf.name) for leaf in fields(value)], sizes)


# ---- sim


def _sim(config: EngineConfig, files: ModelFiles, ledger: Ledger) -> _Made:
    facts = load_config(files)
    group = attention_group("full", Full(), 1, kv_heads=1, head_dim=4, tokens_per_page=config.cache.page_tokens)
    pages, context = size_pool(
        [group],
        config.cache,
        config.scheduler,
        model_context=facts.max_positions,
        max_model_len=config.model.max_model_len,
        free=free_bytes(),
    )
    ledger.sizes.append(("KV pages (simulated)", pages.arena_bytes))
    executor = SimExecutor(
        [SimGroup(pages.capacity[0] + pages.groups[0].slots, config.cache.page_tokens)],
        max_seqs=config.scheduler.max_num_seqs,
        max_tokens=context,
        vocab=facts.vocab_size,
        profile=SimProfile(base_s=config.device.sim_step_s),
    )

    def make_runner(loop: asyncio.AbstractEventLoop) -> Runner:
        return StreamRunner(ThreadStream(), executor, loop)

    return _Made(_names(config, files), pages, context, facts.vocab_size, "sim", make_runner)
