"""Claim: drafts copied from a text's own repetitions speed up texts that repeat themselves, others lose 3 % at most.

Two engines in one process, one with speculation, one without, answer the same prompts in turn (A B, B A, …), which
are in both prefix caches before. A figure is the median of paired ratios of wall time; tokens must be the same.

    words            prompts of random words, as bench/load.py makes them, one stream
    code … story     greedy answers to chat questions, one stream
    sampled          the same questions at temperature 0.8 with seeds, one stream
    N rows           N answers at once: all of these by turns

    python bench/speculation.py [--rounds 3] [--rows 4 16 64] [--only code list] [--speculate 8] [--threads 2]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from load import Prompts
from report import Report

from aengine import LLM, EngineConfig, SamplingParams
from aengine.config import DeviceConfig, ModelConfigArgs, SchedulerConfig, home
from aengine.models.loader import load_tokenizer
from aengine.models.store import resolve

TEXT = (
    "The river Alda rises in the northern hills and flows south for two hundred miles. In spring it carries melted "
    "snow, and the towns along it build low walls of sand. The largest town, Marsholm, has a stone bridge with nine "
    "arches, which was built in 1702 and rebuilt in 1911. The bridge is the only crossing for thirty miles, so the "
    "market of Marsholm draws farmers from both sides. "
)
QUESTIONS = {
    "code": ("Write a Python class Stack with push, pop and peek.", "Write HTML for a table of three rows."),
    "summary": (f"Summarise this text:\n\n{TEXT}", f"Repeat this text without mistakes:\n\n{TEXT}"),
    "list": ("List twenty animals with one fact each.", "Give me ten tips for learning to cook."),
    "story": ("Tell me a story about a lighthouse keeper.", "Tell me a story about a dragon who fears fire."),
}
SLOWER_LIMIT, FASTER_LIMIT = 0.97, 1.2
TOKENS = {1: 160, 4: 128, 16: 80, 64: 32}  # of an answer, by rows


@dataclass(frozen=True)
class Case:
    name: str
    prompts: tuple[Any, ...]
    sampling: tuple[SamplingParams, ...]


def chat(question: str) -> list[Mapping[str, str]]:
    return [{"role": "user", "content": question}]


def params(tokens: int, seed: int | None = None) -> SamplingParams:
    return SamplingParams(temperature=0.0 if seed is None else 0.8, seed=seed, max_tokens=tokens)


def cases(words: Prompts, rows: Sequence[int]) -> list[Case]:
    most = TOKENS[1]
    fixed = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
    made = [Case("words", (list(words.make(128, str(i)).ids),), (fixed,)) for i in range(2)]
    made += [Case(kind, (chat(each),), (params(most),)) for kind, asked in QUESTIONS.items() for each in asked]
    every = [each for pair in zip(*QUESTIONS.values(), strict=True) for each in pair]
    made += [Case("sampled", (chat(each),), (params(most, seed),)) for seed, each in enumerate(every)]
    for count in rows:
        tokens = TOKENS.get(count, 64)
        asked = [every[i % len(every)] for i in range(count)]
        seeds = [None if i // len(every) % 2 == 0 else i for i in range(count)]
        each = tuple(params(tokens, seed) for seed in seeds)
        made.append(Case(f"{count} rows", tuple(chat(question) for question in asked), each))
    return made


def engine(args: argparse.Namespace, speculate: int) -> LLM:
    return LLM(
        config=EngineConfig(
            model=ModelConfigArgs(model=args.model, max_model_len=2048),
            scheduler=SchedulerConfig(speculate=speculate),
            device=DeviceConfig(device="cpu", threads=args.threads),
        )
    )


@dataclass
class Run:
    seconds: float
    tokens: list[list[int]]
    steps: int
    drafted: int
    accepted: int


def run(llm: LLM, case: Case) -> Run:
    before, began_s = llm.engine.stats(), time.perf_counter()
    outputs = llm.generate(list(case.prompts), list(case.sampling), progress=False)
    took_s, after = time.perf_counter() - began_s, llm.engine.stats()
    return Run(
        took_s,
        [list(output.outputs[0].token_ids) for output in outputs],
        after.steps - before.steps,
        after.drafted_tokens - before.drafted_tokens,
        after.accepted_tokens - before.accepted_tokens,
    )


def compare(off: LLM, on: LLM, chosen: Sequence[Case], rounds: int) -> dict[str, dict[str, float]]:
    pairs: dict[str, list[tuple[Run, Run]]] = {}
    for turn in range(rounds):
        for case in chosen:
            if turn % 2:
                with_drafts, plain = run(on, case), run(off, case)
            else:
                plain, with_drafts = run(off, case), run(on, case)
            assert plain.tokens == with_drafts.tokens, f"{case.name}: tokens differ"
            pairs.setdefault(case.name, []).append((plain, with_drafts))
    return {name: figures(own) for name, own in pairs.items()}


def figures(pairs: Sequence[tuple[Run, Run]]) -> dict[str, float]:
    tokens = sum(len(one) for plain, _ in pairs for one in plain.tokens)
    drafted = sum(on.drafted for _, on in pairs)
    return {
        "ratio": statistics.median(off.seconds / on.seconds for off, on in pairs),
        "worst": min(off.seconds / on.seconds for off, on in pairs),
        "best": max(off.seconds / on.seconds for off, on in pairs),
        "tok_s_off": tokens / sum(off.seconds for off, _ in pairs),
        "tok_s_on": tokens / sum(on.seconds for _, on in pairs),
        "tokens_a_step": tokens / sum(on.steps for _, on in pairs),
        "drafted": drafted,
        "accepted": sum(on.accepted for _, on in pairs) / drafted if drafted else 0.0,
    }


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="*", default=[4, 16, 64])
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--speculate", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    report = Report("speculation", (__doc__ or "").splitlines()[0].removeprefix("Claim: "), vars(args))
    tokenizer = load_tokenizer(resolve(args.model, home=home(), progress=None))
    words = Prompts.of(lambda text: tokenizer.encode(text, add_special_tokens=False))
    chosen = [case for case in cases(words, args.rows) if not args.only or case.name in args.only]
    off, on = engine(args, 0), engine(args, args.speculate)
    try:
        for llm in (off, on):
            for case in chosen:
                llm.generate(list(case.prompts), SamplingParams(max_tokens=2), progress=False)
        report.figures.update(compare(off, on, chosen, args.rounds))
    finally:
        off.close()
        on.close()
    for name, told in report.figures.items():
        print(
            f"{name:10} {told['tok_s_off']:7.1f} -> {told['tok_s_on']:7.1f} tokens/s  x{told['ratio']:.2f} "
            f"({told['worst']:.2f} to {told['best']:.2f})  {told['tokens_a_step']:.2f} tokens a step  "
            f"{told['accepted']:.0%} of {told['drafted']:.0f} drafts accepted"
        )
        report.at_least(f"{name}: speed with drafts to without", told["ratio"], SLOWER_LIMIT)
    for name in {"words", "list"} & report.figures.keys():
        report.at_least(f"{name}: speed where text repeats", report.figures[name]["ratio"], FASTER_LIMIT)
    return report.close()


if __name__ == "__main__":
    main()
