"""Attention that reads nothing back, and a step runner over the fake device.

Owns: `SteadyOps`, `FakeRunner`.
Does not know: what tests assert.
Invariants: every token reads the whole width of its row's block table, so shapes depend on the host's numbers alone.
"""

from __future__ import annotations

import torch

from aengine.kernels.reference import ReferenceOps
from aengine.kernels.reference_mixture import activate
from aengine.runner.cuda.step import CudaExecutor
from aengine.runner.cuda.stream import CudaStream
from aengine.types import StepResult
from tests.runner.cuda.fake import FakeCuda


class SteadyOps(ReferenceOps):
    name = "steady"
    capturable = True

    def attention(self, q, k, v, spec, batch, sinks=None, rope=None):
        if rope is not None:
            q, k = self.rope(q, batch.positions, rope), self.rope(k, batch.positions, rope)
        kv = batch.kv[spec.layer]
        page, count = kv.page_tokens, len(q)
        table = batch.tables[spec.group]
        rows = torch.searchsorted(batch.row_offsets[1:], torch.arange(count, device=q.device), right=True)
        positions = batch.positions.long()
        at = (table[rows, positions // page].long(), positions % page)
        kv.k.index_put_(at, k.to(kv.k.dtype))
        kv.v.index_put_(at, v.to(kv.v.dtype))
        used = table.index_select(0, rows).long()
        keys = torch.arange(used.shape[1] * page, device=q.device)
        seen = keys <= positions.unsqueeze(1)
        if spec.window:
            seen = seen & (keys > (positions - spec.window).unsqueeze(1))
        keep = seen[:, :, None, None]
        group = spec.heads // spec.kv_heads
        key, value = (
            torch.where(keep, part[used].flatten(1, 2).float(), 0.0).repeat_interleave(group, 2)
            for part in (kv.k, kv.v)
        )
        scores = (q.float().unsqueeze(1) * key).sum(-1) * spec.scale
        weights = scores.masked_fill(~seen.unsqueeze(2), float("-inf")).softmax(1)
        return (weights.unsqueeze(-1) * value).sum(1).to(q.dtype).flatten(1)

    def mixture(self, x, scores, experts):
        """All tokens through all experts: which were chosen is known on the device alone."""
        ranked = scores.float().sort(dim=-1, descending=True, stable=True)
        best, chosen = ranked.values[:, : experts.top_k], ranked.indices[:, : experts.top_k]
        weights = best.softmax(-1) if experts.scoring == "softmax" else best.sigmoid()
        of_each = torch.zeros_like(ranked.values).scatter(1, chosen, weights)
        out = torch.zeros(x.shape, device=x.device)
        for expert, (gate_up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True)):
            weight = of_each[:, expert, None]
            taken = x * weight if experts.weigh == "input" else x
            result = self.linear(activate(self.linear(taken, gate_up), experts), down)
            out = out + (result * weight if experts.weigh == "output" else torch.where(weight > 0, result, 0.0))
        return out.to(x.dtype)


class FakeRunner:
    """An executor on the fake device; `run` waits for each step, `launch` does not."""

    def __init__(self, model, kv, columns, slots, max_len, *, seed=0, graphs=False, pieces=0, eager=0.3, **more):
        self.device = FakeCuda(seed, eager)
        self.stream = CudaStream(self.device)
        self.executor = CudaExecutor(self.stream, model, SteadyOps(), kv, columns, slots, max_len, **more)
        self.line = self.executor.capture(tokens=pieces) if graphs else ""

    def launch(self, plan):
        """-> a function that waits for the step and gives its result."""
        staged, made = self.executor.stage(plan), []
        self.stream.launch(lambda: made.append(self.executor.run(staged)))
        point = self.stream.record()

        def result() -> StepResult:
            point.wait()
            return made[0].collect()

        return result

    def run(self, plan):
        return self.launch(plan)()
