"""How long a step takes on devices that are not here.

Owns: roofline models of device and model pairs, by name.
Does not know: plans, threads, tokens.
Invariants: a step takes the longer of moving its bytes and doing its arithmetic, both at the published peak; so
a real device is slower, and an engine that keeps up with the model keeps up with the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Roofline:
    """One model on one device. Bytes, bytes/s, FLOP, FLOP/s.

    A step reads all weights once and the keys and values of every row's context, and multiplies each of its tokens with
    all weights: Williams et al., "Roofline", CACM 52(4), 2009.
    """

    weight_bytes: float
    kv_bytes_per_token: float
    flop_per_token: float
    bytes_per_s: float
    flop_per_s: float

    def step_s(self, rows: int, tokens: int, context: int) -> float:
        """Seconds of a step of `tokens` positions in `rows` rows whose contexts sum to `context` tokens."""
        moved_s = (self.weight_bytes + self.kv_bytes_per_token * context) / self.bytes_per_s
        return max(moved_s, self.flop_per_token * tokens / self.flop_per_s)

    def slower(self, times: float) -> Roofline:
        """A device that takes `times` as long."""
        return replace(self, bytes_per_s=self.bytes_per_s / times, flop_per_s=self.flop_per_s / times)


PROFILES = {
    # Llama 3.1 8B: 8.03e9 weights in bf16; 32 layers x 8 key-value heads x 128 x (K and V) x 2 bytes a token (Meta's
    # model card and config.json). H100 SXM: 3.35 TB/s, 989 TFLOP/s dense bf16 (NVIDIA's data sheet).
    "h100-llama8b": Roofline(16.06e9, 32 * 8 * 128 * 2 * 2, 2 * 8.03e9, 3.35e12, 989e12),
    # Llama 3.1 70B in bf16 on eight of them, communication not counted: 70.6e9 weights, 80 layers, 8 heads of 128.
    "8xh100-llama70b": Roofline(141.2e9, 80 * 8 * 128 * 2 * 2, 2 * 70.6e9, 8 * 3.35e12, 8 * 989e12),
}
