"""Random episodes of the whole scheduler, cache and a delayed device, with an oracle for every token.

The device runs steps late, in order, at random moments; it derives each token from the KV it finds through the block
tables. So any page, slot or table that is used too early changes a token.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from aengine.memory import (
    Chunk,
    Full,
    GroupPlan,
    GroupSpec,
    LayerSpec,
    Part,
    Pool,
    State,
    Window,
    attention_group,
    plan,
)
from aengine.prefix_cache import PrefixCache
from aengine.runner.sim import SimExecutor, SimGroup, sim_token
from aengine.runner.step import Undecided
from aengine.scheduler import Drafter, DraftRow, PromptLookup, Scheduler
from aengine.types import (
    Choices,
    FinishReason,
    Int32s,
    Request,
    SamplingParams,
    StepOutputs,
    StepPlan,
    StepResult,
    TokenRules,
)
from tests.races.toy_grammar import ToyMatcher

VOCAB = 97
EOS = 3
PAGE = 4
WORDS = -(-VOCAB // 32)


Pick = Callable[[int, ToyMatcher], int]


class Wrong(AssertionError):
    """The detector found a fault."""


@dataclass(frozen=True)
class Setting:
    """`window`, `chunk` 0: one full-attention group; else one more group with that window or chunk. `state` > 0:
    recurrent state too, its checkpoints at multiples of that; `page` and `grid` are pages and retention grid in tokens;
    a large page holds `slab` of the pages. `turns`: how often a prompt goes on where an earlier request ended. `fail`,
    `fail_row`: how often a step breaks, or one row of it. `structured`: how often a grammar rules the output.
    `multi` > 1: so many decode steps are planned at once. `draft`: an oracle guesses; `lookup`: the program's own
    drafter does, in a vocabulary of that many tokens, so small that texts repeat themselves."""

    depth: int = 1
    multi: int = 1
    pages: int = 40
    seqs: int = 6
    budget: int = 16
    requests: int = 16
    window: int = 0
    chunk: int = 0
    state: int = 0
    page: int = PAGE
    grid: int = 4096
    slab: int = 1
    turns: float = 0.0
    draft: float = 0.0
    lookup: int = 0
    abort: float = 0.05
    fail: float = 0.0
    fail_row: float = 0.0
    structured: float = 0.0
    max_tokens: int = 96
    prefix_caching: bool = True

    @property
    def vocab(self) -> int:
        return self.lookup or VOCAB


@dataclass
class Asked:
    request: Request
    want: list[int]
    got: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    aborted: bool = False


def oracle(prompt: Int32s, max_tokens: int, stop_ids: tuple[int, ...], seed: int, vocab: int = VOCAB) -> list[int]:
    """The tokens a request must get: a function of its own prompt and seed alone."""
    ids = prompt.tolist()
    for _ in range(max_tokens):
        ids.append(sim_token(ids, vocab, seed))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


def ruled_oracle(
    prompt: Int32s, max_tokens: int, stop_ids: tuple[int, ...], seed: int, grammar: ToyMatcher, pick: Pick
):
    """The same where a grammar rules the output."""
    ids = prompt.tolist()
    while len(ids) < len(prompt) + max_tokens and not grammar.ended:
        ids.append(pick(sim_token(ids, VOCAB, seed), grammar))
        grammar.accept(ids[-1])
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


def next_allowed(token: int, grammar: ToyMatcher) -> int:
    """As the simulated device chooses."""
    allowed = grammar.allowed()
    return next((one for one in allowed if one >= token), allowed[0])


class OracleDrafter:
    """Guesses rightly with probability `skill` at each token, of some rows, and has the others wait when it likes."""

    rows_max = 1000

    def __init__(self, rng: random.Random, skill: float) -> None:
        self._rng, self._skill = rng, skill

    def waits(self, rows: Sequence[DraftRow], others: int) -> bool:
        return self._rng.random() < 0.7

    def propose(self, rows: Sequence[DraftRow], others: int, room: int) -> list[Int32s]:
        made = []
        for row in rows:
            made.append(self._guess(row.ids, min(row.most, room)))
            room -= len(made[-1])
        return made

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Nothing to learn."""

    def _guess(self, ids: Int32s, most: int) -> Int32s:
        guess: list[int] = []
        known = ids.tolist()
        for _ in range(min(most, self._rng.randint(0, 4))):
            right = self._rng.random() < self._skill
            guess.append(sim_token(known + guess, VOCAB, 0) if right else self._rng.randrange(VOCAB))
        return np.array(guess, np.int32)


class Device:
    """Launched steps, run one at a time when the episode says so. `executor` may be a faulty one. Rows that break
    write their pages with what does not belong there."""

    def __init__(self, executor: SimExecutor) -> None:
        self.executor = executor
        self._queue: deque[Callable[[], None]] = deque()
        self._results: dict[int, StepResult | None] = {}
        self._undecided: dict[int, Undecided] = {}

    def refuse(self, step: StepPlan) -> None:
        """The launch itself failed: the device never hears of the step, nor of what it carried."""
        self._results[step.step] = None

    def launch(self, step: StepPlan, *, fails: bool, bad_rows: list[int]) -> None:
        bad = list(range(len(step.slots))) if fails else bad_rows
        staged = self.executor.stage(garbled(step, bad) if bad else step)

        def run() -> None:
            done = self.executor.run(staged)
            if isinstance(done, Undecided):
                self._undecided[step.step] = done
            else:
                self._keep(step, done, fails, bad)

        self._queue.append(run)
        self._fate = fails, bad

    def choose(self, step: StepPlan, choices: Choices) -> None:
        fails, bad = self._fate

        def decide() -> None:
            self._keep(step, self._undecided.pop(step.step).decide(choices), fails, bad)

        self._queue.append(decide)

    def run_one(self) -> None:
        if self._queue:
            self._queue.popleft()()

    def _keep(self, step: StepPlan, result: StepResult, fails: bool, bad: list[int]) -> None:
        failed = dict.fromkeys(bad, "planted failure")
        counts = result.counts.copy()
        counts[bad] = 0
        broken = msgspec.structs.replace(result, counts=counts, failed=failed, device_s=1.0)
        self._results[step.step] = None if fails else broken

    def wait(self, step: int) -> StepResult | None:
        while step not in self._results:
            self.run_one()
        return self._results.pop(step)


def garbled(step: StepPlan, rows: list[int]) -> StepPlan:
    """The step with other ids in `rows`."""
    relay = step.relay.copy()
    relay[rows] = False
    given = np.split(step.ids, np.cumsum(np.where(step.relay, 0, step.counts))[:-1])
    ids = [np.full(step.counts[i], VOCAB, np.int32) if i in rows else part for i, part in enumerate(given)]
    return msgspec.structs.replace(step, relay=relay, ids=np.concatenate(ids))


def make_pool(s: Setting) -> tuple[Pool, list[SimGroup]]:
    specs = [attention_group("full", Full(), 1, kv_heads=1, head_dim=16, dtype="float32", tokens_per_page=s.page)]
    local = [kind(tokens) for kind, tokens in ((Window, s.window), (Chunk, s.chunk)) if tokens]
    specs += [
        attention_group(one.label, one, 1, kv_heads=1, head_dim=16, dtype="float32", tokens_per_page=PAGE)
        for one in local
    ]
    if s.state:
        layer = LayerSpec("state", (Part("sum", (32,), "float32"),))
        specs.append(GroupSpec("state", State(), (layer,), tokens_per_page=s.state))
    payload = specs[0].payload_bytes
    pages = plan(specs, s.pages * payload, large_bytes=s.slab * payload if s.slab > 1 else None)
    return Pool(pages), [sim_group(group, pages.large_pages) for group in pages.groups]


def sim_group(group: GroupPlan, large_pages: int) -> SimGroup:
    spec = group.spec
    lifetime = spec.lifetime
    return SimGroup(
        group.slots * large_pages,
        spec.tokens_per_page,
        lifetime.tokens if isinstance(lifetime, Window) else 0,
        isinstance(lifetime, State),
        lifetime.tokens if isinstance(lifetime, Chunk) else 0,
    )


class Episode:
    """One seeded run. `scheduler_type` and `executor_type` let tests plant faults."""

    pick: Pick = staticmethod(next_allowed)

    def __init__(
        self,
        seed: int,
        setting: Setting,
        *,
        scheduler_type: type[Scheduler] = Scheduler,
        executor_type: type[SimExecutor] = SimExecutor,
    ) -> None:
        self.rng = random.Random(seed)
        self.s = setting
        pool, groups = make_pool(setting)
        self.cache = PrefixCache(pool, enabled=setting.prefix_caching, grid_tokens=setting.grid)
        drafter: Drafter | None = OracleDrafter(self.rng, 0.7) if setting.draft else None
        if setting.lookup:
            drafter = PromptLookup(4)
        self.scheduler = scheduler_type(
            self.cache,
            max_seqs=setting.seqs,
            budget_tokens=setting.budget,
            max_tokens=setting.max_tokens,
            page_tokens=math.gcd(setting.page, setting.state, PAGE if setting.window or setting.chunk else 0),
            drafter=drafter,
        )
        executor = executor_type(groups, max_seqs=setting.seqs, max_tokens=setting.max_tokens, vocab=setting.vocab)
        self.device = Device(executor)
        self.asked: dict[int, Asked] = {}
        self.plans: list[StepPlan] = []
        self.failed_steps = 0

    @property
    def moved(self) -> int:
        """Pages that were moved."""
        return sum(len(plan.moves) for plan in self.plans)

    # ---- requests

    def make_requests(self) -> deque[list[Request]]:
        """Groups of requests that arrive together: single ones, and n choices of one prompt."""
        shared = [self.rng.randrange(self.s.vocab) for _ in range(32)]
        todo: deque[list[Request]] = deque()
        handle = 1
        while handle <= self.s.requests:
            n = self.rng.choice([1, 1, 1, 2, 4])
            prompt = shared[: self.rng.choice([0, 4, 8, 13, 24])]
            prompt = prompt + [self.rng.randrange(self.s.vocab) for _ in range(self.rng.randint(1, 14))]
            if self.s.turns and todo and self.rng.random() < self.s.turns:
                prompt = self.next_turn(self.rng.choice(todo))
            most = self.rng.randint(1, 24)
            greedy = bool(self.s.draft) or self.rng.random() < 0.5
            params = SamplingParams(temperature=0.0 if greedy else 1.0, max_tokens=most)
            group = []
            for _ in range(n):
                request = Request(
                    handle=handle,
                    id=str(handle),
                    prompt_ids=np.array(prompt, np.int32),
                    sampling=params,
                    rules=TokenRules(stop_ids=(EOS,)),
                    max_total_tokens=len(prompt) + most,
                    seed=0 if greedy else self.rng.getrandbits(40),
                    priority=self.rng.choice([0, 0, 0, 1, -1]),
                    cause="fresh" if not group else "fork",
                )
                group.append(request)
                handle += 1
            todo.append([r for r in group if self.cache.fits(r.max_total_tokens)])
        return todo

    def next_turn(self, before: list[Request]) -> list[int]:
        """The prompt and output of an earlier request, or the beginning of that, and a few tokens more."""
        if not before:
            return [1]
        first = self.rng.choice(before)
        most = first.max_total_tokens - len(first.prompt_ids)
        said = oracle(first.prompt_ids, most, first.rules.stop_ids, first.seed, self.s.vocab)
        ids = first.prompt_ids.tolist() + said[: self.rng.choice([most, most, self.rng.randint(0, most)])]
        return ids[: self.s.max_tokens - 30] + [self.rng.randrange(self.s.vocab) for _ in range(self.rng.randint(1, 5))]

    def submit(self, request: Request) -> None:
        most = request.max_total_tokens - len(request.prompt_ids)
        seed = 0 if request.sampling.greedy else request.seed
        asked = request.prompt_ids, most, request.rules.stop_ids, seed
        if self.s.structured and self.rng.random() < self.s.structured:
            kind = self.rng.getrandbits(30)
            if kind % 3 == 0:  # a grammar may force what ends the request
                request = msgspec.structs.replace(request, rules=TokenRules(stop_ids=(EOS, *range(kind % 7, VOCAB, 9))))
                asked = request.prompt_ids, most, request.rules.stop_ids, seed
            want = ruled_oracle(*asked, ToyMatcher(kind, VOCAB, EOS), self.pick)
            self.asked[request.handle] = Asked(request, want)
            self.scheduler.submit(request, ToyMatcher(kind, VOCAB, EOS))
            return
        self.asked[request.handle] = Asked(request, oracle(*asked, self.s.vocab))
        self.scheduler.submit(request)

    # ---- the loop of engine/core.py, with chance in place of time

    def run(self) -> Episode:
        todo = self.make_requests()
        in_flight: deque[tuple[int, bool]] = deque()
        idle = 0
        for _ in range(20_000):
            if todo and self.rng.random() < 0.4:
                for request in todo.popleft():
                    self.submit(request)
            self._maybe_abort()
            step = self.scheduler.plan()
            self._take(self.scheduler.flush())
            if step is not None:
                fails = self.rng.random() < self.s.fail
                self.plans.append(step)
                bad_rows = []
                if self.s.fail_row and len(step.slots) and self.rng.random() < self.s.fail_row:
                    bad_rows = [self.rng.randrange(len(step.slots))]
                in_flight.append((step.step, fails))
                if fails and step.step % 2:
                    self.device.refuse(step)
                    while in_flight:  # nothing may be launched before this is known
                        self._commit(in_flight.popleft()[0])
                    continue
                self.device.launch(step, fails=fails, bad_rows=bad_rows)
                step = self._launch_again(step, in_flight)
                if len(step.deferred):
                    self._decide(step, in_flight)
            while self.rng.random() < 0.4:
                self.device.run_one()
            if len(in_flight) > self.s.depth or (in_flight and step is None):
                for _ in range(min(self.s.multi, len(in_flight))):
                    self._commit(in_flight.popleft()[0])
                idle = 0
            elif step is None:
                idle += 1
                if not todo and not self.scheduler.has_unfinished:
                    break
                if idle > 500 and not todo:
                    raise Wrong(f"no progress: {self.scheduler.stats()}")
            self.cache.check()
        else:
            raise Wrong("the episode did not end")
        self._check_end()
        return self

    def _decide(self, step: StepPlan, in_flight: deque[tuple[int, bool]]) -> None:
        while self.rng.random() < 0.4:
            self.device.run_one()
        while len(in_flight) > 1:
            self._commit(in_flight.popleft()[0])
        rows, matchers = self.scheduler.decide()
        masks = [matcher.mask() for matcher in matchers]
        self.device.choose(step, Choices(rows, np.array(masks, np.int32).reshape(len(masks), WORDS)))

    def _launch_again(self, step: StepPlan, in_flight: deque[tuple[int, bool]]) -> StepPlan:
        """As `Core._launch_again`; returns the newest step."""
        for _ in range(self.s.multi - 1):
            goes_on = step.decodes == len(step.slots) and not len(step.deferred)
            again = self.scheduler.again() if goes_on else None
            if again is None:
                break
            step = again
            self.plans.append(step)
            in_flight.append((step.step, False))
            self.device.launch(step, fails=self.rng.random() < self.s.fail, bad_rows=[])
        return step

    def _maybe_abort(self) -> None:
        if self.rng.random() < self.s.abort and self.asked:
            asked = self.rng.choice(list(self.asked.values()))
            if asked.finish is None:
                asked.aborted = True
                self.scheduler.abort(asked.request.handle)

    def _commit(self, step: int) -> None:
        result = self.device.wait(step)
        if result is None:
            self.failed_steps += 1
            self._take(self.scheduler.fail(step, "planted failure"))
        else:
            self._take(self.scheduler.commit(result))

    def _take(self, outputs: StepOutputs) -> None:
        for handle, token in zip(outputs.handles, outputs.tokens, strict=True):
            asked = self.asked[handle]
            if asked.finish is not None:
                raise Wrong(f"request {handle} got a token after its finish")
            asked.got.append(token)
            if asked.got != asked.want[: len(asked.got)]:
                raise Wrong(f"request {handle}: tokens {asked.got}, expected {asked.want}")
        for finish in outputs.finished:
            asked = self.asked[finish.handle]
            if asked.finish is not None:
                raise Wrong(f"request {finish.handle} finished twice")
            asked.finish = finish.reason

    def _check_end(self) -> None:
        for handle, asked in self.asked.items():
            if asked.finish is None:
                raise Wrong(f"request {handle} has no finish")
            if asked.finish in (FinishReason.STOP, FinishReason.LENGTH) and asked.got != asked.want:
                raise Wrong(f"request {handle}: {asked.got} at finish, expected {asked.want}")
            if asked.finish is FinishReason.ABORT and not asked.aborted:
                raise Wrong(f"request {handle} was aborted by nobody")
        self.cache.retire(10**9)
        self.cache.reset()
        self.cache.check()
        live = [group.live + group.fenced + group.cached for group in self.cache.stats().pool.groups]
        if any(live):
            raise Wrong(f"pages leaked per group: {live}")
        if self.scheduler.in_flight or len(self.scheduler.waiting):
            raise Wrong("the scheduler is not idle")
