"""The sampler by native kernels: same tokens, rules and failures as `Sampler`, one foreign call for all rows.

Owns: the native sampling state of all slots, and what its addresses point to.
Does not know: models, plans, KV, how a kernel samples.
Invariants: as `Sampler`, which is its oracle. A slot's whole state is replaced by each setup.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.native import Context
from aengine.kernels.native.sampling import NEUTRAL, SLOT, LogprobArrays, NativeSampling
from aengine.runner.masks import Masks
from aengine.runner.noise import seed_word
from aengine.runner.sampler import Sampled
from aengine.types import Int32s, Int64s, Logprobs, SlotSetup

_WHAT = ("the model's logits", "the logits after masks and penalties")
_FAULTS = {4: (0, "NaN"), 5: (0, "infinity"), 6: (0, None), 7: (1, "NaN"), 8: (1, "infinity"), 9: (1, None)}


def fault_message(fault: int) -> str:
    """What befell a position, by the number api.h gives it."""
    what, held = _FAULTS[fault]
    if held is None:
        return f"all tokens are masked: {_WHAT[what]} are minus infinity everywhere"
    return f"{_WHAT[what]} hold {held}"


class NativeSampler:
    """Sampling state of `slots` slots. Called in stream order, from one thread."""

    def __init__(self, context: Context, slots: int, vocab_size: int, max_model_len: int) -> None:
        self._sampling = NativeSampling(context)
        self._vocab_size = vocab_size
        self._history_size = max_model_len + 1  # the one more is for a zombie row at the context's end
        self.table = np.zeros(slots, dtype=SLOT)
        for name, value in NEUTRAL.items():
            self.table[name] = value
        self._held: list[tuple[NDArray[np.generic], ...]] = [()] * slots
        self._alternatives = np.full(slots, -1, dtype=np.int64)
        self._prompt_alternatives = [0] * slots

    def setup(self, setup: SlotSetup) -> None:
        """A request moves into a slot."""
        slot, params = setup.slot, setup.sampling
        row = dict.fromkeys(SLOT.names or (), 0) | NEUTRAL
        row |= {"temperature": params.temperature, "top_p": params.top_p, "min_p": params.min_p}
        row |= {"top_k": max(params.top_k, 0), "seed": int(seed_word(setup.seed))}
        row["alternatives"] = -1 if params.logprobs is None else params.logprobs
        self._prompt_alternatives[slot] = params.prompt_logprobs or 0
        self._alternatives[slot] = row["alternatives"]
        self._held[slot] = tuple(self._add_rules(setup, row))
        self.table[slot] = tuple(row.values())

    def _add_rules(self, setup: SlotSetup, row: dict[str, float]) -> Iterable[NDArray[np.generic]]:
        """Fill in the rules of a slot -> the arrays it points to."""
        params, rules = setup.sampling, setup.rules
        bias = params.logit_bias or {}
        lists = {
            "allowed": self._ids(params.allowed_token_ids or ()),
            "biased": self._ids(bias),
            "bad": self._ids(word[0] for word in rules.bad_words if len(word) == 1),
            "stops": self._ids(rules.stop_ids),
        }
        for name, ids in lists.items():
            row[name], row[name + "_count"] = ids.ctypes.data, len(ids)
            yield ids
        if params.allowed_token_ids is None:
            row["allowed_count"] = -1
        values = np.array([bias[token] for token in lists["biased"].tolist()], dtype=np.float32)
        row["bias"] = values.ctypes.data
        yield values
        if rules.stop_ids:
            row["stops_until"] = setup.prompt_tokens + params.min_tokens
        shaped = params.allowed_token_ids is not None or bool(bias) or bool(rules.bad_words)
        row["always_ruled"] = shaped or params.needs_history
        if params.needs_history:
            yield from self._add_history(setup, row)

    def _add_history(self, setup: SlotSetup, row: dict[str, float]) -> Iterable[NDArray[np.generic]]:
        params = setup.sampling
        words = [word for word in setup.rules.bad_words if len(word) > 1 and self._inside(word)]
        flat = np.array([value for word in words for value in (len(word), *word)], dtype=np.int32)
        history = np.zeros(self._history_size, dtype=np.int32)
        history[: len(setup.history_ids)] = setup.history_ids
        row |= {"bad_words": flat.ctypes.data, "bad_words_count": len(words)}
        row |= {"history": history.ctypes.data, "history_count": len(history), "prompt_tokens": setup.prompt_tokens}
        row |= {"repetition": params.repetition_penalty}
        row |= {"frequency": params.frequency_penalty, "presence": params.presence_penalty}
        return flat, history

    def _inside(self, ids: Iterable[int]) -> bool:
        return all(0 <= token < self._vocab_size for token in ids)

    def _ids(self, tokens: Iterable[int]) -> Int32s:
        return np.array(sorted({token for token in tokens if 0 <= token < self._vocab_size}), dtype=np.int32)

    def alternatives(self, slots: Int32s | Int64s) -> int:
        """The most alternatives that a slot among them wants beside its logprobs; -1: none wants any."""
        return min(int(self._alternatives[slots].max(initial=-1)), self._vocab_size)

    @contextmanager
    def masked(self, slots: Int32s | Int64s, bits: Int32s) -> Iterator[None]:
        """Within it, `slots` [n] may get only what `bits` int32 [n, W] allow."""
        width = -(-self._vocab_size // 32)
        held = np.zeros((len(bits), width), dtype=np.int32)
        held[:, : bits.shape[1]] = bits[:, :width]
        self.table["mask"][slots] = held.ctypes.data + np.arange(len(held), dtype=np.uint64) * np.uint64(4 * width)
        try:
            yield
        finally:
            self.table["mask"][slots] = 0

    def sample(self, logits: Tensor, slots: Int32s, positions: Int64s, masks: Masks | None = None) -> Sampled:
        """logits fp32 [N, V], slots [N], positions [N] of the sampled tokens; `masks` of some of them."""
        slots, positions = np.ascontiguousarray(slots, np.int32), np.ascontiguousarray(positions, np.int64)
        alternatives = self.alternatives(slots)
        with self.masked(slots[masks.rows], masks.bits) if masks is not None else nullcontext():
            tokens, faults, logprobs = self._sampling.sample(logits, self.table, slots, positions, alternatives)
        failed = {int(row): fault_message(int(faults[row])) for row in np.flatnonzero(faults)}
        return Sampled(tokens.astype(np.int64), self.pick_logprobs(logprobs, slots, failed), failed)

    def pick_logprobs(self, made: LogprobArrays | None, slots: Int32s, failed: Iterable[int]) -> dict[int, Logprobs]:
        """Of each position whose slot wants them; slots [N]."""
        if made is None:
            return {}
        wanted, result = self._alternatives[slots], {}
        for row in sorted(set(np.flatnonzero(wanted >= 0).tolist()) - set(failed)):
            one, width = slice(row, row + 1), 1 + min(int(wanted[row]), self._vocab_size)
            result[row] = Logprobs(made.ids[one, :width], made.values[one, :width], made.ranks[one])
        return result

    def score(self, logits: Tensor, targets: Int32s, slot: int) -> Logprobs:
        """Log-probabilities of prompt tokens int32 [N] by logits fp32 [N, V], as the request in `slot` wants them."""
        made = self._sampling.logprobs(logits, np.ascontiguousarray(targets, np.int32), self._prompt_alternatives[slot])
        return Logprobs(made.ids, made.values, made.ranks)
