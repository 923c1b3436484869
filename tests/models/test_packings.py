"""GPTQ, AWQ, compressed-tensors and fp8 files: the weights they mean, exactly; refusals; whole models."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from aengine.errors import ModelLoadError
from aengine.kernels.reference import ReferenceOps
from aengine.models import loader
from aengine.models.holding import HeldCheckpoint
from aengine.models.quant_method import quant_method
from tests.models import packers
from tests.models.packers import Module

Pack = Callable[[torch.Tensor], Module]
OUT, IN = 24, 128


def compressed(form: str, bits: int = 4, kind: str = "int", **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, **weights}}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "config_groups": {"g": group}}


def gptq_config(bits: int, form: str = "gptq") -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": False, "checkpoint_format": form}


FORMATS: dict[str, tuple[dict[str, Any], Pack]] = {
    "gptq-4-32": (gptq_config(4), lambda w: packers.gptq(w, bits=4, group=32)),
    "gptq-4-all": (gptq_config(4), lambda w: packers.gptq(w, bits=4, group=-1, sym=False)),
    "gptq-4-v2": (gptq_config(4, "gptq_v2"), lambda w: packers.gptq(w, bits=4, group=64, version=2, sym=False)),
    "gptq-8": (gptq_config(8), lambda w: packers.gptq(w, bits=8, group=32, sym=False)),
    "gptq-8-symmetric": (gptq_config(8), lambda w: packers.gptq(w, bits=8, group=32)),
    "gptq-act-order": (gptq_config(4), lambda w: packers.gptq(w, bits=4, group=32, shuffled=True, sym=False)),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, lambda w: packers.awq(w, group=32)),
    "pack-4": (compressed("pack-quantized"), lambda w: packers.pack_quantized(w, bits=4, group=32, sym=True)),
    "pack-4-zero-points": (
        compressed("pack-quantized"), lambda w: packers.pack_quantized(w, bits=4, group=32, sym=False),
    ),
    "pack-4-channel": (compressed("pack-quantized"), lambda w: packers.pack_quantized(w, bits=4, group=-1, sym=True)),
    "pack-4-act-order": (
        compressed("pack-quantized"), lambda w: packers.pack_quantized(w, bits=4, group=32, sym=True, shuffled=True),
    ),
    "pack-8": (compressed("pack-quantized", 8), lambda w: packers.pack_quantized(w, bits=8, group=32, sym=True)),
    "int-8": (compressed("int-quantized", 8), packers.int_quantized),
    "int-8-zero-points": (compressed("naive-quantized", 8), lambda w: packers.int_quantized(w, sym=False)),
    "float-8-tensor": (
        compressed("float-quantized", 8, "float"), lambda w: packers.float_quantized(w, scales="tensor"),
    ),
    "float-8-channel": (
        compressed("float-quantized", 8, "float"), lambda w: packers.float_quantized(w, scales="channel"),
    ),
    "fp8-block": (
        {"quant_method": "fp8", "weight_block_size": [16, 16]}, lambda w: packers.float_quantized(w, scales="block"),
    ),
}  # fmt: skip
DENSE_ONLY = ("fp8-block",)
TINY = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 40, "hidden_size": 64, "num_hidden_layers": 2,
    "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


class Float8Ops(ReferenceOps):
    holds_float8 = True


def folder_of(path, settings, tensors):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(TINY | {"quantization_config": settings}))
    save_file({name: value.contiguous() for name, value in tensors.items()}, path / "model.safetensors")
    return path


def checkpoint_of(path, settings, tensors, hf_files):
    files = hf_files(folder_of(path, settings, tensors))
    return loader.open_checkpoint(files, loader.load_config(files))


@pytest.mark.parametrize("name", FORMATS)
def test_weights_mean_what_the_format_says(name, tmp_path, hf_files):
    settings, pack = FORMATS[name]
    weight = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(3)) * 0.2
    tensors, wanted = pack(weight)
    bias = torch.randn(OUT)
    stored = {f"m.{key}": value for key, value in tensors.items()} | {"m.bias": bias, "plain.weight": weight.half()}
    checkpoint = checkpoint_of(tmp_path, settings, stored, hf_files)
    assert checkpoint.shape("m.weight") == (OUT, IN)
    assert {"m.weight", "plain.weight"} <= checkpoint.names()
    assert torch.equal(checkpoint.tensor("m.weight", torch.float32), wanted)
    assert torch.equal(checkpoint.tensor("m.weight", torch.bfloat16), wanted.bfloat16())
    assert torch.equal(checkpoint.tensor("m.bias", torch.float32), bias)
    part = checkpoint.quantised("m.weight")
    if name in DENSE_ONLY:
        assert part is None
    else:
        assert part is not None
        assert part.bits == (8 if "8" in name else 4)
        assert part.floating == name.startswith("float")
        held = HeldCheckpoint(checkpoint, "stored").quantised("m.weight")
        assert (held is None) == part.floating
        assert HeldCheckpoint(checkpoint, "stored", float8=True).quantised("m.weight") is not None
        assert torch.equal(part.dequantise(), wanted)
    # A module that was left alone is read as it is.
    assert checkpoint.quantised("plain.weight") is None
    assert torch.equal(checkpoint.tensor("plain.weight", torch.float32), weight.half().float())
    assert (weight - wanted).abs().max() < 0.2  # the packer quantised this weight, not another


def test_groups_that_are_no_runs_are_brought_together_if_of_one_size(tmp_path, hf_files):
    tensors, wanted = packers.gptq(torch.randn(OUT, IN), bits=4, group=32, shuffled=True)
    part = checkpoint_of(
        tmp_path / "even", gptq_config(4), {f"m.{key}": value for key, value in tensors.items()}, hf_files
    ).quantised("m.weight")
    assert part.order is not None
    assert not torch.equal(part.order, torch.arange(IN, dtype=torch.int32))
    assert torch.equal(part.with_rows(lambda rows: rows.flip(0)).dequantise(), wanted.flip(0))
    uneven = tensors["g_idx"].clone()
    uneven[uneven == 1] = 0
    stored = {f"m.{key}": value for key, value in (tensors | {"g_idx": uneven}).items()}
    assert checkpoint_of(tmp_path / "uneven", gptq_config(4), stored, hf_files).quantised("m.weight") is None


@pytest.mark.parametrize(
    "name",
    ["gptq-4-32", "gptq-act-order", "gptq-8", "awq", "pack-4-zero-points", "int-8", "fp8-block", "float-8-channel"],
)
def test_a_whole_model_equals_transformers_with_the_same_weights(name, tmp_path, hf_files, full_logits):
    settings, pack = FORMATS[name]
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**TINY, rms_norm_eps=1e-6, attn_implementation="eager")).float().eval()
    tensors = {}
    with torch.no_grad():
        for key, value in model.state_dict().items():
            module = key.removesuffix(".weight")
            if not module.endswith("_proj"):  # norms, the embedding and the head are left alone
                tensors[key] = value
                continue
            value.copy_(torch.randn_like(value) * 0.2)
            packed, dense = pack(value)
            value.copy_(dense)
            tensors |= {f"{module}.{part}": stored for part, stored in packed.items()}
    files = hf_files(folder_of(tmp_path, settings, tensors))
    ids = torch.randint(0, 40, (21,)).tolist()
    with torch.inference_mode():
        wanted = model(torch.tensor([ids])).logits[0]
    lines: list[str] = []
    for hold in ("plain", "stored"):
        ours = loader.load_model(files, Float8Ops(), torch.float32, hold=hold, tell=lines.append)
        assert torch.allclose(full_logits(ours, ids), wanted, atol=2e-5), hold
    assert lines[0] == "weights: float32"
    assert ("M in" in lines[1]) == (name not in DENSE_ONLY)
    assert ("float8" in lines[1]) == name.startswith("float")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' are not supported, those by gptq, awq"),
        ({"bits": 4}, "quantised by None"),
        ("gptq", "is a str, not an object"),
        (gptq_config(3), "GPTQ weights of 3 bits"),
        (gptq_config(4, "marlin"), "'marlin' is not supported"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "awq", "bits": 8}, "AWQ weights of 8 bits"),
        (compressed("marlin-24"), "format marlin-24 is not supported"),
        (compressed("pack-quantized", 2), "2-bit int weights"),
        (compressed("nvfp4-pack-quantized", 4, "float"), "4-bit float weights"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, r"not \[rows, columns\]"),
        (compressed("pack-quantized") | {"sparsity_config": {"format": "sparse-24"}}, "sparse-24"),
        (compressed("pack-quantized") | {"transform_config": {"config_groups": {"u": {}}}}, "rotated"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(settings, message):
    with pytest.raises(ModelLoadError, match=message):
        quant_method({"quantization_config": settings})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": torch.ones(3, OUT, dtype=torch.float16)}, "do not fit together"),
        ({"g_idx": torch.full((IN,), 9, dtype=torch.int32)}, f"one of {IN // 32} groups"),
        ({"qzeros": torch.zeros(IN // 32, 1, dtype=torch.int32)}, "GPTQ weights have 1 bits"),
    ],
)
def test_tensors_that_do_not_fit_name_the_module(change, message, tmp_path, hf_files):
    tensors, _ = packers.gptq(torch.randn(OUT, IN), bits=4, group=32)
    stored = {f"model.q.{key}": value for key, value in (tensors | change).items()}
    checkpoint = checkpoint_of(tmp_path, gptq_config(4), stored, hf_files)
    with pytest.raises(ModelLoadError, match=rf"model\.q.*{message}"):
        checkpoint.quantised("model.q.weight")


def test_integers_without_scales_are_refused(tmp_path, hf_files):
    stored = {"m.weight": torch.zeros(OUT, IN, dtype=torch.int8)}
    checkpoint = checkpoint_of(tmp_path, compressed("int-quantized", 8), stored, hf_files)
    with pytest.raises(ModelLoadError, match=r"m\.weight is I8, but has no weight_scale"):
        checkpoint.tensor("m.weight", torch.float32)
