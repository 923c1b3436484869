"""Claim: what the engine computes differs from the model's own numbers less than a bf16 run of transformers does.

Over windows of text, compares next-token distributions of several modes with transformers' fp32 run of the same
(dequantised) weights, and transformers' own bf16 run beside them. Per mode: mean and largest KL divergence from the
reference in nats, share of positions with the same most likely token, mean and largest difference of the
log-probability of the token that follows, and perplexity. A mode is a dtype, a --quantize value, or both with a plus;
int8 and int4 load a plain fp32 copy of the weights, because a file's own integers are never fitted anew.

    python bench/fidelity.py [--model smollm2-135m] [--tokens 4096] [--window 512]
        [--modes float32,auto,bfloat16,int8,int4] [--kernels auto] [--file TEXT]
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from report import Report
from safetensors.torch import save_file
from torch import Tensor

from aengine.config import DeviceConfig, EngineConfig, ModelConfigArgs, home
from aengine.engine.build_cpu import load_for_cpu
from aengine.engine.ledger import Ledger
from aengine.kernels.ops import LayerKV, LayerState, Model, Ops, StepBatch, state_specs
from aengine.models.loader import load_tokenizer
from aengine.models.store import ModelFiles, resolve

PAGE = 16
DTYPES = ("auto", "float32", "bfloat16")
QUANTIZE = ("none", "int8", "int4")
# Prose of the standard library: the same on every machine with the same Python.
MODULES = (
    "argparse", "asyncio", "bisect", "calendar", "collections", "configparser", "contextlib", "csv", "dataclasses",
    "decimal", "difflib", "doctest", "enum", "fractions", "functools", "heapq", "http.cookies", "inspect", "itertools",
    "json", "logging", "math", "optparse", "os", "pathlib", "pickle", "random", "shutil", "statistics", "string",
    "subprocess", "textwrap", "threading", "timeit", "tokenize", "trace", "typing", "unittest", "uuid", "zipfile",
)  # fmt: skip

Logits = Callable[[list[int]], Tensor]


def prose() -> str:
    texts = []
    for name in MODULES:
        module = importlib.import_module(name)
        public = [value for key, value in sorted(vars(module).items()) if not key.startswith("_")]
        own = [value for value in public if getattr(value, "__module__", None) == name]
        docs = [inspect.getdoc(module), *(inspect.getdoc(value) for value in own)]
        texts += [text for text in docs if text and len(text) > 200]
    return "\n\n".join(texts)


def whole_sequence(model: Model, ops: Ops, ids: Sequence[int]) -> Tensor:
    """Logits [len(ids), vocab] of one step over one sequence, on pages of its own."""
    tokens, pages = len(ids), -(-len(ids) // PAGE) + 1
    groups = 1 + max(spec.group for spec in model.attention)
    table = torch.arange(1, pages, dtype=torch.int32).unsqueeze(0)
    states = state_specs(model)
    batch = StepBatch(
        ids=torch.tensor(ids, dtype=torch.int32),
        positions=torch.arange(tokens, dtype=torch.int32),
        row_offsets=torch.tensor([0, tokens], dtype=torch.int32),
        context=torch.tensor([tokens], dtype=torch.int32),
        tables=(table,) * groups + (torch.tensor([[0, 1]], dtype=torch.int32),) * len({spec.group for spec in states}),
        kv=tuple(
            LayerKV(*(torch.zeros(pages, PAGE, spec.kv_heads, spec.head_dim, dtype=model.dtype) for _ in range(2)))
            for spec in model.attention
        ),
        max_context=tokens,
        host_counts=(tokens,),
        host_starts=(0,),
        states=tuple(
            LayerState(tuple(torch.zeros(2, *part.shape, dtype=part.dtype) for part in spec.parts)) for spec in states
        ),
    )
    return model.logits(ops, model.forward(ops, batch)).clone()


def engine_mode(name: str, files: ModelFiles, model: str, kernels: str) -> Logits:
    dtype, quantize = "auto", "auto"
    for part in name.split("+"):
        if part in DTYPES:
            dtype = part
        elif part in QUANTIZE:
            quantize = part
        else:
            raise SystemExit(f"mode {name!r}: {part!r} is not one of {', '.join((*DTYPES, *QUANTIZE))}")
    config = EngineConfig(
        model=ModelConfigArgs(model=model, dtype=dtype, quantize=quantize), device=DeviceConfig(kernels=kernels)
    )
    ledger = Ledger(lambda *_: None, None)
    ops, loaded = load_for_cpu(config, files, ledger)
    print(f"{name}: {ops.name} kernels; {'; '.join(ledger.lines)}", flush=True)
    return lambda ids: whole_sequence(loaded, ops, ids)


def transformers_modes(files: ModelFiles, plain: Path) -> tuple[Logits, Logits]:
    """(fp32, bf16) runs of transformers' model on the same weights, which are saved in the folder `plain`."""
    from transformers import AutoModelForCausalLM

    place = (files.path.parent, {"gguf_file": files.path.name}) if files.kind == "gguf" else (files.path, {})
    exact = AutoModelForCausalLM.from_pretrained(place[0], dtype=torch.float32, **place[1]).eval()
    settings = {key: value for key, value in exact.config.to_dict().items() if key != "quantization_config"}
    (plain / "config.json").write_text(json.dumps(settings | {"architectures": [type(exact).__name__]}))
    tied = settings.get("tie_word_embeddings")
    weights = {key: value for key, value in exact.state_dict().items() if not (tied and key == "lm_head.weight")}
    save_file(weights, plain / "model.safetensors")
    rough = AutoModelForCausalLM.from_config(exact.config, dtype=torch.bfloat16).eval()
    rough.load_state_dict(exact.state_dict())

    def run(model: torch.nn.Module) -> Logits:
        return lambda ids: model(torch.tensor([ids]), use_cache=False).logits[0].float()

    return run(exact), run(rough)


@dataclass
class Distance:
    """Sums over positions."""

    positions: int = 0
    kl: float = 0.0
    kl_max: float = 0.0
    agree: int = 0
    off: float = 0.0
    off_max: float = 0.0
    nll: float = 0.0
    seconds: float = 0.0

    def add(self, wanted: Tensor, got: Tensor, following: Tensor) -> None:
        """`wanted`, `got`: log-probabilities [n, vocab]; `following` int64 [n - 1]."""
        kl = (wanted.exp() * (wanted - got)).sum(-1).clamp_(min=0)
        told = [x[: len(following)].gather(1, following.unsqueeze(1)) for x in (wanted, got)]
        off = (told[0] - told[1]).abs()
        self.positions += len(wanted)
        self.kl, self.kl_max = self.kl + float(kl.sum()), max(self.kl_max, float(kl.max()))
        self.agree += int((wanted.argmax(-1) == got.argmax(-1)).sum())
        self.off, self.off_max = self.off + float(off.mean()) * len(wanted), max(self.off_max, float(off.max()))
        self.nll -= float(told[1].mean()) * len(wanted)

    def figures(self) -> dict[str, float]:
        return {
            "mean_kl": self.kl / self.positions,
            "max_kl": self.kl_max,
            "greedy_agreement": self.agree / self.positions,
            "mean_logprob_off": self.off / self.positions,
            "max_logprob_off": self.off_max,
            "perplexity": math.exp(self.nll / self.positions),
            "tokens_per_s": self.positions / self.seconds if self.seconds else 0.0,
        }


def compare(windows: Sequence[list[int]], reference: Logits, modes: dict[str, Logits]) -> dict[str, dict[str, float]]:
    found = {name: Distance() for name in ("transformers float32", *modes)}
    with torch.inference_mode():
        for ids in windows:
            following = torch.tensor(ids[1:])
            wanted = torch.log_softmax(reference(ids), -1)
            found["transformers float32"].add(wanted, wanted, following)
            for name, logits in modes.items():
                began_s = time.perf_counter()
                raw = logits(ids)
                found[name].seconds += time.perf_counter() - began_s
                found[name].add(wanted, torch.log_softmax(raw, -1), following)
    return {name: distance.figures() for name, distance in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--modes", default="float32,auto,bfloat16,int8,int4")
    parser.add_argument("--kernels", default="auto", choices=["auto", "native", "reference"])
    parser.add_argument("--file", type=Path, help="a text to use instead of the standard library's documentation")
    args = parser.parse_args()
    files = resolve(args.model, home=home())
    text = args.file.read_text(encoding="utf-8") if args.file else prose()
    ids = load_tokenizer(files).encode(text)[: args.tokens]
    windows = [ids[at : at + args.window] for at in range(0, len(ids), args.window)]
    windows = [window for window in windows if len(window) > 1]
    shown = {"model": args.model, "tokens": sum(map(len, windows)), "window": args.window, "modes": args.modes}
    report = Report("fidelity", (__doc__ or "").splitlines()[0].removeprefix("Claim: "), shown)
    with tempfile.TemporaryDirectory() as folder:
        plain = ModelFiles("hf", Path(folder), files.name, files.home)
        reference, rough = transformers_modes(files, plain.path)
        modes = {"transformers bfloat16": rough}
        for name in args.modes.split(","):
            source = plain if {"int8", "int4"} & set(name.split("+")) else files
            modes[name] = engine_mode(name, source, args.model, args.kernels)
    report.figures.update(compare(windows, reference, modes))
    print(f"{'mode':<22} {'mean KL':>10} {'max KL':>10} {'agree':>8} {'|dlogp|':>9} {'max':>8} {'ppl':>8} {'tok/s':>7}")
    for name, row in report.figures.items():
        print(
            f"{name:<22} {row['mean_kl']:>10.2e} {row['max_kl']:>10.2e} {row['greedy_agreement']:>8.4f} "
            f"{row['mean_logprob_off']:>9.2e} {row['max_logprob_off']:>8.2e} {row['perplexity']:>8.3f} "
            f"{row['tokens_per_s']:>7.0f}"
        )
    limit = report.figures["transformers bfloat16"]["mean_kl"]
    for name in modes:
        if name == "float32":
            report.at_most("float32: mean KL from the reference", report.figures[name]["mean_kl"], 1e-6, "nats")
        elif name in ("auto", "bfloat16"):
            mean = report.figures[name]["mean_kl"]
            report.at_most(f"{name}: mean KL, against transformers' bfloat16", mean, limit, "nats")
    return 0 if report.close() else 1


if __name__ == "__main__":
    raise SystemExit(main())
