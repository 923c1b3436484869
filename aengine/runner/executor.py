"""The choice of how a torch model's steps are run.

Owns: `make_executor`.
Does not know: configuration, memory, reports.
Invariants: a line says what was chosen and why; nothing is downgraded without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aengine.kernels.native import NativeOps
from aengine.kernels.native.capture import NotCapturable, Sizes
from aengine.kernels.ops import LayerKV, LayerState, Model, Ops
from aengine.runner.captured_step import CapturedExecutor, CapturedStep
from aengine.runner.native_sampler import NativeSampler
from aengine.runner.torch_step import TorchExecutor
from aengine.types import PageMove


def make_executor(
    model: Model,
    ops: Ops,
    kv: Sequence[LayerKV],
    states: Sequence[LayerState],
    table_columns: Sequence[int],
    *,
    slots: int,
    step_tokens: int,
    context: int,
    zero: Callable[[Sequence[int]], None],
    move: Callable[[Sequence[PageMove]], None],
    capture: bool,
) -> tuple[TorchExecutor | CapturedExecutor, str]:
    """(executor, a line for the report). `step_tokens`: the most of one step; see `TorchExecutor` for the rest."""
    sampler = NativeSampler(ops.context, slots, model.vocab_size, context) if isinstance(ops, NativeOps) else None
    eager = TorchExecutor(
        model,
        ops,
        kv,
        table_columns,
        slots,
        context,
        zero=zero,
        move=move,
        states=states,
        sampler=sampler,
    )
    one_by_one = "steps run one operation at a time"
    if not isinstance(ops, NativeOps) or sampler is None:
        return eager, f"{one_by_one}, in plain torch"
    if not capture:
        return eager, f"{one_by_one}: capture is off"
    try:
        limits = Sizes(step_tokens, slots, step_tokens, context + 1)  # a zombie row stands one behind the context
        captured = CapturedStep(model, ops, sampler, eager.state, kv, states, limits)
    except NotCapturable as error:
        return eager, f"{one_by_one}, for the model cannot be captured: {error}"
    return CapturedExecutor(eager, captured), captured.describe()
