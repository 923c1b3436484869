"""The CUDA backend in Triton. Importing it imports Triton: only code that has a CUDA device does.

Owns: `TritonOps`, the one door other rooms use; `sampling` beside it.
Does not know: models, runners, environment variables.
Invariants: nothing waits for the device.
"""

from aengine.kernels.triton.ops import TritonOps

__all__ = ["TritonOps"]
