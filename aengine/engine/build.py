"""Putting an engine together: the one place that knows every room.

Owns: the start-up phases, what of them runs beside what, the choice of device.
Does not know: requests, how a device makes its parts (`build_cpu`, `build_cuda`, `build_sim`).
Invariants: blocking code, called in a worker thread; nothing is downgraded without a line in the report. Importing this
module does not import torch: what needs none is done while torch's libraries are mapped.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from aengine.config import EngineConfig, SchedulerConfig, home, usable_home
from aengine.engine.ahead import map_torch
from aengine.engine.facts import ModelInfo, StartupReport
from aengine.engine.grammars import Grammars
from aengine.engine.images import Images
from aengine.engine.lean_torch import import_left_out, import_torch
from aengine.engine.ledger import Ledger, Made, PhaseHook, ProgressHook, RunnerFactory
from aengine.engine.page_groups import plan_pages
from aengine.engine.short_texts import ShortTexts
from aengine.engine.sizing import free_bytes, in_flight_tokens
from aengine.engine.spans import RequestSpans, load_spans
from aengine.engine.text import TextProcessor, read_template
from aengine.engine.touching import TouchAhead
from aengine.engine.vocabulary import read_vocabulary
from aengine.errors import ConfigError
from aengine.memory import Pool
from aengine.metrics import Metrics
from aengine.models.chat import FALLBACK_STOPS
from aengine.models.facts import hold_open
from aengine.models.images import ImageProcessor
from aengine.models.store import ModelFiles, present, resolve
from aengine.models.tokenizer import Tokenizer, load_tokenizer
from aengine.models.vision_config import VisionConfig
from aengine.prefix_cache import PrefixCache
from aengine.scheduler import ROWS_MAX, Drafter, PromptLookup, Scheduler
from aengine.scheduler.recurrent import has_state


@dataclass(slots=True)
class Parts:
    """All that an AsyncEngine runs on. `make_runner` starts the device's threads."""

    model: ModelInfo
    text: TextProcessor
    images: Images
    metrics: Metrics
    grammars: Grammars
    scheduler: Scheduler
    make_runner: RunnerFactory
    report: StartupReport
    spans: RequestSpans | None = None
    touching: TouchAhead | None = None

    def close(self) -> None:
        """End the worker threads; does not wait for what they are doing."""
        self.text.close()
        self.images.close()
        self.grammars.close()


def build(
    config: EngineConfig, on_phase: PhaseHook, on_progress: ProgressHook | None = None, own_process: bool = False
) -> Parts:
    """Load everything `config` names; `own_process` as for `AsyncEngine`. Raises ModelNotFound, ModelLoadError or
    ConfigError."""
    ledger = Ledger(on_phase, on_progress)
    endpoint = config.otlp_endpoint
    spans = load_spans(endpoint, config.model.model) if endpoint is not None else None  # or fail before seconds of work
    with ledger.phase("find model"):
        files = resolve(config.model.model, home=usable_home(), progress=on_progress)
    shared = hold_open(files)
    mapping = map_torch()
    # A tokenizer is read with the interpreter held, libraries are mapped without it, and weights hardly need it.
    with ThreadPoolExecutor(1, thread_name_prefix="aengine-tokenizer") as side:
        reading = side.submit(_tokenizer, config, files, ledger)
        with ledger.phase("import torch"):
            mapping.join()
            import_torch(lean=own_process)
        made = make_parts(config, files, ledger)
        tokenizer, template = reading.result()
    del shared
    from aengine.models.loader import weights_digest

    images = _images(files, made.vision, ledger)
    metrics = Metrics(model_name=made.names[0])
    pool = Pool(made.pages)
    cache = PrefixCache(
        pool,
        weights_digest=weights_digest(files),
        enabled=config.cache.prefix_caching,
        in_flight_tokens=in_flight_tokens(config.scheduler),
    )
    drafter = make_drafter(config.scheduler, made.draft_tokens, ledger, recomputes=has_state(cache))
    scheduler = Scheduler(
        cache,
        max_seqs=config.scheduler.max_num_seqs,
        budget_tokens=config.scheduler.max_batched_tokens,
        max_tokens=made.context,
        page_tokens=config.cache.page_tokens,
        drafter=drafter,
        step_s=(made.step_ms if config.scheduler.step_ms is None else config.scheduler.step_ms) / 1e3,
    )
    touching = None
    if made.touch is not None:
        touching = TouchAhead(
            made.pages.arena_bytes,
            used=lambda: pool.spare.reached * made.pages.large_bytes,
            busy=lambda: scheduler.has_unfinished,
            touch=made.touch,
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
    grammars = Grammars(
        partial(read_vocabulary, tokenizer, made.vocab),
        partial(ShortTexts, tokenizer, made.vocab),
    )
    report = ledger.report()
    return Parts(model, text, images, metrics, grammars, scheduler, made.make_runner, report, spans, touching)


def _tokenizer(config: EngineConfig, files: ModelFiles, ledger: Ledger) -> tuple[Tokenizer, str | None]:
    """-> (tokenizer, chat template that takes the place of its own)."""
    with ledger.phase("tokenizer"):
        tokenizer = load_tokenizer(files)
        template = read_template(config.model.chat_template)
        if not tokenizer.has_chat_template and template is None:
            ledger.lines.append("the model has no chat template (a base model?): chat uses a plain fallback template")
    return tokenizer, template


def make_parts(config: EngineConfig, files: ModelFiles, ledger: Ledger) -> Made:
    """The parts of the device that `config` names; `auto` is CUDA where there is any."""
    device = config.device.device
    if device == "sim":
        from aengine.engine.build_sim import make_sim

        return make_sim(config, files, ledger)
    if config.device.compile:
        import_left_out()
    import torch

    if device != "cpu" and torch.cuda.is_available():
        import_left_out()
        from aengine.engine.build_cuda import make_cuda

        return make_cuda(config, files, ledger)
    if device == "cuda":
        raise ConfigError("device is cuda, but torch finds no CUDA device; device cpu needs none", param="device")
    from aengine.engine.build_cpu import make_cpu

    return make_cpu(config, files, ledger)


def make_drafter(settings: SchedulerConfig, fitted: int, ledger: Ledger, *, recomputes: bool) -> Drafter | None:
    """As configured, or for `fitted` draft tokens a row; those are 0 where the number of positions in a step may change
    how a linear layer rounds."""
    tokens = settings.speculate
    if tokens is None:
        tokens = fitted if settings.multi_step == 1 else 0
    if not tokens:
        ledger.lines.append("no speculation")
        return None
    risk = "" if fitted else "; these kernels may round otherwise in steps with drafts, so near-ties may change tokens"
    rows = f"where its text repeats itself, with {ROWS_MAX} rows at most"
    ledger.lines.append(f"speculation: up to {tokens} draft tokens a row {rows}{risk}")
    return PromptLookup(tokens, recomputes=recomputes)


def _images(files: ModelFiles, vision: VisionConfig | None, ledger: Ledger) -> Images:
    if vision is None:
        return Images(None)
    with ledger.phase("image processor"):
        return Images(ImageProcessor(files.path, vision))


def describe_pages(config: EngineConfig) -> tuple[str, ...]:
    """The planner's table for `config.model`, without loading weights; empty when the model is not on this machine.

    Raises ModelLoadError or ConfigError as `build` would.
    """
    files = present(config.model.model, home=home())
    if files is None:
        return ()
    from aengine.engine.weights import dtype_of
    from aengine.models.loader import outline

    model = outline(files, dtype_of(config))
    pages, context = plan_pages(config, files, model, free_bytes())
    return (*pages.describe().splitlines(), f"context {context} tokens")
