"""The shadow device is itself tested: classic faults, planted on purpose, must be caught within a few episodes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aengine.memory import Fence, Pool
from aengine.memory.lifetimes import Window
from aengine.prefix_cache import PrefixCache
from aengine.prefix_cache.journal import Journal
from aengine.prefix_cache.matching import Roots
from aengine.prefix_cache.positional import PositionalRules
from aengine.prefix_cache.state import StateRules
from tests.prefix_cache.shadow import Shadow
from tests.prefix_cache.test_episodes import episode

Plant = Callable[[pytest.MonkeyPatch], None]


def no_fence(patch: pytest.MonkeyPatch) -> None:
    drop = Pool.drop
    patch.setattr(Pool, "drop", lambda pool, page, step: drop(pool, page, 0))


def salt_ignored(patch: pytest.MonkeyPatch) -> None:
    root = Roots.of
    patch.setattr(Roots, "of", lambda roots, salt, adapter: root(roots, "", adapter))


def prune_by_scheduled(patch: pytest.MonkeyPatch) -> None:
    prune = PositionalRules.prune

    def early(rules, lease, run, computed, step):
        prune(rules, lease, run, lease.tokens_ready, 0)

    patch.setattr(PositionalRules, "prune", early)


def window_off_by_one(patch: pytest.MonkeyPatch) -> None:
    first_live = Window.first_live
    patch.setattr(Window, "first_live", lambda window, tokens: first_live(window, tokens + 5))


def nothing_retracted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Journal, "take", lambda journal, step, serial: [])


def state_shared_in_its_step(patch: pytest.MonkeyPatch) -> None:
    extend = StateRules.extend

    def hasty(rules, lease, hold, pages, start, upto, step, parts):
        edge = extend(rules, lease, hold, pages, start, upto, step, parts)
        if upto % rules.page == 0 and upto <= lease.known and lease.publishes:
            rules._name(lease, hold.write, upto, step)
        return edge

    patch.setattr(StateRules, "extend", hasty)


def draft_pages_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StateRules, "cut", lambda rules, lease, hold, tokens, step: tokens)


def checkpoint_written_in_place(patch: pytest.MonkeyPatch) -> None:
    prepare = StateRules.prepare

    def in_place(rules, lease, hold, start, upto, step, drafts):
        need = prepare(rules, lease, hold, start, upto, step, drafts)
        if need and hold.write is not None:
            rules._name(lease, hold.write, start // rules.page * rules.page, step) if start >= rules.page else None
            return 0
        return need

    patch.setattr(StateRules, "prepare", in_place)


def deltas_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PositionalRules, "extend", _silent_extend)


def _silent_extend(rules, lease, run, pages, start, upto, step, parts):
    for page in pages:
        run.pages.append(page)
    run.sent = len(run.pages)
    return len(run.pages) * rules.page


def a_copy_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Of each step's moves the device makes all but the last."""
    run = Shadow.run

    def nearly(device, deltas, rows, *, moves, fails):
        run(device, deltas, rows, moves=moves[:-1], fails=fails)

    patch.setattr(Shadow, "run", nearly)


def a_holder_not_told(patch: pytest.MonkeyPatch) -> None:
    compact = PrefixCache.compact

    def partly(cache, step, slabs):
        compaction = compact(cache, step, slabs)
        return compaction._replace(tables=compaction.tables[:-1])

    patch.setattr(PrefixCache, "compact", partly)


def vacated_pages_not_fenced(patch: pytest.MonkeyPatch) -> None:
    fence = Pool.put_behind_fence

    def soon(pool, page, step):
        fence(pool, page, step if page.last >= step else pool.fence.retired + 1)

    patch.setattr(Pool, "put_behind_fence", soon)


def lost_pages_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Journal, "moved_by", lambda journal, step: [])


PLANTS: dict[str, tuple[str, Plant]] = {
    "no fence": ("full", no_fence),
    "salt ignored": ("full", salt_ignored),
    "pruned by scheduled": ("full+window", prune_by_scheduled),
    "window off by some": ("full+window", window_off_by_one),
    "failed step keeps its pages": ("full", nothing_retracted),
    "state shared too early": ("full+state", state_shared_in_its_step),
    "state of rejected drafts kept": ("full+state", draft_pages_kept),
    "checkpoint overwritten": ("full+state", checkpoint_written_in_place),
    "tables not told": ("full+window", deltas_forgotten),
    "a copy forgotten": ("full+window", a_copy_forgotten),
    "a holder of a moved page not told": ("state+window+full", a_holder_not_told),
    "vacated pages not fenced": ("full+window", vacated_pages_not_fenced),
    "pages lost in a failed step kept": ("full+window", lost_pages_kept),
}


@pytest.mark.parametrize("fault", PLANTS)
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, plant = PLANTS[fault]
    if fault == "window off by some":
        _only_in_the_cache(monkeypatch, plant)
    else:
        plant(monkeypatch)
    for seed in range(120):
        try:
            episode(seed, layout, check_every=1000)
        except (AssertionError, IndexError, KeyError):
            return
    pytest.fail(f"{fault}: not seen in 120 episodes")


def _only_in_the_cache(patch: pytest.MonkeyPatch, plant: Plant) -> None:
    """The device must keep reading the true window: it gets a lifetime of its own."""
    import tests.prefix_cache.shadow as shadow

    true = Window.first_live
    check = shadow.Shadow._check

    def honest(device, row):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Window, "first_live", true)
            return check(device, row)

    patch.setattr(shadow.Shadow, "_check", honest)
    plant(patch)


def test_the_fence_itself_is_exercised() -> None:
    """Episodes do defer pages and draw them back while steps run."""
    seen = 0
    defer = Fence.defer
    with pytest.MonkeyPatch.context() as patch:

        def counting(fence, step, item):
            nonlocal seen
            seen += 1
            defer(fence, step, item)

        patch.setattr(Fence, "defer", counting)
        for seed in range(10):
            episode(seed, "full+window", check_every=1000)
    assert seen > 50
