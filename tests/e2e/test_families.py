"""The plain families through the whole engine: tiny random models, tokens and log-probabilities equal transformers'."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from aengine import AsyncEngine, SamplingParams
from tests.e2e.conftest import run_all
from tests.e2e.tiny import SIZES, Tiny, assert_follows, prompts

PLAIN = SIZES | {"num_hidden_layers": 3}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LAYERS = ["full_attention", "sliding_attention", "full_attention"]
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3, "attention_bias": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 20}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-window": (
        Qwen2ForCausalLM, Qwen2Config, {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "gemma3": (
        Gemma3ForCausalLM, Gemma3TextConfig,
        {"sliding_window": 20, "layer_types": LAYERS, "query_pre_attn_scalar": 20, "head_dim": 16},
    ),
}  # fmt: skip
LENGTHS = (1, 15, 16, 17, 19, 20, 21, 22, 41, 64, 90)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize("name", FAMILIES)
async def test_tokens_equal_transformers(name: str, tmp_path: Any) -> None:
    """In chunks, beside each other; then again from the cache."""
    model_class, config_class, changes = FAMILIES[name]
    tiny = Tiny(model_class(config_class(**PLAIN | changes)), tmp_path)
    async with AsyncEngine(tiny.config(max_batched_tokens=48, page_tokens=8)) as engine:
        cold = await run_all(engine, prompts(LENGTHS), GREEDY)
        hot = await run_all(engine, prompts(LENGTHS), GREEDY)
    assert_follows(cold, tiny)
    assert_follows(hot, tiny)
    assert [output.num_cached_tokens for output in hot] == [(length - 1) // 8 * 8 for length in LENGTHS]
