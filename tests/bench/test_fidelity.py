"""The distances bench/fidelity.py reports, against their definitions, and its run of a whole sequence."""

from __future__ import annotations

import math

import fidelity
import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM

from aengine.kernels.reference import ReferenceOps
from aengine.models.loader import load_model
from aengine.models.store import ModelFiles


def test_distances_are_what_their_names_say():
    torch.manual_seed(0)
    table = {name: torch.randn(11, 7) for name in ("exact", "other")}

    def reads(name):
        return lambda ids: table[name][torch.tensor(ids)]

    windows = [[0, 3, 5, 2], [6, 6, 1]]
    rows = fidelity.compare(windows, reads("exact"), {"same": reads("exact"), "other": reads("other")})
    assert rows["same"]["mean_kl"] == rows["same"]["max_logprob_off"] == 0.0
    assert rows["same"]["greedy_agreement"] == 1.0
    p, q = (torch.log_softmax(table[name], -1)[torch.tensor(windows[0] + windows[1])] for name in ("exact", "other"))
    kl = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    assert rows["other"]["mean_kl"] == pytest.approx(float(kl.mean()), rel=1e-5)
    assert rows["other"]["max_kl"] == pytest.approx(float(kl.max()), rel=1e-5)
    assert rows["other"]["greedy_agreement"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()))
    off = [(p - q)[at, following].abs().item() for at, following in ((0, 3), (1, 5), (2, 2), (4, 6), (5, 1))]
    assert rows["other"]["max_logprob_off"] == pytest.approx(max(off), rel=1e-5)
    nll = [-q[at, following].item() for at, following in ((0, 3), (1, 5), (2, 2), (4, 6), (5, 1))]
    weighted = (4 * sum(nll[:3]) / 3 + 3 * sum(nll[3:]) / 2) / 7
    assert rows["other"]["perplexity"] == pytest.approx(math.exp(weighted), rel=1e-5)


def test_a_sequence_with_attention_and_state_equals_transformers(tmp_path):
    torch.manual_seed(1)
    config = Lfm2Config(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False,
    )  # fmt: skip
    model = Lfm2ForCausalLM(config).float().eval()
    model.save_pretrained(tmp_path)
    ops, ids = ReferenceOps(), torch.randint(0, 40, (37,)).tolist()
    ours = load_model(ModelFiles("hf", tmp_path, "tiny", tmp_path), ops, torch.float32)
    with torch.inference_mode():
        wanted = model(torch.tensor([ids]), use_cache=False).logits[0]
        assert torch.allclose(fidelity.whole_sequence(ours, ops, ids), wanted, atol=1e-5)


def test_the_text_is_long_enough_and_the_same_each_time():
    text = fidelity.prose()
    assert len(text) > 60_000
    assert text == fidelity.prose()
