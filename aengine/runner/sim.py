"""A device without arithmetic: each token is derived from the KV the step really finds.

Owns: simulated KV pages holding token ids, block tables and relay by slot, and the hash that plays the model.
Does not know: scheduling, text, torch.
Invariants: a sampled token is a function of all token ids found through the block table, and of the request's seed; so
a wrong, stale, early-reused or unwritten page changes the output. Pages of a window or chunk group hold ids too, and
only positions inside it are read; a page of a state group holds the digest of all tokens so far. Nothing is read when a
step is staged: all of it happens when it runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from aengine.runner.sim_state import SimStates, State, digest
from aengine.runner.step import Undecided
from aengine.types import Choices, Int32s, Int64s, Logprobs, PageMove, SlotSetup, StepPlan, StepResult

_UNWRITTEN = -7
_MASK = (1 << 64) - 1
_WORD = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class SimGroup:
    """One KV group: `window` and `chunk` 0 are full attention. `pages` counts page ids, the null page included.
    `state`: recurrent state, one page for a whole sequence; then another group must have full attention."""

    pages: int
    page_tokens: int
    window: int = 0
    state: bool = False
    chunk: int = 0

    @property
    def full(self) -> bool:
        return not (self.window or self.chunk or self.state)

    def first_read(self, position: int) -> int:
        """The first position that the query at `position` reads."""
        if self.chunk:
            return position // self.chunk * self.chunk
        return max(0, position - self.window + 1) if self.window else 0


@dataclass(frozen=True, slots=True)
class SimProfile:
    """Modelled step time in seconds: base + per_row * rows + per_token * tokens + per_context * sum of contexts."""

    base_s: float = 0.0
    per_row_s: float = 0.0
    per_token_s: float = 0.0
    per_context_s: float = 0.0

    def step_s(self, rows: int, tokens: int, context: int) -> float:
        return self.base_s + self.per_row_s * rows + self.per_token_s * tokens + self.per_context_s * context


@cache
def _weights(count: int) -> NDArray[np.uint64]:
    """An odd 64-bit weight for each position, fixed for ever."""
    odd: NDArray[np.uint64] = np.random.Generator(np.random.PCG64(1)).integers(0, 2**63, count, np.uint64) * np.uint64(
        2
    )
    return odd + np.uint64(1)


def sim_token(ids: Sequence[int] | Int32s, vocab: int, seed: int = 0) -> int:
    """The token that follows exactly `ids`, of a vocabulary of `vocab` ids; seed 0 stands for greedy.

    A weighted sum modulo 2^64, mixed: changing any id, or moving it, changes the token (but for one chance in `vocab`).
    """
    size = 1 << max(12, len(ids).bit_length())  # few distinct tables, whatever the lengths
    values = np.asarray(ids, np.int64).astype(np.uint64) + np.uint64(11)
    state = (int((values * _weights(size)[: len(values)]).sum()) ^ seed ^ (len(values) << 40)) & _MASK
    for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):  # the finaliser of splitmix64
        state = ((state ^ (state >> 29)) * multiplier) & _MASK
    return (state ^ (state >> 32)) % vocab


def allowed_tokens(tokens: Int32s, masks: Int32s) -> Int32s:
    """Each of `tokens` [n] if its mask allows it, else the next that it does, going round; masks int32 [n, W], each of
    which allows some token."""
    words, bits = tokens >> 5, tokens & 31
    refused = ((masks[np.arange(len(tokens)), words] >> bits) & 1 == 0).nonzero()[0]
    if not len(refused):
        return tokens
    some = masks[refused]  # the row's own word without the bits below the token; the other words behind it come first
    own = some[np.arange(len(refused)), words[refused]] & (np.int32(-1) << bits[refused])
    later = (some != 0) & (np.arange(some.shape[1]) > words[refused, None])
    found = np.where(later.any(1), later.argmax(1), (some != 0).argmax(1))
    word = np.where(own != 0, words[refused], found)
    value = np.where(own != 0, own, some[np.arange(len(refused)), found]).astype(np.int64) & _WORD
    lowest = np.frexp((value & -value).astype(np.float64))[1] - 1  # a power of two
    allowed = tokens.copy()
    allowed[refused] = word * 32 + lowest
    return allowed


class SimExecutor:
    """Executor of StreamRunner for `--device sim` and of the race tests.

    `delay` is called with a step's modelled seconds on the stream (time.sleep releases the GIL).
    """

    def __init__(
        self,
        groups: Sequence[SimGroup],
        *,
        max_seqs: int,
        max_tokens: int,
        vocab: int,
        profile: SimProfile | None = None,
        delay: Callable[[float], None] = time.sleep,
        token: Callable[[Int32s, int, int], int] = sim_token,
    ) -> None:
        self._groups = tuple(groups)
        self._kv = [np.full((0 if g.state else g.pages, g.page_tokens), _UNWRITTEN, np.int32) for g in groups]
        self._states = {index: SimStates(g.pages) for index, g in enumerate(groups) if g.state}
        columns = [2 if g.state else -(-max_tokens // g.page_tokens) for g in groups]
        self.tables = [np.zeros((max_seqs, n), np.int32) for n in columns]
        self._relay = np.full(max_seqs, -1, np.int32)
        self._setups: dict[int, SlotSetup] = {}
        self._vocab = vocab
        self._profile = profile or SimProfile()
        self._delay = delay
        self._token = token

    def stage(self, plan: StepPlan) -> StepPlan:
        return plan

    def run(self, plan: StepPlan) -> StepResult | Undecided:
        began = time.perf_counter()
        self._apply(plan)
        drawn = self._rows(plan)
        result = Undecided(partial(self._decide, plan, drawn)) if len(plan.deferred) else self._result(plan, drawn)
        context = int((plan.starts + plan.counts).sum())
        wait_s = self._profile.step_s(len(plan.slots), plan.n_tokens, context)
        if wait_s > 0:
            self._delay(max(0.0, wait_s - (time.perf_counter() - began)))
        return result

    def _apply(self, plan: StepPlan) -> None:
        self._move(plan.moves)
        for delta in plan.tables:
            self.tables[delta.group][delta.slots, delta.columns] = delta.pages
        for setup in plan.setups:
            self._setups[setup.slot] = setup
            self._relay[setup.slot] = -1  # poison: nothing of the slot's earlier owner may be read

    def _move(self, moves: Sequence[PageMove]) -> None:
        """What stood at the source is gone: a table that still names it reads poison."""
        for move in moves:
            if move.group in self._states:
                self._states[move.group].move(move.source, move.target)
            else:
                kv = self._kv[move.group]
                kv[move.target] = kv[move.source]
                kv[move.source] = _UNWRITTEN

    def _rows(self, plan: StepPlan) -> list[list[int]]:
        """What each row sampled, or would sample if every token were allowed."""
        inputs = self._inputs(plan)
        for row, ids in enumerate(inputs):
            self._write(plan, row, ids)
        for group, states in self._states.items():
            states.run(plan, self.tables[group], inputs)
        return [self._sample(plan, row, ids) for row, ids in enumerate(inputs)]

    def _decide(self, plan: StepPlan, drawn: list[list[int]], choices: Choices) -> StepResult:
        rows = choices.rows.tolist()
        tokens = allowed_tokens(np.array([drawn[row][0] for row in rows], np.int32), choices.masks)
        for row, token in zip(rows, tokens.tolist(), strict=True):
            drawn[row] = [token]
        return self._result(plan, drawn)

    def _result(self, plan: StepPlan, drawn: list[list[int]]) -> StepResult:
        tokens = np.zeros((len(plan.slots), max(1, int(plan.samples.max(initial=0)))), np.int32)
        counts = np.zeros(len(plan.slots), np.int32)
        logprobs: dict[int, Logprobs] = {}
        for row, sampled in enumerate(drawn):
            counts[row] = len(sampled)
            tokens[row, : len(sampled)] = sampled
            if sampled:
                self._relay[plan.slots[row]] = sampled[-1]
                if self._setups[int(plan.slots[row])].sampling.logprobs is not None:
                    logprobs[row] = _flat_logprobs(sampled)
        targets = {row: _flat_logprobs(ids.tolist()) for row, ids in plan.prompt_logprobs.items()}
        return StepResult(plan.step, tokens, counts, logprobs, targets)

    def _inputs(self, plan: StepPlan) -> list[Int32s]:
        rows, at = [], 0
        for row in range(len(plan.slots)):
            if plan.relay[row]:
                rows.append(self._relay[plan.slots[row]][None].copy())
                continue
            rows.append(plan.ids[at : at + plan.counts[row]])
            at += int(plan.counts[row])
        return rows

    def _write(self, plan: StepPlan, row: int, ids: Int32s) -> None:
        slot, start = int(plan.slots[row]), int(plan.starts[row])
        positions = np.arange(start, start + len(ids))
        for group, kv, table in zip(self._groups, self._kv, self.tables, strict=True):
            if group.state:
                continue
            pages = table[slot, positions // group.page_tokens]
            kv[pages, positions % group.page_tokens] = np.where(pages == 0, _UNWRITTEN, ids)

    def _sample(self, plan: StepPlan, row: int, ids: Int32s) -> list[int]:
        slot, start, samples = int(plan.slots[row]), int(plan.starts[row]), int(plan.samples[row])
        if samples == 0:
            return []
        setup = self._setups[slot]
        seed = 0 if setup.sampling.greedy else setup.seed
        sampled: list[int] = []
        states = self._states.values()
        first = start + len(ids) - samples
        for i in range(samples):
            token = self._next(slot, first + i, seed, [s.after(row, first + i + 1 - start) for s in states])
            sampled.append(token)
            if i + 1 < samples and token != ids[i + 1]:
                break
        return sampled

    def _next(self, slot: int, position: int, seed: int, states: Sequence[State]) -> int:
        """The token after `position`, from what every group's pages hold and `states` say."""
        groups = [group for group in self._groups if not group.state]
        views = [
            self._read(g, kv, t[slot], position)
            for g, kv, t in zip(self._groups, self._kv, self.tables, strict=True)
            if not g.state
        ]
        whole = next((view for g, view in zip(groups, views, strict=True) if g.full), views[0])
        if any(state != digest(whole) for state in states):
            whole = np.concatenate([whole, whole])  # a wrong state: spoil the token
        for group, view in zip(groups, views, strict=True):
            if not group.full and not np.array_equal(view, whole[-len(view) :]):
                whole = np.concatenate([whole, view])  # a wrong window page: spoil the token
        return self._token(whole, self._vocab, seed)

    def _read(self, group: SimGroup, kv: Int32s, table: Int32s, position: int) -> Int32s:
        positions: Int64s = np.arange(group.first_read(position), position + 1)
        return kv[table[positions // group.page_tokens], positions % group.page_tokens]


def _flat_logprobs(tokens: Sequence[int]) -> Logprobs:
    ids = np.asarray(tokens, np.int32)[:, None]
    return Logprobs(ids, np.zeros(ids.shape, np.float32), np.ones(len(ids), np.int32))
