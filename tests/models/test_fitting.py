"""Weights made integer at load: how close, that groups are apart, what is held as what."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

from aengine.kernels.ops import Linear
from aengine.kernels.reference import ReferenceOps
from aengine.models import fitting, loader
from aengine.models.fitting import GROUP, fit
from aengine.models.holding import HeldCheckpoint


def weights(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=made) * torch.rand(rows, 1, generator=made) * 0.1


def relative_error(weight: torch.Tensor, bits: int) -> float:
    return float((fit(weight, bits).dequantise() - weight).norm() / weight.norm())


def test_eight_bits_are_within_half_a_step():
    weight = weights(64, 96)
    part = fit(weight, 8)
    assert (part.bits, part.group, part.minimum) == (8, GROUP, None)
    step = part.scale.repeat_interleave(GROUP, 1)
    assert bool(((part.dequantise() - weight).abs() <= step * 0.502).all())
    assert relative_error(weight, 8) < 0.006


def test_four_bits_beat_plain_rounding_over_the_range():
    weight = weights(64, 256)
    groups = weight.view(-1, GROUP)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    step = (high - low) / 15
    plain = ((groups - low) / step).round() * step + low
    plain_error = float((plain - groups).norm() / groups.norm())
    assert relative_error(weight, 4) < 0.95 * plain_error < 0.1


def test_an_affine_weight_comes_back_exactly():
    shuffled = torch.randperm(32, generator=torch.Generator().manual_seed(1))
    codes = torch.stack((torch.arange(16.0).repeat(2)[shuffled], torch.arange(16.0).repeat(2)))
    weight = codes * 0.25 - 1.5
    part = fit(weight, 4)
    assert torch.equal(part.dequantise(), weight)
    assert torch.equal(fit(torch.zeros(3, 32), 4).dequantise(), torch.zeros(3, 32))
    assert torch.equal(fit(torch.zeros(3, 32), 8).dequantise(), torch.zeros(3, 32))
    assert torch.allclose(fit(torch.full((1, 32), 0.375), 4).dequantise(), torch.full((1, 32), 0.375))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_group_does_not_see_the_others(bits, monkeypatch):
    weight = weights(40, 64, seed=4)
    whole = fit(weight, bits)
    monkeypatch.setattr(fitting, "_CHUNK_GROUPS", 7)
    parts = [fit(weight[a:b], bits) for a, b in pairwise((0, 1, 17, 40))]
    assert torch.equal(torch.cat([part.codes for part in parts]), whole.codes)
    assert torch.equal(torch.cat([part.scale for part in parts]), whole.scale)
    assert torch.equal(torch.cat([part.dequantise() for part in parts]), whole.dequantise())


def test_scales_keep_in_fp16_unless_that_loses_bits():
    scale = fit(weights(8, 64), 4).scale
    assert torch.equal(scale.half().float(), scale)
    assert float(fit(weights(8, 64) * 1e-6, 8).scale.max()) > 0.0
    assert relative_error(weights(8, 64) * 1e-6, 8) < 0.006


class WatchedOps(ReferenceOps):
    """Keeps what was prepared."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[Linear] = []

    def prepare(self, linear):
        self.prepared.append(linear)
        return super().prepare(linear)


TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8,
}  # fmt: skip


def bits_of(ops: WatchedOps) -> list[tuple[int, ...]]:
    return [tuple(part.bits for part in linear.parts) for linear in ops.prepared]


@pytest.mark.parametrize(("hold", "bits"), [("int8", 8), ("int4", 4), ("plain", 0), ("stored", 0)])
def test_linears_become_integers_and_a_tied_embedding_is_the_head(hold, bits, tmp_path, hf_files, full_logits):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=True)).float().eval()
    model.save_pretrained(tmp_path)
    ops, lines, ids = WatchedOps(), list[str](), list(range(3, 30))
    ours = loader.load_model(hf_files(tmp_path), ops, torch.float32, hold=hold, tell=lines.append)
    fused = [(bits,) * 3, (bits,), (bits,) * 2, (bits,)] * 2 + [(8,)]
    assert bits_of(ops) == (fused if bits else [()] * 9)
    assert ours._embedding is ours._head
    with torch.inference_mode():
        wanted = model(torch.tensor([ids])).logits[0]
    off = float((full_logits(ours, ids) - wanted).abs().max() / wanted.abs().max())
    assert off < {0: 1e-5, 8: 0.03, 4: 0.3}[bits]
    assert (off > 1e-4) == (bits > 0)
    assert (
        lines
        == {
            0: ["weights: float32"],
            8: ["weights: 0.0 M in 8-bit groups of 32, the others float32"],
            4: ["weights: 0.0 M in 4-bit groups of 32, 0.0 M in 8-bit groups of 32, the others float32"],
        }[bits]
    )


def test_experts_become_integers_and_routers_do_not(tmp_path, hf_files):
    config = GptOssConfig(**TINY, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
    GptOssForCausalLM(config).float().save_pretrained(tmp_path)
    ops = WatchedOps()
    loader.load_model(hf_files(tmp_path), ops, torch.float32, hold="int4")
    experts = [(4,)] * 8
    # one layer: experts, then q k v, the output and the router, in the order of loading
    assert sorted(bits_of(ops)[:11]) == sorted([*experts, (4, 4, 4), (4,), ()])


def test_what_does_not_divide_stays_plain(tmp_path, hf_files):
    LlamaForCausalLM(LlamaConfig(**TINY | {"intermediate_size": 40})).float().save_pretrained(tmp_path)
    files, ops = hf_files(tmp_path), WatchedOps()
    loader.load_model(files, ops, torch.float32, hold="int8")
    assert [linear.parts for linear in ops.prepared if linear.weight.shape[1] == 40] == [(), ()]
    held = HeldCheckpoint(loader.open_checkpoint(files, loader.load_config(files)), "int8")
    assert held.quantised("model.layers.0.input_layernorm.weight") is None
    assert held.quantised("no.such.weight") is None
