"""Frozen values that cross the borders between rooms.

Owns: the shapes of requests, step plans, step results and outputs.
Does not know: torch, asyncio, text processing, any room's state.
Invariants: values are never mutated after construction; arrays are read-only by agreement of both sides. Everything is
plain data, so any border can become a process border.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from aengine.errors import InvalidRequest

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
Bools = NDArray[np.bool_]


class FinishReason(StrEnum):
    """Why a request ended. `STOP`: EOS, a stop token or a stop string; `LENGTH`: max_tokens or the context."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Grammar(msgspec.Struct, frozen=True):
    """What an answer must look like, as the client wrote it.

    `kind` and `source`: "json_object" (empty), "json_schema" (the schema as JSON text), "regex" (the pattern), "choice"
    (a JSON list of strings), "lark" (a grammar in llguidance's Lark dialect, or in GBNF).
    """

    kind: str
    source: str = ""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one request are chosen. Names follow vLLM's.

    `temperature` 0 is greedy. `top_k` 0 or -1 is off. `seed` is any 64-bit integer (None: a random one is drawn at
    submission). `logprobs`/`prompt_logprobs` k: the chosen token's log-probability and the k best, of the model's
    own distribution before temperature, penalties and masks (log-softmax of the raw logits); None: off.
    `max_tokens` None: up to the context length.

    Raises InvalidRequest with `param` set for every value out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    bad_words: tuple[str, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words", "stop_token_ids"):
            self._make_tuple(name)
        for name in ("n", "top_k", "min_tokens", "max_tokens", "seed", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise InvalidRequest(f"{name} is {value!r}, not an integer"[:200], param=name)
        _check_range("n", self.n, 1, 1024)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_range("top_k", self.top_k, -1, 2**31 - 1)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        _check_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest(
                    f"min_tokens ({self.min_tokens}) is greater than max_tokens ({self.max_tokens})", param="min_tokens"
                )
        if self.seed is not None:
            _check_range("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_range(name, value, 0, 1024)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids is empty: no token could be sampled", param="allowed_token_ids")
        if self.logit_bias:
            for token, bias in self.logit_bias.items():
                if not math.isfinite(bias) or not -100.0 <= bias <= 100.0:
                    raise InvalidRequest(f"logit_bias[{token}] is {bias}, not in [-100, 100]", param="logit_bias")
        if any(not text for text in self.stop):
            raise InvalidRequest("stop contains an empty string", param="stop")
        _check_bad_words(self.bad_words)

    def _make_tuple(self, name: str) -> None:
        """A single string or id stands for itself, not for its characters; lists become tuples."""
        value = getattr(self, name)
        if isinstance(value, str | int):
            msgspec.structs.force_setattr(self, name, (value,))
        elif value is None or not isinstance(value, tuple):
            msgspec.structs.force_setattr(self, name, tuple(value or ()))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether sampling depends on earlier tokens (penalties, bad words)."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0 or self.bad_words)


BAD_WORDS_MAX = 128
BAD_WORD_CHARS_MAX = 256


def _check_bad_words(words: tuple[str, ...]) -> None:
    """Each word costs work at every step of its request."""
    if len(words) > BAD_WORDS_MAX:
        raise InvalidRequest(f"{len(words)} bad_words; at most {BAD_WORDS_MAX} are allowed", param="bad_words")
    for word in words:
        if not word.strip():
            raise InvalidRequest("bad_words contains an empty word", param="bad_words")
        if len(word) > BAD_WORD_CHARS_MAX:
            raise InvalidRequest(
                f"a bad word has {len(word)} characters; at most {BAD_WORD_CHARS_MAX} are allowed", param="bad_words"
            )


def _check_range(name: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    inside = (low < value if low_open else low <= value) and value <= high
    if not inside:  # also catches NaN, for which every comparison is false
        bracket = "(" if low_open else "["
        raise InvalidRequest(f"{name} is {value}, not in {bracket}{low}, {high}]", param=name)


class TokenRules(msgspec.Struct, frozen=True):
    """The parts of SamplingParams that need a tokenizer, resolved to token ids before submission.

    `stop_ids` end the request (EOS unless ignore_eos, plus stop_token_ids) and are masked until `min_tokens`.
    `bad_words` are token id sequences that may not be completed.
    """

    stop_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()


NO_END = 2**31 - 1  # a visibility that lasts as long as the sequence


class MediaInput(msgspec.Struct, frozen=True):
    """One decoded and preprocessed image, wherever it may stand in a prompt.

    `digest`: SHA-256 of the decoded pixels, their size and mode, and the processor's settings. `tokens`: entries it has
    in item groups (cross-attention KV). `arrays`: what the model's vision tower takes, by name; read-only.
    """

    digest: bytes
    tokens: int
    arrays: Mapping[str, NDArray[Any]]

    @property
    def n_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


class RequestMedia(msgspec.Struct, frozen=True):
    """An image in a prompt: its placeholders are `position` .. `position + span - 1`, and the positions `position` <=
    p < `until` see it (NO_END: all later ones, output included)."""

    input: MediaInput
    position: int
    span: int = 1
    until: int = NO_END


class Request(msgspec.Struct, frozen=True):
    """One token sequence to generate (a request with n > 1 is n of these).

    `handle` is unique for the life of the engine and grows with arrival: it is the request's age. `prompt_ids` is
    int32 [prompt]. `max_total_tokens` bounds prompt plus output (already fitted to the context). `seed` is the
    resolved 64-bit seed. `priority`: smaller runs earlier. `cause` is how the prefix cache accounts its hits.
    """

    handle: int
    id: str
    prompt_ids: Int32s
    sampling: SamplingParams
    rules: TokenRules
    max_total_tokens: int
    seed: int
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    cause: str = "fresh"
    media: tuple[RequestMedia, ...] = ()  # by rising position


class SlotSetup(msgspec.Struct, frozen=True):
    """Given to the device with the first step of a request in a slot: everything sampling needs to know.

    `history_ids` int32 [known]: prompt and earlier output, only when `sampling.needs_history`; else empty.
    """

    slot: int
    handle: int
    prompt_tokens: int
    sampling: SamplingParams
    rules: TokenRules
    seed: int
    history_ids: Int32s


class TableDelta(msgspec.Struct, frozen=True):
    """Entries of the block tables of one group, of one slot or of many: table[slots[i], columns[i]] = pages[i].

    No entry is named twice in one delta; the deltas of a plan apply in order.
    """

    group: int
    slots: Int64s
    columns: Int64s
    pages: Int32s

    @classmethod
    def run(cls, slot: int, group: int, first: int, pages: Sequence[int]) -> TableDelta:
        """table[slot, first : first + len(pages)] = pages."""
        count = len(pages)
        columns = np.arange(first, first + count, dtype=np.int64)
        return cls(group, np.full(count, slot, np.int64), columns, np.array(pages, np.int32))


class PageMove(msgspec.Struct, frozen=True):
    """Copy page `source` of a group to page `target`; the source's bytes are not read again."""

    group: int
    source: int
    target: int


class MediaPlacement(msgspec.Struct, frozen=True):
    """From this step on the row in `slot` reads item `item` (its number in the prompt) of an item group. A later
    placement of the same item takes the place of an earlier one: its pages have moved.

    Entry i of the item is in page pages[i // tokens per page]; there are `tokens` of them. Positions `first` <= p <
    `until` see it. `input`: the step computes the pages first, before any row; None: they are computed, or an earlier
    placement of the same plan names them with an input.
    """

    slot: int
    group: int
    item: int
    pages: tuple[int, ...]
    tokens: int
    first: int
    until: int
    input: MediaInput | None = None


NO_ROWS: Int64s = np.zeros(0, np.int64)


class StepPlan(msgspec.Struct, frozen=True):
    """One device step, in columns; R rows, row i is slots[i]. Made by the scheduler, read by the runner.

    A row computes positions starts[i] .. starts[i] + counts[i] - 1 of its sequence, and samples after its last
    `samples[i]` positions: 0 = none (a prefill chunk that does not end the prompt), 1 = after the last position,
    counts[i] = after every position (draft verification: position j's sample must equal draft j + 1 to go on).

    Input ids: `relay[i]` rows (always counts[i] == 1) take the token their slot sampled last, on the device. All
    other rows take counts[i] ids from `ids`, rows in order, concatenated.

    `prompt_logprobs` maps row index -> int32 [m] target ids: row position j (from 0) predicts target j. How many
    best tokens to return is in the slot's SamplingParams.prompt_logprobs.

    `zero`: large pages of the arena to zero first, because they change element type (stale bits may be NaN). `moves`:
    pages to copy, one after the other, behind that and before anything else. A plan with moves may have no rows.

    `decodes`: at least that many rows, the first ones, compute one position and sample once.

    `deferred`: rows, rising, that sample once, but not before `StepHandle.choose` says which tokens they may get.
    """

    step: int
    slots: Int64s  # [R]
    handles: Int64s  # [R]
    starts: Int32s  # [R] first position
    counts: Int32s  # [R] positions computed, >= 1
    samples: Int32s  # [R] 0, 1 or counts
    relay: Bools  # [R]
    ids: Int32s  # [sum of counts over non-relay rows]
    tables: tuple[TableDelta, ...] = ()
    setups: tuple[SlotSetup, ...] = ()
    prompt_logprobs: Mapping[int, Int32s] = {}
    zero: tuple[int, ...] = ()
    media: tuple[MediaPlacement, ...] = ()
    moves: tuple[PageMove, ...] = ()
    decodes: int = 0
    deferred: Int64s = NO_ROWS

    @property
    def n_tokens(self) -> int:
        return int(self.counts.sum())


class Logprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of m positions: the chosen token first, then the k best in falling order.

    ids int32 [m, k + 1], values float32 [m, k + 1], ranks int32 [m] (1 = the chosen token was the most likely).
    """

    ids: Int32s
    values: Float32s
    ranks: Int32s


class StepResult(msgspec.Struct, frozen=True):
    """What a step sampled. Row i of the plan has counts[i] tokens in tokens[i, :counts[i]].

    For a draft row, counts[i] - 1 drafts were accepted and the last token is the model's own.
    `failed` maps row index -> message for rows that failed alone (for instance NaN logits).
    `device_s` is the time the device spent on the step, between `began_s` and `ended_s` on the host's clock
    (time.perf_counter).
    """

    step: int
    tokens: Int32s  # [R, K]
    counts: Int32s  # [R], 0 where the row did not sample
    logprobs: Mapping[int, Logprobs] = {}
    prompt_logprobs: Mapping[int, Logprobs] = {}
    failed: Mapping[int, str] = {}
    device_s: float = 0.0
    began_s: float = 0.0
    ended_s: float = 0.0


class Choices(msgspec.Struct, frozen=True):
    """Which tokens deferred rows may get. `rows` int64 [n], rising, of the plan; `masks` int32 [n, ceil(V / 32)]:
    rows[i] may get token t if bit t % 32 of masks[i, t // 32] is set.

    Deferred rows that are not among them sample freely, and nobody hears of it.
    """

    rows: Int64s
    masks: Int32s


NO_CHOICES = Choices(NO_ROWS, np.zeros((0, 0), np.int32))


class StepHandle(Protocol):
    """A launched step. Awaited exactly once; raises StepFailed when the step raised.

    `launched` False: the device never heard of it, nor of the tables and set-ups it carried; no later step may be
    launched before it was awaited. `undecided`: it has deferred rows, and `choose` must be called, once, before any
    later step is launched and before it is awaited.

    `staged_s`: when the plan's values had been copied and only launching was left. `arrived_s`: when the host had the
    result; known once it was awaited. Both on the clock of time.perf_counter.
    """

    step: int
    launched: bool
    undecided: bool
    staged_s: float

    @property
    def arrived_s(self) -> float: ...

    def choose(self, choices: Choices) -> None:
        """Launch the sampling of the deferred rows; returns at once."""
        ...

    async def wait(self) -> StepResult: ...


class Finish(msgspec.Struct, frozen=True):
    """The end of a request; exactly one per request, after its last token.

    `stop_id`: the stop token that ended it, else None. `error`: the message when reason is ERROR.
    """

    handle: int
    reason: FinishReason
    stop_id: int | None = None
    error: str | None = None


class Admitted(msgspec.Struct, frozen=True):
    """A request got a slot for the first time; `cached_tokens` of its prompt came from the prefix cache."""

    handle: int
    cached_tokens: int


NO_HANDLES: Int64s = np.zeros(0, np.int64)
NO_TOKENS: Int32s = np.zeros(0, np.int32)


class StepOutputs(msgspec.Struct, frozen=True):
    """All that one commit tells the output task. handles[i] got tokens[i]; a handle may appear several times.

    `logprobs` is keyed by that index i and has one position. `prompt_logprobs` pairs come in prompt order.
    A finished handle's tokens stand in the same or an earlier StepOutputs.
    """

    step: int
    handles: Int64s = NO_HANDLES
    tokens: Int32s = NO_TOKENS
    logprobs: Mapping[int, Logprobs] = {}
    prompt_logprobs: Sequence[tuple[int, Logprobs]] = ()
    admitted: Sequence[Admitted] = ()
    finished: Sequence[Finish] = ()

    def __bool__(self) -> bool:
        """Whether there is anything to tell."""
        return bool(len(self.handles) or self.finished or self.admitted or self.prompt_logprobs)


class TokenLogprob(msgspec.Struct, frozen=True):
    """One token with its log-probability, rank (1 = most likely) and the best alternatives (id, logprob)."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class OutputDelta(msgspec.Struct, frozen=True, gc=False):
    """New output of one choice of a request: text and tokens since the previous delta.

    `text` holds only whole UTF-8 characters and never anything after a stop hit. `finish_reason` is set on the last
    delta of a choice, and only there. `stop_reason`: the stop string or stop token id that was hit.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None


class HttpFigures(msgspec.Struct, frozen=True):
    """What one listening process has seen at its sockets: faults by kind, which only grow, and what is open now."""

    faults: Mapping[str, int] = {}
    connections: int = 0
    connections_busy: int = 0
    upload_bytes: int = 0


class CompletionOutput(msgspec.Struct):
    """One choice of a request so far (or whole, once `finish_reason` is set)."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class RequestOutput(msgspec.Struct):
    """What AsyncEngine.generate yields: everything known of a request. `outputs` are cumulative, by index.

    `prompt_logprobs[i]` belongs to prompt token i; the first is None. Times are seconds since submission.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0
    ttft_s: float | None = None
    e2e_s: float | None = None
