"""KV layouts of real models: which layers keep what, for how long.

Owns: the page groups of the models the memory claims are about.
Does not know: pools, traces.
Invariants: sizes are those of the published configurations, bf16 throughout, 16 tokens a page.
"""

from __future__ import annotations

from aengine.memory import Cross, Full, GroupSpec, LayerSpec, Part, State, Window, attention_group

TILE_TOKENS = 1601  # Llama 3.2 Vision: 1,600 patches and a class token per tile


def llama_32_vision() -> list[GroupSpec]:
    """11B: 32 layers of self-attention over text, 8 of cross-attention over image tokens; 4,096 B a token and layer."""
    return [
        attention_group("self", Full(), 32, kv_heads=8, head_dim=128),
        attention_group("cross", Cross(), 8, kv_heads=8, head_dim=128),
    ]


def gemma_3_27b() -> list[GroupSpec]:
    """10 full layers and 52 with a window of 1,024; 8,192 B a token and layer."""
    return [
        attention_group("full", Full(), 10, kv_heads=16, head_dim=128),
        attention_group("window", Window(1024), 52, kv_heads=16, head_dim=128),
    ]


def gpt_oss_120b() -> list[GroupSpec]:
    """18 full layers and 18 with a window of 128; 2,048 B a token and layer."""
    return [
        attention_group("full", Full(), 18, kv_heads=8, head_dim=64),
        attention_group("window", Window(128), 18, kv_heads=8, head_dim=64),
    ]


def jamba_52b() -> list[GroupSpec]:
    """4 attention layers, 28 Mamba layers with 311,296 B of state each."""
    mamba = (Part("conv", (8192, 3)), Part("ssm", (8192, 16)))
    return [attention_group("attention", Full(), 4, kv_heads=8, head_dim=128), _state("mamba", 28, mamba)]


def qwen3_next_80b() -> list[GroupSpec]:
    """12 attention layers, 36 gated delta net layers with 1,097,728 B of state each."""
    delta = (Part("conv", (8192, 3)), Part("delta", (32, 128, 128)))
    return [attention_group("attention", Full(), 12, kv_heads=2, head_dim=256), _state("delta", 36, delta)]


def _state(name: str, layers: int, parts: tuple[Part, ...]) -> GroupSpec:
    return GroupSpec(name, State(), tuple(LayerSpec(f"layer{i}", parts) for i in range(layers)))
