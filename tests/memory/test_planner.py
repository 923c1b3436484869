"""Page sizes of real models, and the invariants of any plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.errors import ConfigError
from aengine.memory import Cross, Full, GroupSpec, LayerSpec, Media, Part, State, Window, attention_group, plan

MIB = 2**20
GB = 10**9


def raw(name: str, lifetime, page_bytes: int, tokens: int = 16) -> GroupSpec:
    """A group whose page is exactly so large."""
    entries = 1 if isinstance(lifetime, State) else tokens
    return GroupSpec(name, lifetime, (LayerSpec("l", (Part("x", (page_bytes // entries,), "uint8"),)),), tokens)


MODELS = {
    "Llama-3.2-11B-Vision": ([(Full(), 2_097_152), (Cross(), 524_288)], 2 * MIB, (1, 4)),
    "Gemma-3-27B": ([(Full(), 1_310_720), (Window(1024), 6_815_744)], 34_078_720, (26, 5)),
    "gpt-oss-120b": ([(Full(), 589_824), (Window(128), 589_824)], 589_824, (1, 1)),
    "Llama-4-Scout": ([(Full(), 786_432), (Window(8192), 2_359_296)], 2_359_296, (3, 1)),
    "Qwen2.5-VL-7B": ([(Full(), 917_504), (Media(), 114_688)], 917_504, (1, 8)),
}


@pytest.mark.parametrize("model", MODELS)
def test_layouts_without_padding(model: str) -> None:
    pages, large, slots = MODELS[model]
    made = plan([raw(f"g{i}", life, size) for i, (life, size) in enumerate(pages)], 20 * GB)
    assert made.large_bytes == large
    assert tuple(group.slots for group in made.groups) == slots
    assert all(group.padding == 0 for group in made.groups)


@pytest.mark.parametrize(
    ("attention", "state", "arena", "slots"),
    [(262_144, 8_716_288, 8 * GB, (33, 1)), (393_216, 39_518_208, 20 * GB, (100, 1))],
)
def test_hybrid_models_pad_less_than_one_percent(
    attention: int, state: int, arena: int, slots: tuple[int, int]
) -> None:
    """Jamba-52B and Qwen3-Next: where the least common multiple would make pages of 33 and 75 MiB."""
    made = plan([raw("attention", Full(), attention), raw("state", State(), state)], arena)
    assert tuple(group.slots for group in made.groups) == slots
    assert max(group.padding for group in made.groups) < 0.01


def test_a_small_arena_gets_smaller_pages() -> None:
    groups = [raw("full", Full(), 1_310_720), raw("window", Window(1024), 6_815_744)]
    made = plan(groups, 8 * GB)
    assert tuple(group.slots for group in made.groups) == (5, 1)
    assert made.groups[0].padding == pytest.approx(0.04, abs=0.001)


def test_one_group_is_a_plain_free_list() -> None:
    made = plan([attention_group("full", Full(), 30, kv_heads=3, head_dim=64)], 100 * MIB)
    assert made.groups[0].slots == 1
    assert made.large_bytes == made.groups[0].payload == 30 * 2 * 16 * 3 * 64 * 2


def test_too_small_an_arena_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"1,000,000 bytes .* hold 1 large pages of 589,824"):
        plan([raw("full", Full(), 589_824)], 1_000_000)
    with pytest.raises(ConfigError, match="no page groups"):
        plan([], GB)
    with pytest.raises(ConfigError, match="weights"):
        plan([raw("full", Full(), 4096)], GB, [1.0, 2.0])
    with pytest.raises(ConfigError, match="smaller than a page"):
        plan([raw("full", Full(), 4096)], GB, large_bytes=1024)


@given(
    st.lists(st.integers(1, 200_000), min_size=1, max_size=4),
    st.integers(64 * MIB, 4 * GB),
)
def test_any_plan_is_affine_and_aligned(sizes: list[int], arena: int) -> None:
    groups = [raw(f"g{i}", State(), size) for i, size in enumerate(sizes)]
    made = plan(groups, arena)
    assert made.arena_bytes <= arena
    assert made.usable >= 1
    for group in made.groups:
        assert group.pitch * group.slots == made.large_bytes
        assert group.pitch % 256 == 0
        assert group.pitch >= group.payload >= group.spec.payload_bytes


def test_places_do_not_overlap() -> None:
    layer = LayerSpec("l", (Part("k", (3, 5), "bfloat16"), Part("scale", (3,), "float32"), Part("v", (3, 5), "int8")))
    spec = GroupSpec("mixed", Full(), (layer, layer), tokens_per_page=7)
    end = 0
    for place in (place for row in spec.places() for place in row):
        assert place.offset >= end
        assert place.offset % 64 == 0
        size = {"bfloat16": 2, "float32": 4, "int8": 1}[place.dtype]
        end = place.offset + place.entries * size * (15 if len(place.shape) == 2 else 3)
    assert end <= spec.payload_bytes
    assert spec.elements == ("bfloat16", "float32", "int8")


def test_compressed_entries() -> None:
    part = Part("k", (8,), "bfloat16")
    spec = GroupSpec("c4", Full(), (LayerSpec("l", (part,)),), tokens_per_page=64, tokens_per_entry=4)
    assert spec.entries_per_page == 16
    with pytest.raises(ValueError, match="not a positive multiple"):
        GroupSpec("c4", Full(), (LayerSpec("l", (part,)),), tokens_per_page=62, tokens_per_entry=4)


def test_bad_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="float12"):
        Part("k", (8,), "float12")
    with pytest.raises(ValueError, match="at least 1"):
        Part("k", (8, 0))
    with pytest.raises(ValueError, match="no layers"):
        GroupSpec("empty", Full(), ())


def test_sizing_and_admission_agree() -> None:
    """max_tokens is the last length that fits, for window models far beyond the pages of a full table."""
    groups = [raw("full", Full(), 4096), raw("window", Window(32), 8192)]
    made = plan(groups, 200 * 8192)
    longest = made.max_tokens(10**6, in_flight_tokens=64)
    assert made.fits(longest, in_flight_tokens=64)
    assert not made.fits(longest + 1, in_flight_tokens=64)
    assert longest > made.max_tokens(10**6)


def test_media_count_towards_the_need() -> None:
    made = plan([raw("full", Full(), 4096), raw("cross", Cross(), 1024)], 101 * 4096)
    assert made.peak_pages(100, media_tokens=(17, 16)) == (7, 3)
    assert made.fits(16, media_tokens=(16 * 4 * 99,))
    assert not made.fits(16, media_tokens=(16 * 4 * 99 + 1,))


def test_describe_names_every_group() -> None:
    text = plan([raw("full", Full(), 4096), raw("swa", Window(128), 8192)], GB).describe()
    assert "full" in text
    assert "window(128)" in text
    assert "0.00%" in text
    assert len(text.splitlines()) == 4


def test_digest_names_the_layout() -> None:
    one = plan([raw("full", Full(), 4096)], GB)
    same = plan([raw("full", Full(), 4096)], 2 * GB)
    other = plan([raw("full", Full(), 8192)], GB)
    assert one.digest() == same.digest() != other.digest()
