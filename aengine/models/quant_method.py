"""What config.json says about quantised weights.

Owns: the quantisation methods this build reads, and the refusal of all others.
Does not know: tensors and their bytes (see packings), files.
Invariants: a method, version or option that is not known raises ModelLoadError that names it; nothing is guessed. Lists
of modules left alone need no reading: such modules have a plain weight, and are seen by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from aengine.errors import ModelLoadError

Json = Mapping[str, Any]
METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "fbgemm_fp8")
_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")


@dataclass(frozen=True, slots=True)
class QuantMethod:
    """How some of a checkpoint's weights are stored. `zero_offset` (gptq): what was taken off zero points before they
    were stored. `block`: rows and columns that share a scale, where that is neither a row nor a run of inputs."""

    kind: Literal["gptq", "awq", "compressed-tensors", "fp8"]
    zero_offset: int = 0
    block: tuple[int, int] | None = None


def quant_method(config: Json) -> QuantMethod | None:
    """None: all weights are plain."""
    settings = config.get("quantization_config")
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise ModelLoadError(f"quantization_config is a {type(settings).__name__}, not an object")
    method = settings.get("quant_method")
    if method == "gptq":
        return _gptq(settings)
    if method == "awq":
        return _awq(settings)
    if method == "compressed-tensors":
        return _compressed(settings)
    if method in ("fp8", "fbgemm_fp8"):
        return QuantMethod("fp8", block=_block(settings.get("weight_block_size")))
    raise ModelLoadError(
        f"weights quantised by {method!r} are not supported, those by {', '.join(METHODS)} are; a GGUF file may do too"
    )


def _gptq(settings: Json) -> QuantMethod:
    bits, form = settings.get("bits"), settings.get("checkpoint_format") or "gptq"
    if bits not in (4, 8):
        raise ModelLoadError(f"GPTQ weights of {bits} bits are not supported, those of 4 and 8 are")
    if form not in ("gptq", "gptq_v2") or settings.get("is_marlin_format"):
        raise ModelLoadError(f"GPTQ checkpoint_format {form!r} is not supported, gptq and gptq_v2 are")
    return QuantMethod("gptq", zero_offset=1 if form == "gptq" else 0)


def _awq(settings: Json) -> QuantMethod:
    bits, version = settings.get("bits", settings.get("w_bit", 4)), str(settings.get("version", "gemm")).lower()
    if bits != 4:
        raise ModelLoadError(f"AWQ weights of {bits} bits are not supported, those of 4 are")
    if version != "gemm":
        raise ModelLoadError(f"AWQ weights of version {version!r} are not supported, 'gemm' is")
    return QuantMethod("awq")


def _compressed(settings: Json) -> QuantMethod:
    formats = {str(settings.get("format", "dense"))}
    block = None
    groups = settings.get("config_groups") or {}
    for name, group in groups.items():
        weights = group.get("weights") or {}
        formats |= {str(group["format"])} if group.get("format") else set()
        bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
        if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
            raise ModelLoadError(f"compressed-tensors {name}: {bits}-bit {kind} weights are not supported")
        block = block or _block(weights.get("block_structure"))
    unknown = sorted(formats - set(_COMPRESSED))
    if unknown:
        raise ModelLoadError(
            f"compressed-tensors format {', '.join(unknown)} is not supported, {', '.join(_COMPRESSED)} are"
        )
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise ModelLoadError(f"compressed-tensors sparsity format {sparsity!r} is not supported")
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise ModelLoadError("compressed-tensors transform_config (rotated weights) is not supported")
    return QuantMethod("compressed-tensors", block=block)


def _block(value: object) -> tuple[int, int] | None:
    """[rows, columns], or "128x128"."""
    if value is None:
        return None
    sides = value.lower().split("x") if isinstance(value, str) else value
    try:
        rows, columns = (int(side) for side in sides)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise ModelLoadError(f"weight blocks of {value!r} are not [rows, columns]") from None
    if rows < 1 or columns < 1:
        raise ModelLoadError(f"weight blocks of {value!r} are not [rows, columns]")
    return rows, columns
