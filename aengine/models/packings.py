"""How integer and fp8 weights lie in safetensors files: GPTQ, AWQ, compressed-tensors, fp8.

Owns: which tensors make up one module's weight in each format, and their unpacking.
Does not know: config.json (see quant_method), files, backends.
Invariants: what a format calls its value, (code - zero) * scale, comes back exactly where scales are fp16 or bf16: each
product and sum then fits fp32. Tensors that do not fit together raise ModelLoadError with the module's name. Memory
beyond the result: a few copies of the codes, one byte each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aengine.errors import ModelLoadError
from aengine.kernels.quantised import Quantised
from aengine.models.quant_method import QuantMethod

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds this one of its 8 outputs
FLOAT8 = ("F8_E4M3", "F8_E5M2")


class Stored(Protocol):
    """A checkpoint's tensors as they lie in the file."""

    def has(self, name: str) -> bool: ...

    def stored(self, name: str) -> Tensor: ...

    def stored_shape(self, name: str) -> tuple[int, ...]: ...

    def stored_type(self, name: str) -> str:
        """The file's own name of the element type: I8, I32, F8_E4M3, F16 .."""
        ...


@dataclass(frozen=True, slots=True)
class Codes:
    """Values (code - zero) * scale. codes uint8 [out, in], 0 .. 2^bits - 1; zero and scale [out, groups], of any number
    type; `index` int64 [in]: each input's group, None: groups are equal runs of inputs."""

    codes: Tensor
    zero: Tensor
    scale: Tensor
    bits: int
    index: Tensor | None = None

    @property
    def group(self) -> int:
        return int(self.codes.shape[1]) // int(self.scale.shape[1])

    def quantised(self) -> Quantised | None:
        """Inputs of a group that do not stand together are brought together. None when groups are of unequal size."""
        size_in, runs = self.codes.shape[1], self.group * self.scale.shape[1]
        if runs != size_in:
            return None
        codes, order = self.codes, None
        if self.index is not None:
            groups, columns = self.index.sort(stable=True)
            if not torch.equal(groups, torch.arange(size_in) // self.group):
                return None
            if not torch.equal(groups, self.index):
                codes, order = codes[:, columns], columns.int()
        zero, scale = self.zero.float(), self.scale.float().contiguous()
        if self.bits == 8:
            codes, zero = codes.bitwise_xor(128).view(torch.int8), zero - 128
        minimum = (zero * scale).neg_().contiguous() if bool(zero.any()) else None
        return Quantised(codes.contiguous(), scale, minimum, self.group, self.bits, order)

    def dense(self) -> Tensor:
        """fp32 [out, in]."""
        size_in = self.codes.shape[1]
        index = torch.arange(size_in) // self.group if self.index is None else self.index
        return self.codes.float().sub_(self.zero.float()[:, index]).mul_(self.scale.float()[:, index])


@dataclass(frozen=True, slots=True)
class Floats:
    """Values code * scale. codes fp8 [out, in]; scale [out, 1], of any number type."""

    codes: Tensor
    scale: Tensor

    def quantised(self) -> Quantised | None:
        """None for other types than e4m3."""
        if self.codes.dtype is not torch.float8_e4m3fn:
            return None
        return Quantised(self.codes.contiguous(), self.scale.float().contiguous(), None, self.codes.shape[1], 8)

    def dense(self) -> Tensor:
        """fp32 [out, in]."""
        return self.codes.float().mul_(self.scale.float())


class Packing(Protocol):
    """One format. `module`: a weight's name without ".weight"."""

    def owns(self, at: Stored, module: str) -> bool:
        """Whether the module's weight lies in this format; if not, it is plain."""
        ...

    def shape(self, at: Stored, module: str) -> tuple[int, ...]:
        """[out, in], without reading the weight."""
        ...

    def read(self, at: Stored, module: str) -> Codes | Floats | Tensor:
        """Codes, floats with a scale an output, or fp32 [out, in] where the format is neither."""
        ...


def packings_of(method: QuantMethod) -> tuple[Packing, ...]:
    if method.kind == "gptq":
        return (Gptq(method.zero_offset),)
    if method.kind == "awq":
        return (Awq(),)
    scaled = Scaled(method.block)
    return (scaled,) if method.kind == "fp8" else (Packed(), scaled)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 [..., n] -> uint8 [..., n * 32 / bits]: fields of a word from its low bits up."""
    shape = (*words.shape[:-1], words.shape[-1] * 32 // bits)
    octets = words.contiguous().view(torch.uint8)  # little-endian: low bits first
    if bits == 8:
        return octets.view(shape)
    return torch.stack((octets & 15, octets >> 4), dim=-1).view(shape)


@dataclass(frozen=True, slots=True)
class Gptq:
    """qweight int32 [in * bits / 32, out], packed along in; qzeros int32 [groups, out * bits / 32]; scales
    [groups, out]; g_idx int32 [in], each input's group. `zero_offset`: what was taken off zero points before
    they were stored."""

    zero_offset: int

    def owns(self, at: Stored, module: str) -> bool:
        return at.has(module + ".qweight")

    def _bits(self, at: Stored, module: str) -> int:
        out, zeros = at.stored_shape(module + ".scales")[1], at.stored_shape(module + ".qzeros")[1]
        bits = zeros * 32 // out
        if bits not in (4, 8):
            raise ModelLoadError(f"{module}.qweight: GPTQ weights have {bits} bits; 4 and 8 are supported")
        return bits

    def shape(self, at: Stored, module: str) -> tuple[int, ...]:
        words, out = at.stored_shape(module + ".qweight")
        return out, words * 32 // self._bits(at, module)

    def read(self, at: Stored, module: str) -> Codes:
        bits = self._bits(at, module)
        codes = unpack_words(at.stored(module + ".qweight").t(), bits)
        zeros = unpack_words(at.stored(module + ".qzeros"), bits).short().add_(self.zero_offset).t()
        scales = at.stored(module + ".scales").t()
        index = at.stored(module + ".g_idx").long() if at.has(module + ".g_idx") else None
        return _checked(module, Codes(codes, zeros, scales, bits, index))


@dataclass(frozen=True, slots=True)
class Awq:
    """qweight int32 [in, out / 8], packed along out in AWQ_ORDER; qzeros int32 [groups, out / 8], likewise; scales
    [groups, out]."""

    def owns(self, at: Stored, module: str) -> bool:
        return at.has(module + ".qweight")

    def shape(self, at: Stored, module: str) -> tuple[int, ...]:
        size_in, words = at.stored_shape(module + ".qweight")
        return words * 8, size_in

    def read(self, at: Stored, module: str) -> Codes:
        codes, zeros = (_in_order(at.stored(module + name)) for name in (".qweight", ".qzeros"))
        return _checked(module, Codes(codes, zeros, at.stored(module + ".scales").t(), 4))


def _in_order(words: Tensor) -> Tensor:
    """int32 [n, m] -> uint8 [8 m, n]."""
    nibbles = unpack_words(words, 4).view(*words.shape, 8)
    return nibbles[..., torch.tensor(AWQ_ORDER).argsort()].flatten(1).t().contiguous()


@dataclass(frozen=True, slots=True)
class Packed:
    """compressed-tensors' packed form: weight_packed int32 [out, in * bits / 32] of codes with 2^(bits - 1) added,
    weight_shape, weight_scale [out, groups]; optional weight_zero_point (packed along out, or int8 [out, groups]) and
    weight_g_idx."""

    def owns(self, at: Stored, module: str) -> bool:
        return at.has(module + ".weight_packed")

    def shape(self, at: Stored, module: str) -> tuple[int, ...]:
        out, size_in = at.stored(module + ".weight_shape").tolist()
        return int(out), int(size_in)

    def read(self, at: Stored, module: str) -> Codes:
        words, (out, size_in) = at.stored(module + ".weight_packed"), self.shape(at, module)
        bits = next((bits for bits in (4, 8) if -(-size_in * bits // 32) == words.shape[1]), None)
        if bits is None:
            raise ModelLoadError(
                f"{module}.weight_packed: {words.shape[1]} words for {size_in} inputs are neither 4 nor 8 bits a weight"
            )
        codes, scale = unpack_words(words, bits)[:, :size_in], at.stored(module + ".weight_scale")
        zero = torch.full(scale.shape, 1 << (bits - 1), dtype=torch.int16)
        if at.has(module + ".weight_zero_point"):
            given = at.stored(module + ".weight_zero_point")
            packed = given.dtype is torch.int32
            zero = unpack_words(given.t(), bits).t()[:out] if packed else given.short() + (1 << (bits - 1))
        index = at.stored(module + ".weight_g_idx").long() if at.has(module + ".weight_g_idx") else None
        return _checked(module, Codes(codes, zero, scale, bits, index))


@dataclass(frozen=True, slots=True)
class Scaled:
    """weight int8 or fp8 [out, in] with weight_scale for the tensor, for each output, for runs of inputs, or
    weight_scale_inv; of `block` (rows, columns) where that is given. Optional weight_zero_point int8."""

    block: tuple[int, int] | None = None

    def owns(self, at: Stored, module: str) -> bool:
        return at.has(module + ".weight") and at.stored_type(module + ".weight") in ("I8", *FLOAT8)

    def shape(self, at: Stored, module: str) -> tuple[int, ...]:
        return at.stored_shape(module + ".weight")

    def read(self, at: Stored, module: str) -> Codes | Floats | Tensor:
        weight, scale = at.stored(module + ".weight"), self._scale(at, module)
        out, size_in = weight.shape
        if scale.numel() == 1 or (scale.dim() == 1 and scale.numel() == out):
            scale = scale.reshape(-1, 1).expand(out, 1)
        if weight.dtype is torch.int8 and scale.shape[0] == out:
            name = module + ".weight_zero_point"
            zero = at.stored(name).short().reshape(-1, scale.shape[1]) if at.has(name) else torch.zeros(1, 1)
            octets = weight.view(torch.uint8).bitwise_xor(128)
            return _checked(module, Codes(octets, (zero + 128).expand(scale.shape), scale, 8))
        rows, columns = self.block or (1, max(1, size_in // scale.shape[1]))
        if scale.shape != (-(-out // rows), -(-size_in // columns)) and scale.shape != (out, 1):
            raise ModelLoadError(f"{module}.weight {tuple(weight.shape)} has scales {tuple(scale.shape)}")
        if scale.shape == (out, 1):
            return Floats(weight, scale)
        scale = scale.repeat_interleave(rows, 0)[:out].repeat_interleave(columns, 1)[:, :size_in]
        return weight.float().mul_(scale.float())

    def _scale(self, at: Stored, module: str) -> Tensor:
        for name in (module + ".weight_scale", module + ".weight_scale_inv"):
            if at.has(name):
                return at.stored(name)
        raise ModelLoadError(f"{module}.weight is {at.stored_type(module + '.weight')}, but has no weight_scale")


def _checked(module: str, found: Codes) -> Codes:
    out, size_in = found.codes.shape
    groups = found.scale.shape[1]
    if found.scale.shape[0] != out or found.zero.shape != found.scale.shape or not 0 < groups <= size_in:
        raise ModelLoadError(
            f"{module}: codes {(out, size_in)}, scales {tuple(found.scale.shape)} and zero points "
            f"{tuple(found.zero.shape)} do not fit together"
        )
    if found.index is None:
        if size_in % groups:
            raise ModelLoadError(f"{module}: {size_in} inputs do not divide into {groups} groups")
    elif found.index.shape != (size_in,) or not 0 <= int(found.index.min()) <= int(found.index.max()) < groups:
        raise ModelLoadError(f"{module}: the group index does not give each of {size_in} inputs one of {groups} groups")
    return found
