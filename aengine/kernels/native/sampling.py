"""Sampling helpers on native kernels: the best token, log-sum-exp, a draw by Gumbel noise.

Owns: the mapping from logits tensors to argument structs.
Does not know: which rows want what, the order of rules, seeds.
Invariants: a row's results depend on that row alone. The noise is the hash of `aengine.runner.noise`; fp32 logarithms
may differ from torch's in the last bit, so one engine draws with one implementation throughout.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.native.library import GUMBEL_ARGS, ROW_STATS_ARGS, Context, check


class NativeSampling:
    """Works on fp32 CPU logits [N, V] with a dense last dimension."""

    def __init__(self, context: Context) -> None:
        self._row_stats = context.operation("row_stats")
        self._gumbel = context.operation("gumbel")

    def argmax(self, logits: Tensor) -> Tensor:
        """int32 [N]; of equal values the lowest index; NaN is passed over."""
        best = torch.empty(logits.shape[0], dtype=torch.int32)
        self._stats(logits, best.data_ptr(), 0)
        return best

    def log_sum_exp(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(argmax int32 [N], log of the sum of exponentials fp32 [N]); NaN where a row holds NaN."""
        rows = logits.shape[0]
        best, result = torch.empty(rows, dtype=torch.int32), torch.empty(rows, dtype=torch.float32)
        self._stats(logits, best.data_ptr(), result.data_ptr())
        return best, result

    def choose(
        self,
        logits: Tensor,
        best: Tensor,
        temperatures: NDArray[np.float32],
        k0: NDArray[np.uint32],
        k1: NDArray[np.uint32],
    ) -> Tensor:
        """int32 [N]: argmax of (logits - max) / temperature + noise. `best` int32 [N] is the argmax of each row."""
        _check_logits(logits)
        arrays = [
            np.ascontiguousarray(a, dtype)
            for a, dtype in ((temperatures, np.float32), (k0, np.uint32), (k1, np.uint32))
        ]
        tokens = torch.empty(logits.shape[0], dtype=torch.int32)
        args = GUMBEL_ARGS.pack(
            logits.data_ptr(),
            *logits.shape,
            logits.stride(0),
            best.data_ptr(),
            *(a.ctypes.data for a in arrays),
            tokens.data_ptr(),
        )
        check(self._gumbel(args), "gumbel")
        return tokens

    def _stats(self, logits: Tensor, best: int, log_sum_exp: int) -> None:
        _check_logits(logits)
        args = ROW_STATS_ARGS.pack(logits.data_ptr(), *logits.shape, logits.stride(0), best, log_sum_exp)
        check(self._row_stats(args), "row_stats")


def _check_logits(logits: Tensor) -> None:
    if logits.dtype is not torch.float32 or logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits must be float32 [N, V] with dense rows, not {logits.dtype} {tuple(logits.shape)}")
