"""Public serving traces: lengths, and prompts that share what the originals shared.

Owns: reading the two trace files and turning block ids into tokens.
Does not know: pools, caches.
Invariants: a block id always expands to the same 512 tokens, and different ids to different ones.

Files, not part of the repository (pass their folder with --traces):
* `azure_conv.csv`: Azure LLM inference trace 2023, conversation (CC-BY): TIMESTAMP,ContextTokens,GeneratedTokens.
* `conversation_trace.jsonl`: Mooncake, FAST'25 (Apache-2.0): {"timestamp", "input_length", "output_length",
  "hash_ids"}, one id per 512 prompt tokens, chained by prefix.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

AZURE = "azure_conv.csv"
MOONCAKE = "conversation_trace.jsonl"
BLOCK_TOKENS = 512
DEFAULT = Path(__file__).resolve().parent.parent.parent / "shared" / "traces"


@dataclass(frozen=True, slots=True)
class Traced:
    """One request: its lengths in tokens; `blocks`: ids of its prompt's 512-token blocks (empty where unknown)."""

    prompt: int
    output: int
    blocks: tuple[int, ...] = ()


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--traces", type=Path, default=DEFAULT, help="folder with the trace files (see bench/traces.py)"
    )


def azure(folder: Path) -> list[Traced]:
    """Requests of the Azure conversation trace in order of arrival; those without a prompt or an answer left out."""
    with _open(folder / AZURE) as lines:
        rows = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(lines)]
    return [Traced(prompt, output) for prompt, output in rows if prompt and output]


def mooncake(folder: Path) -> list[Traced]:
    """Requests of the Mooncake conversation trace in order of arrival."""
    out = []
    with _open(folder / MOONCAKE) as lines:
        for line in lines:
            row = json.loads(line)
            out.append(Traced(row["input_length"], max(1, row["output_length"]), tuple(row["hash_ids"])))
    return out


def _open(path: Path):
    try:
        return path.open(encoding="utf-8", newline="")
    except OSError as error:
        sys.exit(
            f"cannot read the trace {path}: {error.strerror}.\nThe traces are public but not part of this repository; "
            f"pass the folder that holds {AZURE} and {MOONCAKE} with --traces DIR."
        )


def expand(request: Traced) -> NDArray[np.int32]:
    """Prompt tokens int32 [prompt]: 512 pseudo-tokens per block id, cut to the prompt's length."""
    ids = np.asarray(request.blocks, np.uint64)
    places = ids[:, None] * np.uint64(BLOCK_TOKENS) + np.arange(BLOCK_TOKENS, dtype=np.uint64)
    mixed = places * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(33)  # the high bits of a golden-ratio product
    return mixed.astype(np.int32).reshape(-1)[: request.prompt].copy()
