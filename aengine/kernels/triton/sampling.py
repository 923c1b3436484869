"""Sampling on the device: rules, the choice of a token, log-probabilities.

Owns: the columns that describe slots to the kernels, and the launches.
Does not know: requests, plans, streams.
Invariants: nothing waits for the device or copies to the host. The same tokens as `runner.sampler`, which is the
oracle, unless two scores, or a sum and its bound, differ by less than fp32 logarithms and exponentials are exact to.
Logits stay as they are: rules shape a copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.kernels.triton.device.sampling import (
    ban_kernel,
    bias_kernel,
    count_kernel,
    logprobs_kernel,
    mask_kernel,
    penalty_kernel,
    sample_kernel,
)
from aengine.kernels.triton.launch import dense_last, power_of_two

FLOAT_LEAST = torch.finfo(torch.float32).min
FOREVER = 2**31 - 1  # `until` of a word that is banned at every position
_BLOCK = 4096
_LIST_BLOCK = 128


@dataclass(frozen=True, slots=True)
class SlotParameters:
    """Columns by slot. temperature fp32 (0: greedy), top_k int32 (0: off), top_p fp64 (1: off), floor fp32 (what
    `min_p_floor` gives), seed int64 (the 64 bits of the seed word)."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    floor: Tensor
    seed: Tensor


def slot_parameters(slots: int, device: torch.device) -> SlotParameters:
    """Columns of slots that are all greedy."""
    return SlotParameters(
        temperature=torch.zeros(slots, dtype=torch.float32, device=device),
        top_k=torch.zeros(slots, dtype=torch.int32, device=device),
        top_p=torch.ones(slots, dtype=torch.float64, device=device),
        floor=torch.full((slots,), FLOAT_LEAST, dtype=torch.float32, device=device),
        seed=torch.zeros(slots, dtype=torch.int64, device=device),
    )


def min_p_floor(min_p: float) -> float:
    """The least z = (logit - greatest) / temperature that min-p leaves."""
    return max(math.log(min_p), FLOAT_LEAST) if min_p > 0.0 else FLOAT_LEAST


@dataclass(frozen=True, slots=True)
class SlotRules:
    """What slots do to their logits, by slot; None: no slot does. Applied in this order.

    allowed int32 [slots, ceil(V / 32)]: bits, lowest first. bias_ids int32 [slots, B] (-1: none, each id once), bias
    fp32. banned int32 [slots, W, L]: words whose last token is banned behind the others; -1 before shorter words and in
    unused ones; until int32 [slots, W]: at positions below (stop tokens: prompt + min_tokens; bad words: FOREVER).
    penalties fp32 [slots, 3]: repetition, frequency, presence (1, 0, 0: off). history int32 [slots, H] by position,
    prompt_tokens int32 [slots]; both are needed for penalties and for words of several tokens.
    """

    allowed: Tensor | None = None
    bias_ids: Tensor | None = None
    bias: Tensor | None = None
    banned: Tensor | None = None
    until: Tensor | None = None
    penalties: Tensor | None = None
    history: Tensor | None = None
    prompt_tokens: Tensor | None = None


def sample(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    parameters: SlotParameters,
    rules: SlotRules | None = None,
    faults: Tensor | None = None,
) -> Tensor:
    """logits [N, V] fp32, bf16 or fp16; slots int32 [N]; positions int64 or int32 [N] of the sampled tokens -> tokens
    int32 [N], 0 where a row cannot be sampled.

    faults int32 [N], if given, gets 0 or why: 4 NaN, 5 infinity, 6 all masked, in the model's logits; 7, 8, 9 the same
    after rules.
    """
    logits = dense_last(logits)
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        shaped = None if rules is None else shape_logits(logits, slots, positions, rules)
        block = min(_BLOCK, power_of_two(vocab))
        sample_kernel[(rows,)](
            logits, shaped, slots, positions, parameters.temperature, parameters.top_k, parameters.top_p,
            parameters.floor, parameters.seed, tokens, faults, vocab, logits.stride(0),
            BLOCK=block, num_warps=max(1, min(8, block // 128)), enable_fp_fusion=False,
        )  # fmt: skip
    return tokens


def shape_logits(logits: Tensor, slots: Tensor, positions: Tensor, rules: SlotRules) -> Tensor:
    """A copy of logits [N, V] after the rules, fp32. No -0.0 or NaN is made of a finite logit."""
    rows, vocab = logits.shape
    shaped = logits.new_empty((rows, vocab), dtype=torch.float32)
    block = min(_BLOCK, power_of_two(vocab))
    grid = (rows, -(-vocab // block))
    words = 0 if rules.allowed is None else rules.allowed.shape[1]
    mask_kernel[grid](logits, shaped, slots, rules.allowed, vocab, logits.stride(0), words, BLOCK=block)
    if rules.bias_ids is not None and rules.bias_ids.shape[1]:
        count = rules.bias_ids.shape[1]
        bias_kernel[(rows, -(-count // _LIST_BLOCK))](
            shaped, slots, rules.bias_ids, rules.bias, vocab, COUNT=count, BLOCK=_LIST_BLOCK
        )
    history_size = 0 if rules.history is None else rules.history.shape[1]
    if rules.banned is not None and rules.banned.shape[1]:
        count, length = rules.banned.shape[1:]
        if length > 1 and rules.history is None:
            raise ValueError("banned words of several tokens need the history")
        ban_kernel[(rows, -(-count // _LIST_BLOCK))](
            shaped, slots, positions, rules.banned, rules.until, rules.history, vocab, history_size,
            COUNT=count, LENGTH=length, BLOCK=_LIST_BLOCK,
        )  # fmt: skip
    if rules.penalties is not None:
        if rules.history is None or rules.prompt_tokens is None:
            raise ValueError("penalties need the history and the prompts' lengths")
        counts = torch.zeros((rows, vocab), dtype=torch.int32, device=logits.device)
        count_kernel[(rows,)](
            counts, slots, positions, rules.prompt_tokens, rules.history, vocab, history_size, BLOCK=1024
        )
        penalty_kernel[grid](shaped, slots, counts, rules.penalties, vocab, BLOCK=block, enable_fp_fusion=False)
    return shaped


def remember(history: Tensor, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
    """history int32 [slots, H]: note tokens [N] at their positions; one at or behind H is left out (zombie rows)."""
    size = history.shape[1]
    at = positions.long().clamp(max=size - 1)
    kept = torch.where(positions < size, tokens, history[slots.long(), at])
    history.index_put_((slots.long(), at), kept)


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """ids int32, values fp32 [N, 1 + k]: the chosen token, then the best, falling (equal: by id). ranks int32 [N]."""

    ids: Tensor
    values: Tensor
    ranks: Tensor


def logprobs(logits: Tensor, chosen: Tensor, alternatives: int) -> DeviceLogprobs:
    """logits [N, V] raw, chosen int32 or int64 [N] -> log-softmax of the chosen and of the min(alternatives, V) best
    tokens, without an fp32 softmax of the row in memory. Unsound rows get NaN."""
    logits = dense_last(logits)
    rows, vocab = logits.shape
    width = 1 + min(alternatives, vocab)
    made = DeviceLogprobs(
        ids=torch.empty((rows, width), dtype=torch.int32, device=logits.device),
        values=torch.empty((rows, width), dtype=torch.float32, device=logits.device),
        ranks=torch.empty(rows, dtype=torch.int32, device=logits.device),
    )
    if rows:
        block = min(_BLOCK, power_of_two(vocab))
        logprobs_kernel[(rows,)](
            logits, chosen, made.ids, made.values, made.ranks, vocab, logits.stride(0), width - 1,
            BLOCK=block, num_warps=max(1, min(8, block // 128)),
        )  # fmt: skip
    return made
