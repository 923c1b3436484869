"""Choosing tokens and telling log-probabilities, one program a row.

Owns: these kernels.
Does not know: requests, the life of a slot.
Invariants: a row's result depends on its own logits, slot and position only; sums run in one order. Of equal scores
the lowest token wins. Noise is that of `runner.noise`, word for word; its logarithms may differ in their last bits.

Falling order without a sort: all z are at most 0, so the bits of -z as an integer ("key") rise as z falls, and the
least key that holds enough tokens or mass is found two bits at a time, in 16 passes over a row that stays in the cache.
"""

import triton
import triton.language as tl

NAN, INFINITE, MASKED, RULED = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(3)
LAST_KEY = tl.constexpr(0x7F7FFFFF)  # of the greatest finite number; masked tokens lie behind
LEAST = tl.constexpr(1.1754943508222875e-38)
SEEN = tl.constexpr(1 << 30)  # flag in a count: the token occurs


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _gumbel(token, k0, k1):
    """Noise of int32 tokens under a row's keys."""
    x = token.to(tl.uint32) + 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    x = (x ^ k0) * 0x7FEB352D
    x = x ^ (x >> 15)
    x = (x + k1) * 0x846CA68B
    x = x ^ (x >> 16)
    word = (x & 0x7FFFFFFF).to(tl.int32).to(tl.float32)
    v = tl.minimum((word + 0.5) * 4.656612873077393e-10, 0.9999999403953552)
    rest = 1.0 - v
    exact = rest == 1.0
    log1p = tl.where(exact, -v, tl.log(tl.where(exact, 0.5, rest)) * v / tl.where(exact, 1.0, 1.0 - rest))
    return -tl.log(-log1p)


@triton.jit
def _best(x_ptr, vocab, BLOCK: tl.constexpr):
    """-> (greatest value, its lowest token, fault of the row or 0)."""
    lane = tl.arange(0, BLOCK)
    value = tl.full([BLOCK], -float("inf"), tl.float32)
    token = lane
    broken = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab, BLOCK):
        at = first + lane
        x = tl.load(x_ptr + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
        broken = broken | (x != x).to(tl.int32)
        token = tl.where(x > value, at, token)
        value = tl.where(x > value, x, value)
    top = tl.max(value, 0)
    fault = tl.where(top == float("inf"), INFINITE, tl.where(top == -float("inf"), MASKED, 0))
    fault = tl.where(tl.max(broken, 0) > 0, NAN, fault)
    return top, tl.min(tl.where(value == top, token, vocab), 0), fault


@triton.jit
def _scaled(x_ptr, at, vocab, top, temperature):
    """z of tokens `at`, minus infinity behind the vocabulary."""
    x = tl.load(x_ptr + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
    return tl.math.div_rn(x - top, tl.full(x.shape, 1.0, tl.float32) * temperature)


@triton.jit
def _key(z):
    return tl.abs(z).to(tl.int32, bitcast=True)


@triton.jit
def _weight(z, MASS: tl.constexpr):
    """What a token counts: its probability over the best one's, or one."""
    return tl.exp(z).to(tl.float64) if MASS else tl.full(z.shape, 1.0, tl.float64)


@triton.jit
def _sum_to(x_ptr, vocab, top, temperature, last, MASS: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, vocab, BLOCK):
        z = _scaled(x_ptr, first + lane, vocab, top, temperature)
        total += tl.where(_key(z) <= last, _weight(z, MASS), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _least_key(x_ptr, vocab, top, temperature, last, wanted, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The least key k <= last such that tokens of keys up to k count at least `wanted`; `last` if none."""
    lane = tl.arange(0, BLOCK)
    base = last * 0
    for digit in range(16):
        shift = tl.maximum(29 - 2 * digit, 0)
        step = tl.full([], 1, tl.int32) << shift
        below0 = tl.zeros([BLOCK], tl.float64)
        below1 = tl.zeros([BLOCK], tl.float64)
        below2 = tl.zeros([BLOCK], tl.float64)
        for first in range(0, vocab, BLOCK):
            z = _scaled(x_ptr, first + lane, vocab, top, temperature)
            key = _key(z)
            weight = tl.where(key <= last, _weight(z, MASS), 0.0)
            over = (key - base) // step
            below0 += tl.where(over < 1, weight, 0.0)
            below1 += tl.where(over < 2, weight, 0.0)
            below2 += tl.where(over < 3, weight, 0.0)
        short0 = (tl.sum(below0, 0) < wanted).to(tl.int32)
        short1 = (tl.sum(below1, 0) < wanted).to(tl.int32)
        short2 = (tl.sum(below2, 0) < wanted).to(tl.int32)
        base = tl.minimum(base + (short0 + short1 + short2) * step, last)
    return base


@triton.jit
def sample_kernel(
    logits_ptr, shaped_ptr, slots_ptr, positions_ptr, temperature_ptr, top_k_ptr, top_p_ptr, floor_ptr, seed_ptr,
    tokens_ptr, faults_ptr, vocab, stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """logits [N, V] raw; shaped fp32 [N, V]: after rules, or None for the same. Columns by slot."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    x_ptr = logits_ptr + row.to(tl.int64) * stride
    top, token, fault = _best(x_ptr, vocab, BLOCK)
    if shaped_ptr is None:
        token = _draw(
            x_ptr, slot, row, top, token, fault, positions_ptr, temperature_ptr, top_k_ptr, top_p_ptr, floor_ptr,
            seed_ptr, vocab, BLOCK,
        )  # fmt: skip
    else:
        y_ptr = shaped_ptr + row.to(tl.int64) * vocab
        top, token, later = _best(y_ptr, vocab, BLOCK)
        fault = tl.where((fault == 0) & (later > 0), later + RULED, fault)
        token = _draw(
            y_ptr, slot, row, top, token, fault, positions_ptr, temperature_ptr, top_k_ptr, top_p_ptr, floor_ptr,
            seed_ptr, vocab, BLOCK,
        )  # fmt: skip
    tl.store(tokens_ptr + row, tl.where(fault > 0, 0, token))
    if faults_ptr is not None:
        tl.store(faults_ptr + row, fault)


@triton.jit
def _draw(
    x_ptr, slot, row, top, token, fault, positions_ptr, temperature_ptr, top_k_ptr, top_p_ptr, floor_ptr, seed_ptr,
    vocab, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best token, or a drawn one where the slot has a temperature."""
    temperature = tl.load(temperature_ptr + slot)
    if (temperature > 0.0) & (fault == 0):
        temperature = tl.maximum(temperature, LEAST)
        top_k = tl.load(top_k_ptr + slot)
        top_p = tl.load(top_p_ptr + slot)
        last = tl.minimum(_key(tl.load(floor_ptr + slot)), LAST_KEY)
        if (top_k > 0) & (top_k < vocab):
            last = _least_key(x_ptr, vocab, top, temperature, last, top_k.to(tl.float64), False, BLOCK)
        if top_p < 1.0:
            wanted = top_p * _sum_to(x_ptr, vocab, top, temperature, last, True, BLOCK)
            last = _least_key(x_ptr, vocab, top, temperature, last, wanted, True, BLOCK)
        position = tl.load(positions_ptr + row).to(tl.uint64)
        mixed = _mix64(_mix64(tl.load(seed_ptr + slot).to(tl.uint64)) + position * 0x9E3779B97F4A7C15)
        k0 = (mixed >> 32).to(tl.uint32)
        k1 = (mixed & 0xFFFFFFFF).to(tl.uint32)
        lane = tl.arange(0, BLOCK)
        value = tl.full([BLOCK], -float("inf"), tl.float32)
        winner = tl.full([BLOCK], 0, tl.int32) + vocab
        for first in range(0, vocab, BLOCK):
            at = first + lane
            z = _scaled(x_ptr, at, vocab, top, temperature)
            score = tl.where((_key(z) <= last) & (at < vocab), z + _gumbel(at, k0, k1), -float("inf"))
            winner = tl.where(score > value, at, winner)
            value = tl.where(score > value, score, value)
        token = tl.min(tl.where(value == tl.max(value, 0), winner, vocab), 0)
    return token


@triton.jit
def mask_kernel(x_ptr, y_ptr, slots_ptr, allowed_ptr, vocab, stride, words, BLOCK: tl.constexpr):
    """x [N, V] -> y fp32 [N, V], minus infinity where the slot's bit (32 to a word, lowest first) is 0."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    x = tl.load(x_ptr + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    if allowed_ptr is not None:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        word = tl.load(allowed_ptr + slot * words + at // 32, mask=inside, other=0)
        x = tl.where(((word >> (at % 32)) & 1) == 1, x, -float("inf"))
    tl.store(y_ptr + row * vocab + at, x, mask=inside)


@triton.jit
def bias_kernel(y_ptr, slots_ptr, ids_ptr, bias_ptr, vocab, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """ids int32 [slots, COUNT] (-1: none), each id once a slot; bias fp32 of the same shape."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + slot * COUNT + i, mask=i < COUNT, other=-1)
    there = (token >= 0) & (token < vocab)
    at = y_ptr + row * vocab + token
    bias = tl.load(bias_ptr + slot * COUNT + i, mask=i < COUNT, other=0.0)
    tl.store(at, tl.load(at, mask=there, other=0.0) + bias, mask=there)


@triton.jit
def ban_kernel(
    y_ptr, slots_ptr, positions_ptr, words_ptr, until_ptr, history_ptr, vocab, history_size,
    COUNT: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """words int32 [slots, COUNT, LENGTH], ends aligned, -1 before a shorter one: its last token is banned where the
    others stand right before the position, and the position is below `until` [slots, COUNT]."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    position = tl.load(positions_ptr + row).to(tl.int32)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < COUNT
    word = words_ptr + (slot * COUNT + i) * LENGTH
    banned = inside & (position < tl.load(until_ptr + slot * COUNT + i, mask=inside, other=0))
    for place in tl.static_range(LENGTH - 1):
        wanted = tl.load(word + place, mask=inside, other=-1)
        index = position - (LENGTH - 1) + place
        known = (index >= 0) & (index < history_size)
        stood = tl.load(history_ptr + slot * history_size + index + i * 0, mask=inside & known, other=-2)
        banned = banned & ((wanted < 0) | (wanted == stood))
    token = tl.load(word + (LENGTH - 1), mask=inside, other=-1)
    there = banned & (token >= 0) & (token < vocab)
    tl.store(y_ptr + row * vocab + token, tl.full([BLOCK], -float("inf"), tl.float32), mask=there)


@triton.jit
def count_kernel(
    counts_ptr, slots_ptr, positions_ptr, prompt_ptr, history_ptr, vocab, history_size, BLOCK: tl.constexpr
):
    """counts int32 [N, V], zeroed: how often a token stands in the output so far; SEEN if also or only in the prompt.

    Integers, so the order in which they are added up does not matter.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    known = tl.minimum(tl.load(positions_ptr + row).to(tl.int32), history_size)
    prompt = tl.load(prompt_ptr + slot)
    for first in range(0, known, BLOCK):
        i = first + tl.arange(0, BLOCK)
        token = tl.load(history_ptr + slot * history_size + i, mask=i < known, other=-1)
        there = (i < known) & (token >= 0) & (token < vocab)
        tl.atomic_or(counts_ptr + row * vocab + token, tl.full([BLOCK], SEEN, tl.int32), mask=there, sem="relaxed")
        one = tl.full([BLOCK], 1, tl.int32)
        tl.atomic_add(counts_ptr + row * vocab + token, one, mask=there & (i >= prompt), sem="relaxed")


@triton.jit
def penalty_kernel(y_ptr, slots_ptr, counts_ptr, penalties_ptr, vocab, BLOCK: tl.constexpr):
    """penalties fp32 [slots, 3]: repetition of prompt and output, frequency and presence of the output."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    count = tl.load(counts_ptr + row * vocab + at, mask=inside, other=0)
    times = count & (SEEN - 1)
    repetition = tl.full([BLOCK], 1.0, tl.float32) * tl.load(penalties_ptr + slot * 3)
    y = tl.load(y_ptr + row * vocab + at, mask=inside, other=0.0)
    y = tl.where(count > 0, tl.where(y > 0, tl.math.div_rn(y, repetition), y * repetition), y)
    less = tl.load(penalties_ptr + slot * 3 + 1) * times.to(tl.float32)
    y = tl.where(times > 0, y - less - tl.load(penalties_ptr + slot * 3 + 2), y)
    tl.store(y_ptr + row * vocab + at, y, mask=inside)


@triton.jit
def logprobs_kernel(
    logits_ptr, chosen_ptr, ids_ptr, values_ptr, ranks_ptr, vocab, stride, alternatives, BLOCK: tl.constexpr
):
    """ids, values [N, 1 + alternatives]: the chosen token, then the best, falling; NaN values in unsound rows."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr = logits_ptr + row * stride
    lane = tl.arange(0, BLOCK)
    top, _, fault = _best(x_ptr, vocab, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        at = first + lane
        x = tl.load(x_ptr + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
        total += tl.exp(x - top)
    log_total = tl.log(tl.sum(total, 0))
    unsound = tl.where(fault > 0, float("nan"), 0.0)
    chosen = tl.load(chosen_ptr + row).to(tl.int32)
    own = tl.load(x_ptr + chosen).to(tl.float32)
    own_value = own - top - log_total + unsound
    width = alternatives + 1
    tl.store(ids_ptr + row * width, chosen)
    tl.store(values_ptr + row * width, own_value)
    above = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab, BLOCK):
        at = first + lane
        x = tl.load(x_ptr + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
        above += (x - top - log_total > own_value).to(tl.int32)
    tl.store(ranks_ptr + row, 1 + tl.sum(above, 0))
    value = tl.full([], float("inf"), tl.float32)
    token = tl.full([], -1, tl.int32)
    for place in range(1, width):
        most = tl.full([BLOCK], -float("inf"), tl.float32)
        which = tl.full([BLOCK], 0, tl.int32) + vocab
        for first in range(0, vocab, BLOCK):
            at = first + lane
            x = tl.load(x_ptr + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
            after = (at < vocab) & ((x < value) | ((x == value) & (at > token)))
            better = after & ((x > most) | (which == vocab))
            which = tl.where(better, at, which)
            most = tl.where(better, x, most)
        value = tl.max(most, 0)
        token = tl.min(tl.where((most == value) & (which < vocab), which, vocab), 0)
        tl.store(ids_ptr + row * width + place, tl.where(fault > 0, 0, token))
        tl.store(values_ptr + row * width + place, value - top - log_total + unsound)
