"""Device code in Triton's language, which is read by a compiler of its own: no annotations, no Python types.

Owns: the kernels.
Does not know: tensors, shapes of batches, when a kernel is launched.
Invariants: nothing here is called but from a launch; every kernel also runs in Triton's interpreter.
"""
