"""Images through the scheduler: whatever happens to requests, what a row reads is the image its prompt shows there.

The device here is a shadow: it notes which image each cross page holds, in the order of the stream, and checks every
position of every row of every plan: without faults each is right; after one, whoever read garbage is not heard.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping

import numpy as np
import pytest

from aengine.memory import Cross, Full, Media, Pool, attention_group, plan
from aengine.prefix_cache import PrefixCache
from aengine.scheduler import Scheduler
from aengine.types import NO_END, MediaInput, Request, RequestMedia, SamplingParams, StepPlan, StepResult, TokenRules
from tests.prefix_cache.layouts import attention, items, small_plan

PAGE = 4
FULL, CROSS = 0, 1
MARK = 900  # the placeholder's id
NONE: Mapping[int, str] = {}


class Shadow:
    """`pages`: (digest, index of the page in the item) by cross page."""

    def __init__(self, cache: PrefixCache) -> None:
        self.slots_per_slab = [group.slots for group in cache.pool.plan.groups]
        self.pages: dict[int, tuple[bytes, int]] = {}
        self.rows: dict[int, dict[int, tuple[int, ...]]] = {}  # slot -> item -> pages
        self.requests: dict[int, Request] = {}
        self.computed: Counter[bytes] = Counter()
        self.placed_again = 0

    def launch(self, step: StepPlan, *, broken: bool = False, failed: Mapping[int, str] = NONE) -> set[int]:
        """`broken`: the step raises before it writes anything; `failed`: rows that fail alone, with their images.
        -> handles of the rows that read what is not their image: after a fault nobody may hear of them."""
        failing = {int(step.slots[row]) for row in failed}
        for move in step.moves:
            if move.group == CROSS and not broken:
                self.pages[move.target] = self.pages.pop(move.source, (b"garbage", 0))
        for setup in step.setups:
            self.rows[setup.slot] = {}
        for delta in step.tables:
            assert delta.group == FULL
            for page in delta.pages:
                self._overwrite(page // self.slots_per_slab[FULL])
        for one in step.media:
            assert one.group == CROSS
            assert len(one.pages) == -(-one.tokens // PAGE)
            self.placed_again += one.item in self.rows[one.slot]
            self.rows[one.slot][one.item] = one.pages
            if one.input is not None:
                assert one.slot in step.slots.tolist()
                self.computed[one.input.digest] += 1
                bad = broken or one.slot in failing
                for index, page in enumerate(one.pages):
                    self.pages[page] = (b"garbage" if bad else one.input.digest, index)
        return self._misled(step)

    def _overwrite(self, slab: int) -> None:
        size = self.slots_per_slab[CROSS]
        for page in range(slab * size, (slab + 1) * size):
            self.pages.pop(page, None)

    def _misled(self, step: StepPlan) -> set[int]:
        out = set()
        for slot, handle, start, count in zip(
            step.slots.tolist(), step.handles.tolist(), step.starts.tolist(), step.counts.tolist(), strict=True
        ):
            assert all(item < len(self.requests[handle].media) for item in self.rows[slot]), "another request's image"
            for item, media in enumerate(self.requests[handle].media):
                if media.position < start + count and media.until > start:
                    held = [self.pages.get(page) for page in self.rows[slot][item]]
                    if held != [(media.input.digest, i) for i in range(len(held))]:
                        out.add(handle)
        return out


def image(number: int) -> MediaInput:
    return MediaInput(bytes([number]) * 32, 1 + 3 * number, {})


def request(handle: int, rng: random.Random, images: int = 4) -> Request:
    """Up to three images out of `images`, in text that others also have."""
    ids, media = [], []
    for _ in range(rng.randrange(4)):
        ids += list(range(rng.choice([0, 2, 5, 9])))
        media.append((len(ids), image(rng.randrange(images))))
        ids.append(MARK)
    ids += list(range(rng.randint(1, 14)))
    ends = [position for position, _ in media[1:]] + [NO_END]
    placed = tuple(RequestMedia(one, position, 1, end) for (position, one), end in zip(media, ends, strict=False))
    output = rng.randint(1, 9)
    return Request(
        handle=handle,
        id=str(handle),
        prompt_ids=np.array(ids, np.int32),
        sampling=SamplingParams(max_tokens=output),
        rules=TokenRules(),
        max_total_tokens=len(ids) + output,
        seed=0,
        cache_salt=rng.choice(["", "", "other"]),
        media=placed,
    )


def make(large_pages: int, **changes: int) -> tuple[Scheduler, Shadow]:
    groups = [
        attention_group("full", Full(), 3, kv_heads=1, head_dim=16, tokens_per_page=PAGE),
        attention_group("cross", Cross(), 1, kv_heads=1, head_dim=16, tokens_per_page=PAGE),
    ]
    size = plan(groups, 2**24).large_bytes
    cache = PrefixCache(Pool(plan(groups, size * (large_pages + 1), large_bytes=size)))
    settings = {"max_seqs": 5, "budget_tokens": 16, "max_tokens": 96, "page_tokens": PAGE, **changes}
    return Scheduler(cache, **settings), Shadow(cache)  # type: ignore[arg-type]


def result(step: StepPlan, failed: dict[int, str]) -> StepResult:
    counts = np.minimum(step.samples, 1).astype(np.int32)
    counts[list(failed)] = 0
    tokens = (1000 + step.starts + step.counts).astype(np.int32)[:, None]
    return StepResult(step.step, tokens, counts, failed=failed)


def episode(seed: int) -> Counter[str]:
    rng = random.Random(seed)
    made, shadow = make(rng.choice([7, 8, 9, 12, 40]), budget_tokens=rng.choice([3, 8, 16, 64]))
    depth, seen = rng.randrange(3), Counter[str]()
    in_flight: deque[tuple[StepPlan, bool, dict[int, str], set[int]]] = deque()
    faults = rng.random() < 0.5
    open_: set[int] = set()
    to_come = 14
    for turn in range(600):
        if to_come and rng.random() < 0.3:
            to_come -= 1
            one = request(turn, rng)
            if made.cache.fits(one.max_total_tokens, [media.input.tokens for media in one.media]):
                shadow.requests[turn] = one
                open_.add(turn)
                made.submit(one)
        if open_ and rng.random() < 0.04:
            made.abort(rng.choice(sorted(open_)))
        step = made.plan()
        if step is not None:
            broken = faults and rng.random() < 0.04
            failing = [row for row in range(len(step.slots)) if faults and rng.random() < 0.04]
            failed = dict.fromkeys(failing, "bad")
            misled = shadow.launch(step, broken=broken, failed=failed)
            assert faults or not misled
            in_flight.append((step, broken, failed, misled))
            seen["misled"] += len(misled)
            seen["placed"] += len(step.media)
        ended = list(made.flush().finished)
        if len(in_flight) > depth or (in_flight and step is None):
            oldest, broken, failed, misled = in_flight.popleft()
            outputs = made.fail(oldest.step, "broken") if broken else made.commit(result(oldest, failed))
            assert not misled.intersection(outputs.handles)
            ended += outputs.finished
        for finish in ended:
            open_.remove(finish.handle)
            seen[finish.reason] += 1
        made.cache.check()
        if not to_come and not open_ and not in_flight:
            break
    assert not open_, f"unfinished: {open_}"
    assert all(group.live == group.fenced == 0 for group in made.cache.stats().pool.groups)
    seen["preempted"] += made.stats().preemptions
    seen["computed"] += made.stats().media_computed
    assert made.stats().media_items == seen["placed"] - shadow.placed_again
    seen["placed again"] += shadow.placed_again
    return seen


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_random_episodes(first: int) -> None:
    seen = Counter[str]()
    for seed in range(first, first + 50):
        seen += episode(seed)
    assert seen["preempted"] > 10
    assert seen["stop"] + seen["length"] > 200
    assert 0 < seen["computed"] < seen["placed"]
    assert seen["abort"]
    assert seen["placed again"]
    assert seen["error"]
    assert seen["misled"]


def test_requests_with_one_image_compute_it_once() -> None:
    made, shadow = make(60)
    for handle in range(4):
        media = (RequestMedia(image(3), 2 + handle),)
        ids = np.full(12, handle, np.int32)
        ids[2 + handle] = MARK
        one = Request(handle, str(handle), ids, SamplingParams(max_tokens=2), TokenRules(), 14, 0, media=media)
        shadow.requests[handle] = one
        made.submit(one)
    while (step := made.plan()) is not None:
        assert not shadow.launch(step)
        made.commit(result(step, {}))
    assert shadow.computed == {image(3).digest: 1}
    assert made.stats().media_items == 4


def test_a_request_waits_until_its_images_have_room() -> None:
    """10 large pages of 3 cross pages each: two of three images of 10 cross pages fit beside their texts."""
    made, shadow = make(10)
    for handle in range(3):
        source = MediaInput(bytes([handle]) * 32, 40, {})
        ids = np.array([handle, MARK, handle], np.int32)
        one = Request(
            handle, str(handle), ids, SamplingParams(max_tokens=6), TokenRules(), 9, 0, media=(RequestMedia(source, 1),)
        )
        shadow.requests[handle] = one
        made.submit(one)
    first = made.plan()
    assert first is not None
    assert not shadow.launch(first)
    assert first.handles.tolist() == [0, 1]
    assert made.stats().waiting == 1
    made.commit(result(first, {}))
    while (step := made.plan()) is not None:
        assert not shadow.launch(step)
        made.commit(result(step, {}))
    assert made.stats().preemptions == 0
    assert sum(shadow.computed.values()) == 3


@pytest.mark.parametrize("lifetime", [Cross(), Media()], ids=["cross", "media"])
def test_a_row_that_computes_an_item_is_not_preempted_in_the_same_plan(lifetime):
    """A row with one token left grows an item's pages, which get their name; an older prompt then finds pages short.
    Was the row taken out of the plan, nobody would compute what the name promises."""
    cache = PrefixCache(Pool(small_plan([attention("full", Full()), items("items", lifetime)], 7)))
    scheduler = Scheduler(cache, max_seqs=4, budget_tokens=8, max_tokens=64, page_tokens=4)
    image = MediaInput(b"i" * 32, 4, {})
    computed: set[int] = set()

    def submit(handle: int, tokens: int, most: int, media: tuple[RequestMedia, ...] = ()) -> None:
        ids = np.arange(tokens, dtype=np.int32) + 100 * handle
        params, total = SamplingParams(max_tokens=most), tokens + most
        scheduler.submit(Request(handle, str(handle), ids, params, TokenRules(), total, 0, media=media))

    def step() -> None:
        plan = scheduler.plan()
        assert plan is not None
        for placed in plan.media:
            if placed.input is not None:
                computed.update(placed.pages)
            assert computed.issuperset(placed.pages), f"step {plan.step} reads an item that no step has computed"
        tokens = np.full((len(plan.slots), 1), 7, np.int32)
        scheduler.commit(StepResult(plan.step, tokens, np.minimum(plan.samples, 1).astype(np.int32)))
        cache.check()

    submit(1, 4, 6)
    for _ in range(4):
        step()
    submit(2, 7, 1)
    submit(3, 5, 2, (RequestMedia(image, 4),))
    while scheduler.has_unfinished:
        step()
    assert computed
