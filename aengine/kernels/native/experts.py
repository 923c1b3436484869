"""The experts of a mixture as the arrays its kernel reads.

Owns: the memory of those arrays, the kernel's workspaces, the packing of its arguments.
Does not know: how a linear is packed, tensors' lives, routing.
Invariants: an expert's linear is the argument struct of `ae_linear` but for x, y and rows, so whatever form a packed
weight takes, the mixture takes it too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from aengine.errors import NotSupported
from aengine.kernels.native.library import MIXTURE_ARGS
from aengine.kernels.ops import Experts

_SCORING = {"softmax": 0, "sigmoid": 1}
_WEIGH = {"input": 0, "output": 1}
_ACTIVATION = {"silu": 0, "clamped": 1}


class PackedExperts:
    """`gate_up`, `down`: the packed argument structs of all experts, one after another; `dtype` of activations."""

    def __init__(self, experts: Experts, dtype: torch.dtype, gate_up: bytes, down: bytes) -> None:
        self.experts, self.dtype = experts, dtype
        dim, ffn = experts.down[0].out_features, experts.gate_up[0].out_features // 2
        if not 0 < experts.top_k <= len(experts.gate_up):
            raise NotSupported(f"a mixture of {len(experts.gate_up)} experts cannot choose {experts.top_k}")
        self._gate_up, self._down = ctypes.create_string_buffer(gate_up), ctypes.create_string_buffer(down)
        self._sizes = (dim, ffn, len(experts.gate_up), experts.top_k)
        k = experts.top_k
        self.workspaces: tuple[tuple[tuple[int, ...], torch.dtype], ...] = (
            ((k,), torch.int32),  # chosen
            ((k,), torch.float32),  # weights
            ((), torch.int32),  # members
            ((dim,), dtype),  # gathered
            ((2 * ffn,), dtype),  # wide
            ((ffn,), dtype),  # active
            ((dim,), dtype),  # results
            ((dim,), torch.float32),  # total
        )

    def args(self, x: int, scores: int, out: int, code: int, rows: int, workspaces: Sequence[Tensor]) -> bytes:
        """x, scores and out are addresses; workspaces [rows, *shape] as `self.workspaces` says."""
        dim, ffn, count, top_k = self._sizes
        e = self.experts
        return MIXTURE_ARGS.pack(
            x, scores, out, ctypes.addressof(self._gate_up), ctypes.addressof(self._down),
            *(workspace.data_ptr() for workspace in workspaces),
            code, rows, dim, ffn, count, top_k, _SCORING[e.scoring], _WEIGH[e.weigh], _ACTIVATION[e.activation],
            e.alpha, e.limit,
        )  # fmt: skip
