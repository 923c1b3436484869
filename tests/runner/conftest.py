"""A tiny two-layer model, a dense forward to compare with, and a hand scheduler that builds step plans.

Owns: the fixtures of the runner tests.
Does not know: the engine's scheduler, real models.
Invariants: everything is seeded; KV pages have gaps between them and hold NaN until written; page ids are shuffled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from aengine.kernels.ops import AttentionSpec, LayerKV, Linear, RopeTable
from aengine.kernels.reference import ReferenceOps
from aengine.runner.torch_step import TorchExecutor
from aengine.types import SamplingParams, SlotSetup, StepPlan, TableDelta, TokenRules

VOCAB, HIDDEN, HEADS, KV_HEADS, DIM, FFN = 97, 32, 4, 2, 8, 48
WINDOW = 12
PAGES = (4, 5)  # tokens a page, by group
MAX_LEN = 200
SLOTS = 8


def _weight(generator, *shape):
    return torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])


class TinyModel:
    """Layer 0: full attention, group 0. Layer 1: a window of 12 positions, group 1. Written in Ops only."""

    vocab_size = VOCAB
    max_context = MAX_LEN
    dtype = torch.float32
    attention = (
        AttentionSpec(0, 0, HEADS, KV_HEADS, DIM, DIM**-0.5),
        AttentionSpec(1, 1, HEADS, KV_HEADS, DIM, DIM**-0.5, window=WINDOW),
    )

    def __init__(self, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=g)
        self.norms = [torch.rand(HIDDEN, generator=g) + 0.5 for _ in range(5)]
        qkv = (HEADS + 2 * KV_HEADS) * DIM
        self.qkv = [Linear(_weight(g, qkv, HIDDEN)) for _ in range(2)]
        self.out = [Linear(_weight(g, HIDDEN, HEADS * DIM)) for _ in range(2)]
        self.gate_up = [Linear(_weight(g, 2 * FFN, HIDDEN)) for _ in range(2)]
        self.down = [Linear(_weight(g, HIDDEN, FFN)) for _ in range(2)]
        self.head = Linear(2 * torch.randn(VOCAB, HIDDEN, generator=g) / math.sqrt(HIDDEN))
        angle = torch.arange(MAX_LEN)[:, None] * 1000.0 ** -(torch.arange(DIM // 2) / (DIM / 2))
        self.rope = RopeTable(angle.cos(), angle.sin())
        self.logit_rows = []  # how many positions each call of `logits` was given

    def forward(self, ops, batch):
        x = ops.embed(self.embedding, batch.ids)
        for layer, spec in enumerate(self.attention):
            h = ops.rms_norm(x, self.norms[2 * layer], 1e-6)
            sizes = (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)
            q, k, v = (part.view(len(x), -1, DIM) for part in ops.split(ops.linear(h, self.qkv[layer]), sizes))
            q, k = ops.rope(q, batch.positions, self.rope), ops.rope(k, batch.positions, self.rope)
            x = ops.add(x, ops.linear(ops.attention(q, k, v, spec, batch), self.out[layer]))
            h = ops.rms_norm(x, self.norms[2 * layer + 1], 1e-6)
            x = ops.add(x, ops.linear(ops.silu_mul(ops.linear(h, self.gate_up[layer])), self.down[layer]))
        return ops.rms_norm(x, self.norms[4], 1e-6)

    def logits(self, ops, hidden):
        self.logit_rows.append(len(hidden))
        return ops.logits(hidden, self.head)

    def dense_logits(self, ids):
        """The whole sequence in one shot, by torch's own functions: logits fp32 [len(ids), V]."""
        ids = torch.as_tensor(np.asarray(ids), dtype=torch.int64)
        n = len(ids)
        query, key = torch.arange(n)[:, None], torch.arange(n)
        x = self.embedding[ids]
        cos, sin = self.rope.cos[:n], self.rope.sin[:n]

        def norm(x, weight):
            return F.rms_norm(x, (HIDDEN,), weight, 1e-6)

        def turn(x):  # [heads, n, DIM]
            low, high = x[..., : DIM // 2], x[..., DIM // 2 :]
            return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

        for layer, spec in enumerate(self.attention):
            mask = (key <= query) & ((key > query - spec.window) if spec.window else (key == key))
            h = norm(x, self.norms[2 * layer]) @ self.qkv[layer].weight.T
            q, k, v = h.split((HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM), -1)
            q = turn(q.view(n, HEADS, DIM).transpose(0, 1))
            k = turn(k.view(n, KV_HEADS, DIM).transpose(0, 1)).repeat_interleave(HEADS // KV_HEADS, 0)
            v = v.view(n, KV_HEADS, DIM).transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, 0)
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + attended.transpose(0, 1).reshape(n, -1) @ self.out[layer].weight.T
            gate, up = (norm(x, self.norms[2 * layer + 1]) @ self.gate_up[layer].weight.T).chunk(2, -1)
            x = x + (F.silu(gate) * up) @ self.down[layer].weight.T
        return norm(x, self.norms[4]) @ self.head.weight.T

    def dense_greedy(self, prompt, n):
        ids = list(prompt)
        for _ in range(n):
            ids.append(int(self.dense_logits(ids)[-1].argmax()))
        return ids[len(prompt) :]


def strided_pages(pages, page_tokens):
    size = page_tokens * KV_HEADS * DIM
    flat = torch.full((pages * (size + 24),), math.nan)
    return flat.as_strided((pages, page_tokens, KV_HEADS, DIM), (size + 24, KV_HEADS * DIM, DIM, 1), 8)


@dataclass
class Row:
    """One row of a hand-made plan. `ids` None: the relay (one token)."""

    slot: int
    start: int
    ids: list[int] | None
    samples: int = 0
    targets: list[int] | None = None

    @property
    def count(self):
        return 1 if self.ids is None else len(self.ids)


class HandScheduler:
    """Pages, tables and plans for rows that a test names. Never frees a page."""

    def __init__(self, pages=400, seed=0):
        order = np.random.default_rng(seed).permutation(pages - 1) + 1
        self.free = [order.tolist(), order.tolist()]
        self.held = {}
        self.step = 0
        self.setups = []
        self.handles = {}

    def admit(self, slot, prompt, rules=None, seed=0, known=None, **sampling):
        """`known`: prompt and earlier output of a resumed request."""
        params = SamplingParams(**({"temperature": 0.0} | sampling))
        history = np.array(known or prompt, dtype=np.int32) if params.needs_history else np.zeros(0, np.int32)
        handle = len(self.handles) + 100
        self.handles[slot] = handle
        self.held[slot] = [0, 0]
        self.setups.append(SlotSetup(slot, handle, len(prompt), params, rules or TokenRules(), seed, history))

    def plan(self, *rows):
        deltas = []
        for row in rows:
            for group, page in enumerate(PAGES):
                first, needed = self.held[row.slot][group], -(-(row.start + row.count) // page)
                if needed > first:
                    pages = tuple(self.free[group].pop() for _ in range(needed - first))
                    deltas.append(TableDelta.run(row.slot, group, first, pages))
                    self.held[row.slot][group] = needed
        setups, self.setups = tuple(self.setups), []
        self.step += 1
        return StepPlan(
            step=self.step,
            slots=np.array([row.slot for row in rows], np.int32),
            handles=np.array([self.handles[row.slot] for row in rows], np.int64),
            starts=np.array([row.start for row in rows], np.int32),
            counts=np.array([row.count for row in rows], np.int32),
            samples=np.array([row.samples for row in rows], np.int32),
            relay=np.array([row.ids is None for row in rows], bool),
            ids=np.array([token for row in rows for token in row.ids or ()], np.int32),
            tables=tuple(deltas),
            setups=setups,
            prompt_logprobs={
                i: np.array(row.targets, np.int32) for i, row in enumerate(rows) if row.targets is not None
            },
        )


class Bench:
    """A model, an executor and a hand scheduler; `run` executes one plan at once."""

    def __init__(self, model=None):
        self.model = model or TinyModel()
        kv = [LayerKV(strided_pages(400, page), strided_pages(400, page)) for page in PAGES]
        columns = [-(-MAX_LEN // page) for page in PAGES]
        self.kv = kv
        self.executor = TorchExecutor(self.model, ReferenceOps(), kv, columns, SLOTS, MAX_LEN, move=self.move)
        self.scheduler = HandScheduler()

    def move(self, moves):
        """What stood at the source is spoiled."""
        for move in moves:
            for part in self.kv[move.group].k, self.kv[move.group].v:
                part[move.target] = part[move.source]
                part[move.source] = math.nan

    def admit(self, slot, prompt, **more):
        self.scheduler.admit(slot, prompt, **more)

    def run(self, *rows):
        return self.executor.run(self.executor.stage(self.scheduler.plan(*rows)))

    def generate(self, slot, prompt, n, **sampling):
        """Prefill in one step, then decode alone by the relay. -> n tokens"""
        self.admit(slot, prompt, **sampling)
        result = self.run(Row(slot, 0, list(prompt), 1))
        tokens = [int(result.tokens[0, 0])]
        for position in range(len(prompt), len(prompt) + n - 1):
            result = self.run(Row(slot, position, None, 1))
            assert not result.failed, result.failed
            tokens.append(int(result.tokens[0, 0]))
        return tokens


def make_prompt(n, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, n).tolist()


@pytest.fixture(name="Row")
def _row():
    return Row


@pytest.fixture
def bench():
    return Bench()


@pytest.fixture
def new_bench():
    return Bench


@pytest.fixture(name="TinyModel")
def _tiny_model():
    return TinyModel


@pytest.fixture(name="make_prompt")
def _make_prompt():
    return make_prompt
