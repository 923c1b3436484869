"""The modelled device: its clock, its tokens, its rooflines."""

import numpy as np
import pytest

from aengine.runner.modelled import ModelledExecutor, following
from aengine.runner.sim import allowed_tokens
from aengine.runner.sim_profiles import PROFILES
from aengine.types import SamplingParams, SlotSetup, StepPlan, TokenRules

VOCAB = 1000


class Clock:
    def __init__(self):
        self.s = 0.0

    def now(self):
        return self.s

    def sleep(self, seconds):
        self.s += seconds


class Second:
    def step_s(self, rows, tokens, context):
        return 1.0


def setup(slot, seed=0, temperature=0.0):
    sampling = SamplingParams(temperature=temperature)
    return SlotSetup(slot, slot, 1, sampling, TokenRules(), seed, np.zeros(0, np.int32))


def plan(rows, setups=()):
    """rows: (slot, start, ids or None for relay, samples)."""
    ids = [token for _, _, given, _ in rows if given is not None for token in given]
    return StepPlan(
        step=0,
        slots=np.array([row[0] for row in rows], np.int64),
        handles=np.array([row[0] for row in rows], np.int64),
        starts=np.array([row[1] for row in rows], np.int32),
        counts=np.array([1 if row[2] is None else len(row[2]) for row in rows], np.int32),
        samples=np.array([row[3] for row in rows], np.int32),
        relay=np.array([row[2] is None for row in rows], np.bool_),
        ids=np.array(ids, np.int32),
        setups=tuple(setups),
    )


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def device(clock):
    return ModelledExecutor(Second(), max_seqs=8, vocab=VOCAB, now=clock.now, sleep=clock.sleep)


def test_steps_are_serial_and_idle_time_is_exact(device, clock):
    first, second = device.stage(plan([(0, 0, [5], 1)], [setup(0)])), device.stage(plan([(0, 1, None, 1)]))
    device.run(first)
    device.run(second)
    assert clock.s == 2.0
    clock.s = 2.5
    device.run(device.stage(plan([(0, 2, None, 1)])))
    assert (device.occupancy.busy_s, device.occupancy.idle_s, device.occupancy.ended_s) == (3.0, 0.5, 3.5)


def test_a_late_thread_does_not_make_the_device_late(device, clock):
    staged = [device.stage(plan([(0, i, [5], 1)], [setup(0)])) for i in range(3)]
    device.run(staged[0])
    clock.s = 1.7  # the thread woke late
    device.run(staged[1])
    device.run(staged[2])
    assert clock.s == 3.0
    assert device.occupancy.idle_s == 0.0


def test_a_token_follows_from_the_one_before_it_whatever_the_chunks(device):
    whole = device.run(device.stage(plan([(0, 0, [5, 6, 7], 1)], [setup(0)])))
    device.run(device.stage(plan([(1, 0, [5, 6], 0)], [setup(1)])))
    chunked = device.run(device.stage(plan([(1, 2, [7], 1), (0, 3, None, 1)])))
    assert chunked.tokens[0, 0] == whole.tokens[0, 0]
    expected = following(whole.tokens[:1, 0], np.array([3]), np.zeros(1, np.uint64), VOCAB)
    assert chunked.tokens[1, 0] == expected[0]
    assert 256 <= int(expected[0]) < VOCAB


def test_seeds_and_positions_matter(device):
    plain, seeded = setup(0), setup(1, seed=9, temperature=1.0)
    result = device.run(device.stage(plan([(0, 0, [5], 1), (1, 0, [5], 1), (2, 4, [5], 1)], [plain, seeded, setup(2)])))
    assert len(set(result.tokens[:, 0].tolist())) == 3


def test_drafts_are_accepted_as_far_as_they_are_right(device):
    def next_of(token, position):
        ids, at = np.array([token], np.int32), np.array([position])
        return int(following(ids, at, np.zeros(1, np.uint64), VOCAB)[0])

    a = next_of(5, 0)
    b = next_of(a, 1)
    result = device.run(device.stage(plan([(0, 0, [5, a, 3], 3), (1, 0, [5, a, b], 3)], [setup(0), setup(1)])))
    assert result.counts.tolist() == [2, 3]
    assert result.tokens[0, :2].tolist() == [a, b]
    assert result.tokens[1].tolist() == [a, b, next_of(b, 2)]


def test_the_profile_of_1024_rows_is_what_its_bytes_take():
    step_s = PROFILES["h100-llama8b"].step_s(1024, 1024, 1024 * 500)
    assert step_s == pytest.approx((16.06e9 + 1024 * 500 * 131072) / 3.35e12)
    assert 0.024 < step_s < 0.026
    compute_bound = PROFILES["h100-llama8b"].step_s(1, 4096, 4096)
    assert compute_bound == pytest.approx(4096 * 2 * 8.03e9 / 989e12)


@pytest.mark.parametrize("words", [1, 3, 40])
@pytest.mark.parametrize("density", [1, 2, 31, 2000])
def test_a_token_that_is_not_allowed_gives_way_to_the_next_that_is(words, density):
    rng = np.random.default_rng(words * density)
    bits = np.zeros((50, 32 * words), np.uint8)
    for row in bits:
        row[rng.integers(0, 32 * words, density)] = 1
    tokens = rng.integers(0, 32 * words, 50).astype(np.int32)
    masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    expected = [
        next(token for token in (*range(first, 32 * words), *range(first)) if row[token])
        for first, row in zip(tokens.tolist(), bits, strict=True)
    ]
    assert allowed_tokens(tokens, masks).tolist() == expected
