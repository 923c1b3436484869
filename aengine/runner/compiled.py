"""A model's forward compiled by torch.compile, but for attention, states, mixtures and packed weights.

Owns: what is compiled, for which shapes, and when; the error where it cannot be.
Does not know: requests, which kernels answer the opaque calls, how a step is launched.
Invariants: everything is compiled at start-up: one program for a step of one token, one for all others, whatever their
rows and lengths. A model that cannot be compiled whole is refused with the reason; nothing is left out silently. Steps
in which a token sees a media item run as they would without compiling. On the CPU in fp32 tokens stay the same.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from aengine.errors import ConfigError
from aengine.kernels.ops import Model, Ops, StepBatch
from aengine.kernels.reference import ReferenceOps
from aengine.kernels.traced import Calls, TracedBatch, TracedOps

Backend = str | Callable[..., Any]
_DETAIL = "Developer debug context:"  # where dynamo's messages name what they met
REHEARSED_TOKENS = (7, 1)  # every number above 1 stands for all of them


def compile_forward(model: Model, ops: Ops, device: torch.device, *, backend: Backend = "inductor") -> str:
    """Put a compiled forward in the place of `model.forward` -> a line for the report.

    Raises ConfigError when there is no compiler, or the forward is none that can be compiled.
    """
    calls, plain = Calls(model, ops), model.forward
    traced = TracedOps(calls, rotate=isinstance(ops, ReferenceOps))
    program = _compiled(plain, traced, backend)

    def forward(given: Ops, batch: StepBatch) -> Tensor:
        assert given is ops, f"compiled for {ops.name} kernels, called with {given.name}"
        if batch.cross is not None:
            return plain(given, batch)
        calls.batch = batch
        try:
            return program(batch.ids, batch.positions)
        finally:
            calls.batch = None

    for tokens in REHEARSED_TOKENS:
        _rehearse(program, tokens, device)
    model.forward = forward  # type: ignore[method-assign, assignment]
    name = backend if isinstance(backend, str) else getattr(backend, "__name__", "a backend of its own")
    return (
        f"forward compiled by torch.compile ({name}), one program for any step; not within it: attention, "
        "recurrent states, mixtures, packed weights, the output head"
    )


def _compiled(
    plain: Callable[[Ops, StepBatch], Tensor], traced: TracedOps, backend: Backend
) -> Callable[[Tensor, Tensor], Tensor]:
    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        return plain(cast(Ops, traced), cast(StepBatch, TracedBatch(ids, positions)))

    # Programs are kept with the code object, and only few with each: another model gets another one.
    own = types.FunctionType(
        forward.__code__.replace(), forward.__globals__, forward.__name__, None, forward.__closure__
    )  # fmt: skip
    program = torch.compile(own, backend=backend, fullgraph=True)

    def run(ids: Tensor, positions: Tensor) -> Tensor:
        if len(ids) > 1:
            for each in (ids, positions):
                torch._dynamo.mark_dynamic(each, 0)
        made: Tensor = program(ids, positions)
        return made

    return run


@torch.inference_mode()
def _rehearse(program: Callable[[Tensor, Tensor], Tensor], tokens: int, device: torch.device) -> None:
    zeros = (torch.zeros(tokens, dtype=torch.int32, device=device) for _ in range(2))
    try:
        program(*zeros)
    except Exception as error:
        raise ConfigError(_reason(error), param="compile") from error


def _reason(error: BaseException) -> str:
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__  # type: ignore[assignment]
    text = " ".join(str(chain[0]).split())
    text = (text[:300] + " .. " + text[text.find(_DETAIL) :][:300]) if _DETAIL in text[300:] else text[:600]
    names = [type(one).__name__ for one in chain]
    if "InvalidCxxCompiler" in names or "C compiler" in text:
        return f"compile is on, but torch finds no C++ compiler (set CXX, or install one): {text}"
    return f"compile is on, but this model's forward cannot be compiled: {names[0]}: {text}"
