"""GGML blocks taken apart by one native call a tensor.

Owns: which formats there are, the call.
Does not know: files, how the parts are packed afterwards.
Invariants: bit for bit what `models/blocks.py` makes in plain torch, for each format it knows.
"""

from __future__ import annotations

from torch import Tensor

from aengine.kernels.native.library import UNPACK_ARGS, Context, check

KINDS = {
    "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14,
}  # fmt: skip


class Unpacker:
    """Takes blocks apart for one context."""

    def __init__(self, context: Context) -> None:
        self._unpack = context.operation("unpack")

    def unpack(self, kind: str, blocks: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor | None) -> None:
        """blocks uint8 [B, bytes] of the format `kind` -> codes uint8 [B, elements], scale, minimum fp32 [B, groups];
        all contiguous, `minimum` None where the format has none. Raises NativeError for another format."""
        least = 0 if minimum is None else minimum.data_ptr()
        args = UNPACK_ARGS.pack(
            blocks.data_ptr(), KINDS.get(kind, -1), blocks.shape[0], codes.data_ptr(), scale.data_ptr(), least
        )  # fmt: skip
        check(self._unpack(args), "unpack")
