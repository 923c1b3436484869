"""What narrower KV pages cost in fidelity: log-probabilities of SmolLM2-135M on a text, against float32 pages.

    python -m bench.kv_dtype [--tokens 400]

Every token is predicted from keys and values read back from pages, in steps of 64 tokens with the native kernels and
float32 activations.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from aengine.config import home, usable_home
from aengine.engine.build_cpu import available_cores
from aengine.engine.page_groups import kv_groups
from aengine.kernels.native import NativeOps, Unavailable, load_native_ops
from aengine.kernels.ops import Model, StepBatch
from aengine.memory import plan
from aengine.memory.arena import Arena
from aengine.models.loader import load_model, load_tokenizer
from aengine.models.store import resolve
from bench.report import Report

STEP, PAGE = 64, 16


def log_probabilities(model: Model, ops: NativeOps, ids: list[int], kind: str) -> Tensor:
    """fp32 [tokens, vocabulary] with pages of `kind`."""
    pages = plan(kv_groups(model.attention, kind, PAGE), 256 * 2**20)
    kv = Arena(pages).layer_kv([(spec.group, spec.layer) for spec in model.attention])
    table = torch.arange(1, 2 + len(ids) // PAGE, dtype=torch.int32).unsqueeze(0)
    out = []
    for start in range(0, len(ids), STEP):
        part = ids[start : start + STEP]
        batch = StepBatch(
            ids=torch.tensor(part, dtype=torch.int32),
            positions=torch.arange(start, start + len(part), dtype=torch.int32),
            row_offsets=torch.tensor([0, len(part)], dtype=torch.int32),
            context=torch.tensor([start + len(part)], dtype=torch.int32),
            tables=(table,),
            kv=kv,
            max_context=start + len(part),
            host_counts=(len(part),),
            host_starts=(start,),
        )
        out.append(model.logits(ops, model.forward(ops, batch)).log_softmax(-1))
    return torch.cat(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--text", type=Path, default=Path(__file__).parent.parent / "docs" / "rooms.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ops = load_native_ops(usable_home() / "native", available_cores())
    if isinstance(ops, Unavailable):
        print(ops.reason)
        return 1
    files = resolve("smollm2-135m", home=home())
    report = Report("kv_dtype", "narrow KV pages keep the model's predictions", {"tokens": args.tokens})
    model = load_model(files, ops, torch.float32)
    ids = list(load_tokenizer(files).encode(args.text.read_text()))[: args.tokens]
    exact = log_probabilities(model, ops, ids, "float32")
    told = torch.tensor(ids[1:])
    for kind in ("bfloat16", "int8"):
        found = log_probabilities(model, ops, ids, kind)
        divergence = (exact.exp() * (exact - found)).sum(-1)
        shift = (exact - found)[:-1].gather(1, told.unsqueeze(1)).abs()
        figures = {
            "mean_kl": float(divergence.mean()),
            "max_kl": float(divergence.max()),
            "max_shift_of_text": float(shift.max()),
            "mean_shift_of_text": float(shift.mean()),
            "same_best": float((exact.argmax(-1) == found.argmax(-1)).float().mean()),
        }
        report.figures[kind] = figures
        print(f"{kind:9}" + "".join(f"  {name} {value:.2e}" for name, value in figures.items()))
    for kind, limit in (("bfloat16", 1e-3), ("int8", 1e-2)):
        report.at_most(f"mean KL of {kind} pages", report.figures[kind]["mean_kl"], limit, "nats")
    report.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
