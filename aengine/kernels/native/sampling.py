"""Sampling and log-probabilities on native kernels.

Owns: the layout of a slot's sampling state, the packing of the kernels' arguments.
Does not know: requests, seeds' origin, messages.
Invariants: a position's results depend on its logits, its slot and its position alone. The noise is the hash of
`aengine.runner.noise`; fp32 logarithms may differ from torch's in the last bit, so one engine samples with one
implementation throughout.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from aengine.kernels.native.library import LOGPROBS_ARGS, SAMPLE_ARGS, Context, check

# ae_slot of api.h, member by member.
SLOT = np.dtype(
    [
        *((name, np.float64) for name in ("temperature", "top_p", "min_p")),
        ("top_k", np.int64),
        ("seed", np.uint64),
        *((name, np.int64) for name in ("alternatives", "always_ruled", "stops_until")),
        ("allowed", np.uint64),
        ("allowed_count", np.int64),
        *((name, np.uint64) for name in ("biased", "bias")),
        ("biased_count", np.int64),
        ("bad", np.uint64),
        ("bad_count", np.int64),
        ("bad_words", np.uint64),
        ("bad_words_count", np.int64),
        ("stops", np.uint64),
        ("stops_count", np.int64),
        ("history", np.uint64),
        *((name, np.int64) for name in ("history_count", "prompt_tokens")),
        *((name, np.float64) for name in ("repetition", "frequency", "presence")),
        ("mask", np.uint64),
    ]
)
# Greedy, no rules.
NEUTRAL = {"top_p": 1.0, "alternatives": -1, "allowed_count": -1, "repetition": 1.0}


class LogprobArrays:
    """Outputs for `rows` positions: ids int32 and values fp32 [rows, width], ranks int32 [rows]; chosen first."""

    def __init__(self, rows: int, alternatives: int) -> None:
        self.width = 1 + alternatives
        self.ids = np.empty((rows, self.width), dtype=np.int32)
        self.values = np.empty((rows, self.width), dtype=np.float32)
        self.ranks = np.empty(rows, dtype=np.int32)

    def addresses(self) -> tuple[int, int, int, int]:
        """(width, ids, values, ranks) as the kernels' arguments want them."""
        return self.width, self.ids.ctypes.data, self.values.ctypes.data, self.ranks.ctypes.data


NO_LOGPROBS = (0, 0, 0, 0)
ALL_ROWS = (0, 0)


class NativeSampling:
    """Works on fp32 CPU logits [N, V] with a dense last dimension, which it leaves as they are."""

    def __init__(self, context: Context) -> None:
        self._sample = context.operation("sample")
        self._logprobs = context.operation("logprobs")

    def sample(
        self, logits: Tensor, table: np.ndarray, slots: np.ndarray, positions: np.ndarray, alternatives: int
    ) -> tuple[np.ndarray, np.ndarray, LogprobArrays | None]:
        """-> (tokens int32 [N], faults int32 [N] as in api.h, log-probabilities of the rows that want them).

        `table` of SLOT by slot; slots int32 [N]; positions int64 [N] of the sampled tokens; `alternatives` the most
        that a slot among them wants, -1 if none does.
        """
        rows = _check_logits(logits)
        tokens, faults = np.empty(rows, dtype=np.int32), np.empty(rows, dtype=np.int32)
        logprobs = LogprobArrays(rows, alternatives) if alternatives >= 0 else None
        args = SAMPLE_ARGS.pack(
            logits.data_ptr(), *logits.shape, logits.stride(0), table.ctypes.data, slots.ctypes.data,
            positions.ctypes.data, tokens.ctypes.data, faults.ctypes.data,
            *(NO_LOGPROBS if logprobs is None else logprobs.addresses()), *ALL_ROWS,
        )  # fmt: skip
        check(self._sample(args), "sample")
        return tokens, faults, logprobs

    def logprobs(self, logits: Tensor, targets: np.ndarray, alternatives: int) -> LogprobArrays:
        """Of targets int32 [N] and the best tokens: NaN for rows that hold NaN or infinity, or no finite logit."""
        rows = _check_logits(logits)
        out = LogprobArrays(rows, min(alternatives, logits.shape[1]))
        args = LOGPROBS_ARGS.pack(
            logits.data_ptr(), *logits.shape, logits.stride(0), out.width - 1, targets.ctypes.data, *out.addresses()
        )
        check(self._logprobs(args), "logprobs")
        return out


def _check_logits(logits: Tensor) -> int:
    if logits.dtype is not torch.float32 or logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits must be float32 [N, V] with dense rows, not {logits.dtype} {tuple(logits.shape)}")
    return len(logits)
