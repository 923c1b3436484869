"""Answers of the references, computed once (regenerate.py) and kept, so that a test run need not compute them again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

SMOLLM2 = Path(__file__).parent / "smollm2-135m.json"
TOKENS = 64


@dataclass(frozen=True)
class Answer:
    """Greedy tokens after a prompt; of each its log-probability and its lead over the runner-up, both in nats."""

    prompt_ids: list[int]
    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]


def smollm2() -> list[Answer]:
    return [Answer(**answer) for answer in json.loads(SMOLLM2.read_text())]
