"""Steps replayed against the same steps run operation by operation: every bit equal, for every family.

Owns: random plans over tiny random models; what cannot be captured.
Does not know: the engine.
Invariants: two executors with caches of their own get the same plans; results, hidden states, logits and all KV and
state pages are compared for equality.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MllamaConfig,
    MllamaForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from aengine.config import usable_home
from aengine.kernels.native import NativeOps, Unavailable, load_native_ops
from aengine.kernels.native.capture import NotCapturable, Sizes
from aengine.kernels.ops import LayerKV, LayerState, state_specs
from aengine.models.config import config_from_hf
from aengine.models.registry import MODELS
from aengine.runner.captured_step import CapturedExecutor, CapturedStep
from aengine.runner.native_sampler import NativeSampler
from aengine.runner.torch_step import TorchExecutor
from aengine.types import SamplingParams, SlotSetup, StepPlan, TableDelta, TokenRules
from tests.e2e.tiny import SIZES, VOCAB
from tests.e2e.tiny_mllama import IMAGE_TOKEN, TEXT, VISION

SLOTS, LENGTH, PAGE, TOKENS = 6, 64, 4, 48
LAYERS = ["full_attention", "sliding_attention", "full_attention"]
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {"sliding_window": 10, "layer_types": LAYERS, "head_dim": 16}),
    "gpt-oss": (
        GptOssForCausalLM, GptOssConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7, "num_hidden_layers": 2},
    ),
    "llama4": (
        Llama4ForCausalLM, Llama4TextConfig,
        {"num_local_experts": 4, "intermediate_size_mlp": 40, "attention_chunk_size": 12, "num_hidden_layers": 4},
    ),
    "lfm2": (Lfm2ForCausalLM, Lfm2Config, {"layer_types": ["conv", "full_attention", "conv"], "norm_eps": 1e-5}),
    "mllama": (MllamaForConditionalGeneration, MllamaConfig, {}),
}  # fmt: skip
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "logprobs": 3},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 0},
    {"temperature": 1.5, "logit_bias": {3: 4.0, 5: -9.0}, "min_p": 0.05, "min_tokens": 4, "max_tokens": 60},
    {"temperature": 0.0, "allowed_token_ids": (4, 9, 30), "prompt_logprobs": 2},
]


class _State:
    """A transformers model's weights as a checkpoint."""

    def __init__(self, model: Any) -> None:
        self._state = model.state_dict()

    def names(self) -> frozenset[str]:
        return frozenset(self._state)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._state[name].shape)

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self._state[name].to(dtype).clone()

    def quantised(self, name: str) -> None:
        return None

    def fitted(self, name: str, weight: torch.Tensor) -> None:
        return None


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    made = load_native_ops(usable_home() / "native", threads=2)
    assert not isinstance(made, Unavailable), made.reason
    return made


def load(name: str, ops: NativeOps, dtype: torch.dtype) -> Any:
    model_class, config_class, changes = FAMILIES[name]
    if name == "mllama":
        config = config_class(vision_config=VISION, text_config=TEXT, image_token_index=IMAGE_TOKEN)
    else:
        config = config_class(**SIZES | {"num_hidden_layers": 3} | changes)
    torch.manual_seed(1)
    theirs = model_class(config)
    with torch.no_grad():
        for value in theirs.parameters():
            value.add_(torch.randn_like(value) * 0.2)
    settings = config.to_dict() | {"architectures": [model_class.__name__]}
    ours = config_from_hf(settings)
    return MODELS[ours.family].load(ours, _State(theirs), ops, dtype)


@dataclass
class Side:
    """An executor with caches of its own, and what its model last came to."""

    executor: Any
    caches: list[torch.Tensor]
    step: CapturedStep | None
    hidden: torch.Tensor | None = None


def make_side(model: Any, ops: NativeOps, *, captured: bool, logit_rows: int) -> Side:
    groups = 1 + max(spec.group for spec in model.attention)
    pages = 1 + SLOTS * (LENGTH // PAGE)
    caches = []
    kv, states = [], []
    for spec in model.attention:
        made = [torch.zeros(pages, PAGE, spec.kv_heads, spec.head_dim, dtype=model.dtype) for _ in range(2)]
        caches += made
        kv.append(LayerKV(*made))
    for state in state_specs(model):
        caches.append(torch.zeros(1 + 2 * SLOTS, *state.parts[0].shape, dtype=state.parts[0].dtype))
        states.append(LayerState((caches[-1],)))
    columns = [0 if spec_is_cross(model, group) else LENGTH // PAGE for group in range(groups)]
    columns += [2] * bool(states)
    sampler = NativeSampler(ops.context, SLOTS, model.vocab_size, LENGTH)
    eager = TorchExecutor(model, ops, kv, columns, SLOTS, LENGTH, states=states, sampler=sampler)
    if not captured:
        return Side(eager, caches, None)
    with torch.inference_mode():
        limits = Sizes(TOKENS, SLOTS, 0, LENGTH + 1)
        step = CapturedStep(model, ops, sampler, eager.state, kv, states, limits, logit_rows=logit_rows)
    return Side(CapturedExecutor(eager, step), caches, step)


def spec_is_cross(model: Any, group: int) -> bool:
    return any(spec.cross for spec in model.attention if spec.group == group)


class Plans:
    """Random plans: prefill chunks, relayed decodes, drafts, faulty rows; slots move on and are set up anew."""

    def __init__(self, model: Any, seed: int) -> None:
        self._model, self._rng = model, np.random.default_rng(seed)
        self._length = [0] * SLOTS
        self._relayed = [False] * SLOTS
        self._stateful = bool(state_specs(model))
        self._groups = 1 + max(spec.group for spec in model.attention)
        self.step = 0

    def _admit(self, slot: int) -> tuple[SlotSetup, list[TableDelta]]:
        params = SamplingParams(**SAMPLINGS[int(self._rng.integers(len(SAMPLINGS)))])
        history = self._rng.integers(0, VOCAB, 8 * params.needs_history).astype(np.int32)
        rules = TokenRules(stop_ids=(1, 7))
        self._length[slot], self._relayed[slot] = 0, False
        first = 1 + slot * (LENGTH // PAGE)
        pages = tuple(range(first, first + LENGTH // PAGE))
        deltas = [
            TableDelta.run(slot, group, 0, pages)
            for group in range(self._groups)
            if not spec_is_cross(self._model, group)
        ]
        return SlotSetup(slot, slot, 4, params, rules, int(self._rng.integers(2**62)), history), deltas

    def next(self) -> StepPlan:
        rng, self.step = self._rng, self.step + 1
        setups, tables, columns, ids, targets = [], [], [], [], {}
        budget = TOKENS
        for slot in rng.permutation(SLOTS)[: int(rng.integers(1, SLOTS + 1))].tolist():
            if self._length[slot] == 0 or self._length[slot] > LENGTH - 20:
                setup, deltas = self._admit(slot)
                setups.append(setup)
                tables += deltas
                wants = setup.sampling.prompt_logprobs
            else:
                wants = None
            kind = rng.random()
            relay = self._relayed[slot] and kind < 0.6
            count = 1 if relay else int(rng.integers(1, min(16, budget) + 1)) if budget > 1 else 1
            samples = 1 if relay else int(rng.integers(0, 2))
            if not relay and kind > 0.85 and count <= 4:
                samples = count  # drafts
            own = rng.integers(2, 90, 0 if relay else count)
            if rng.random() < 0.1 and not relay:
                own[0] = self._model.vocab_size + 9
            if budget < count:
                break
            if wants is not None and count > 1:
                targets[len(columns)] = rng.integers(0, 90, count - 1).astype(np.int32)
            if self._stateful:
                page = 1 + 2 * slot
                tables.append(TableDelta.run(slot, self._groups, 0, (page if self._length[slot] else 0, page)))
            columns.append((slot, self._length[slot], count, samples, relay))
            ids += own.tolist()
            budget -= count
            self._length[slot] += count
            self._relayed[slot] = samples > 0 and bool((own < self._model.vocab_size).all())
        slots, starts, counts, samples_, relays = (np.array(column) for column in zip(*columns, strict=True))
        return StepPlan(
            step=self.step,
            slots=slots.astype(np.int32),
            handles=slots.astype(np.int64),
            starts=starts.astype(np.int32),
            counts=counts.astype(np.int32),
            samples=samples_.astype(np.int32),
            relay=relays.astype(bool),
            ids=np.array(ids, np.int32),
            tables=tuple(tables),
            setups=tuple(setups),
            prompt_logprobs=targets,
        )


def assert_same(got: Any, want: Any) -> None:
    assert np.array_equal(got.tokens, want.tokens)
    assert np.array_equal(got.counts, want.counts)
    assert got.failed == want.failed
    for mine, theirs in ((got.logprobs, want.logprobs), (got.prompt_logprobs, want.prompt_logprobs)):
        assert mine.keys() == theirs.keys()
        for row in mine:
            for field in ("ids", "values", "ranks"):
                assert np.array_equal(getattr(mine[row], field), getattr(theirs[row], field)), (row, field)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_replayed_step_has_the_bits_of_the_same_step_run_eagerly(
    name: str, dtype: torch.dtype, ops: NativeOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(name, ops, dtype)
    replayed = make_side(model, ops, captured=True, logit_rows=3 if name == "llama" else 256)
    eager = make_side(model, ops, captured=False, logit_rows=256)
    assert replayed.step is not None
    forward, seen = model.forward, []

    def spied(ops: Any, batch: Any) -> torch.Tensor:
        seen.append(forward(ops, batch))
        return seen[-1]

    monkeypatch.setattr(model, "forward", spied)
    plans = Plans(model, seed=3)
    failed = sampled = 0
    for _ in range(30):
        plan = plans.next()
        want = eager.executor.run(eager.executor.stage(plan))
        assert len(seen) == 1
        got = replayed.executor.run(replayed.executor.stage(plan))
        assert len(seen) == 1, "the replayed step ran the model"
        hidden = seen.pop()
        assert torch.equal(replayed.step.hidden(len(hidden)), hidden)
        assert_same(got, want)
        failed += len(want.failed)
        sampled += int(want.counts.sum())
    assert failed > 0
    assert sampled > 30
    for mine, theirs in zip(replayed.caches, eager.caches, strict=True):
        assert torch.equal(mine, theirs)


def test_a_step_beyond_what_was_captured_is_refused(ops: NativeOps) -> None:
    model = load("llama", ops, torch.float32)
    side = make_side(model, ops, captured=True, logit_rows=4)
    plans = Plans(model, 0)
    plan = plans.next()
    slots = np.zeros(1, np.int32)
    long = StepPlan(
        step=2, slots=slots, handles=slots.astype(np.int64), starts=slots, counts=slots + TOKENS + 1, samples=slots,
        relay=slots.astype(bool), ids=np.zeros(TOKENS + 1, np.int32), tables=plan.tables, setups=plan.setups,
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"{TOKENS + 1} tokens; captured for"):
        side.executor.run(side.executor.stage(long))
    assert side.executor.run(side.executor.stage(plan)).step == 1, "the next one runs"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda ops, x, batch: x * 2, "mul"),
        (lambda ops, x, batch: ops.scale(x, float(x[0, 0])), "__float__"),
        (lambda ops, x, batch: ops.scale(x, float(len(x))), "do not rise evenly"),
        (lambda ops, x, batch: x if len(x) > 1 else ops.scale(x, 2.0), "recorded again it asks|not do the same"),
        (lambda ops, x, batch: ops.scale(x, float(batch.host_counts[0])), "host's row counts"),
        (lambda ops, x, batch: ops.add(x, x[:, ::2]), "contiguous"),
        (lambda ops, x, batch: x.add_(1), "add_"),
    ],
)
def test_what_cannot_be_replayed_is_found_when_it_is_recorded(
    fault: Any, message: str, ops: NativeOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load("llama", ops, torch.float32)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda ops, batch: fault(ops, forward(ops, batch), batch))
    with pytest.raises(NotCapturable, match=message):
        make_side(model, ops, captured=True, logit_rows=4)
