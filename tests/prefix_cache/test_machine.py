"""The same world under hypothesis: it chooses the events and shrinks what fails."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.prefix_cache.layouts import LAYOUTS, random_media, small_plan
from tests.prefix_cache.world import World

bits = st.lists(st.integers(0, 1), min_size=1, max_size=26)


class CacheMachine(RuleBasedStateMachine):
    """Add, fork, launch, speculate, retire, fail, preempt, resume, abort, finish, switch salts, reset."""

    world: World

    @initialize(
        layout=st.sampled_from(sorted(LAYOUTS)),
        large_pages=st.integers(1, 30),
        multiple=st.integers(1, 3),
        grid=st.sampled_from((0, 8, 16)),
        seed=st.integers(0, 2**16),
    )
    def start(self, layout: str, large_pages: int, multiple: int, grid: int, seed: int) -> None:
        self._layout = layout
        self._grid = grid
        self.world = World(seed, small_plan(LAYOUTS[layout](), large_pages, multiple), grid_tokens=grid)

    @rule(prompt=bits, more=st.integers(0, 20), salt=st.sampled_from(("", "b")), forks=st.integers(1, 3))
    def add(self, prompt: list[int], more: int, salt: str, forks: int) -> None:
        per_item = any(group.spec.lifetime.per_item for group in self.world.plan.groups)
        media = random_media(self.world.rng, len(prompt)) if per_item else ()
        for _ in range(forks):
            self.world.add(prompt, len(prompt) + 1 + more, salt=salt, media=media)

    @precondition(lambda self: self.world.waiting)
    @rule(data=st.data())
    def admit(self, data) -> None:
        self.world.admit(data.draw(st.sampled_from(self.world.waiting)))

    @rule(fails=st.sampled_from((False, False, False, True)))
    def launch(self, fails: bool) -> None:
        if len(self.world.in_flight) > 2:
            self.world.retire()
        self.world.settle()
        self.world.launch(fails=fails)
        self._finish_full()

    @precondition(lambda self: self.world.in_flight)
    @rule()
    def retire(self) -> None:
        self.world.retire()
        self.world.settle()
        self._finish_full()

    @rule(data=st.data())
    def preempt(self, data) -> None:
        idle = [s for s in self.world.running if s.last_step <= self.world.retired and not s.pending]
        if idle:
            self.world.preempt(data.draw(st.sampled_from(idle)))

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), keep=st.booleans())
    def finish(self, data, keep: bool) -> None:
        self.world.finish(data.draw(st.sampled_from(self.world.running)), keep=keep)

    @rule()
    def reset(self) -> None:
        self.world.cache.reset()

    @rule(layout=st.sampled_from(sorted(LAYOUTS)), large_pages=st.integers(1, 30), multiple=st.integers(1, 3))
    def plan_again(self, layout: str, large_pages: int, multiple: int) -> None:
        """The engine restarts with other pages."""
        self.world.close()
        self.world = World(large_pages, small_plan(LAYOUTS[layout](), large_pages, multiple), grid_tokens=self._grid)

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "world"):
            self.world.cache.check()

    def _finish_full(self) -> None:
        for sequence in list(self.world.running):
            if sequence.known >= sequence.limit and not sequence.void:
                self.world.finish(sequence)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.close()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
