"""A whole engine on the sim device, without a model: words for tokens, tokens derived from the KV that is found."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from aengine import AsyncEngine, EngineConfig, SchedulerConfig
from aengine.engine.build import Parts
from aengine.engine.facts import ModelInfo, StartupReport
from aengine.engine.grammars import Grammars
from aengine.engine.images import Images
from aengine.engine.short_texts import ShortTexts
from aengine.engine.text import TextProcessor
from aengine.engine.vocabulary import read_vocabulary
from aengine.memory import Pool, uniform_plan
from aengine.metrics import Metrics
from aengine.prefix_cache import PrefixCache
from aengine.runner.protocol import Runner
from aengine.runner.sim import SimExecutor, SimGroup, SimProfile
from aengine.runner.step import StreamRunner
from aengine.runner.stream import ThreadStream
from aengine.scheduler import Scheduler
from tests.waiting import DEADLINE_S

VOCAB = 256
EOS = 3
PAGE = 4


class ByteStream:
    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self._tokenizer = tokenizer
        self.table: dict[int, str] = {}

    def step(self, token: int) -> str | None:
        if token == self._tokenizer.poison:
            raise ValueError("planted tokenizer fault")
        return chr(0x100 + token)

    def flush(self) -> str:
        return ""


class ByteTokenizer:
    """One letter a token. `poison` is a token whose detokenising raises."""

    vocab_size = VOCAB
    eos_ids = (EOS,)
    bos_id = None
    has_chat_template = True
    chat_template = None
    response_template = None
    special_ids = frozenset({EOS})
    poison = -1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) % VOCAB for letter in text]

    def encode_batch(self, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(0x100 + token) for token in ids)

    def render_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        return "|".join(message["content"] for message in messages)

    def token_text(self, id: int) -> str:
        return chr(0x100 + id)

    def token_bytes(self, id: int) -> bytes:
        return self.token_text(id).encode()

    def stream(self, *, skip_special_tokens: bool = True) -> ByteStream:
        return ByteStream(self)


class Sim:
    """What a test may reach into: the tokenizer, the executor, the pool, and how long steps take.

    After `hold(n)` the device ends the step it is held at and `n` more, and no other until `hold` or `free`, however
    long the test takes.
    """

    def __init__(self, pages: int, context: int, step_s: float) -> None:
        self.tokenizer = ByteTokenizer()
        self.pages, self.context, self.step_s = pages, context, step_s
        self.executor_type: type[SimExecutor] = SimExecutor
        self.executor: SimExecutor | None = None
        self._may_end: threading.Semaphore | None = None

    def hold(self, steps: int = 0) -> None:
        self._replace(threading.Semaphore(steps))

    def free(self) -> None:
        self._replace(None)

    def _replace(self, new: threading.Semaphore | None) -> None:
        held, self._may_end = self._may_end, new
        if held is not None:
            held.release(2**20)

    def _delay(self, seconds: float) -> None:
        held = self._may_end
        if held is not None:
            assert held.acquire(timeout=DEADLINE_S)
        elif self.step_s:
            time.sleep(seconds)

    def build(
        self, config: EngineConfig, on_phase: Callable[[str, float], None], on_progress: Any = None, own: bool = False
    ) -> Parts:
        plan = uniform_plan(self.pages, PAGE)
        cache = PrefixCache(Pool(plan), enabled=config.cache.prefix_caching)
        scheduler = Scheduler(
            cache,
            max_seqs=config.scheduler.max_num_seqs,
            budget_tokens=config.scheduler.max_batched_tokens,
            max_tokens=self.context,
            page_tokens=PAGE,
        )
        self.executor = self.executor_type(
            [SimGroup(plan.groups[0].slots * plan.large_pages, PAGE)],
            max_seqs=config.scheduler.max_num_seqs,
            max_tokens=self.context,
            vocab=VOCAB,
            profile=SimProfile(base_s=self.step_s or 1e-9),
        )
        self.executor._delay = self._delay

        def make_runner(loop: asyncio.AbstractEventLoop) -> Runner:
            assert self.executor is not None
            return StreamRunner(ThreadStream(), self.executor, loop)

        model = ModelInfo(("sim",), self.context, VOCAB, (EOS,), True, 0)
        text = TextProcessor(self.tokenizer, max_context=self.context)  # type: ignore[arg-type]
        on_phase("build", 0.0)
        grammars = Grammars(partial(read_vocabulary, self.tokenizer, VOCAB), partial(ShortTexts, self.tokenizer, VOCAB))  # type: ignore[arg-type]
        metrics = Metrics(model_name="sim")
        return Parts(model, text, Images(None), metrics, grammars, scheduler, make_runner, StartupReport())


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch) -> Sim:
    made = Sim(pages=400, context=256, step_s=0.0)
    monkeypatch.setattr("aengine.engine.build.build", made.build)
    return made


def engine(sim: Sim, **scheduler: Any) -> AsyncEngine:
    settings = {"max_num_seqs": 16, "max_batched_tokens": 64, **scheduler}
    return AsyncEngine(EngineConfig(scheduler=SchedulerConfig(**settings)))
