"""Keys: what differs never collides, what is equal always meets."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.prefix_cache.keys import ChainRows, MediaItem, TokenChain, media_keys, root_key
from tests.counting import calls


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_the_chain_is_sha256_over_little_endian_ids() -> None:
    root = root_key()
    chain = TokenChain(root, ids(1, 2, 3, 2**31 - 1, 5), 2)
    first = hashlib.sha256(root + b"\x01\0\0\0\x02\0\0\0").digest()
    second = hashlib.sha256(first + b"\x03\0\0\0\xff\xff\xff\x7f").digest()
    assert chain.extend(2) == [first, second]


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(1, 6), max_size=8), st.integers(1, 5))
def test_hashing_in_parts_gives_the_same_chain(tokens: list[int], parts: list[int], page: int) -> None:
    buffer = ids(*tokens, *[0] * 60)
    whole = TokenChain(root_key(), buffer, page).extend(len(buffer) // page)
    chain = TokenChain(root_key(), buffer.copy(), page)
    for count in itertools.accumulate(parts):
        if count * page <= len(buffer):
            assert chain.extend(count) == whole[:count]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(1, 4), st.integers(1, 5))
def test_chains_that_go_on_together_are_those_that_go_on_alone(ahead: list[int], rounds: int, page: int) -> None:
    buffers = [np.arange(row, row + 48, dtype=np.int32) for row in range(len(ahead))]
    chains = [TokenChain(root_key(salt=str(row)), buffer, page) for row, buffer in enumerate(buffers)]
    for chain, pages in zip(chains, ahead, strict=True):
        chain.extend(pages)
    rows = ChainRows(chains)
    for turn in range(rounds):
        at = [(pages + turn) * page for pages in ahead]
        made = rows.extend(np.stack([buffer[i : i + page] for buffer, i in zip(buffers, at, strict=True)]))
        assert made == [chain.digests[-1] for chain in chains]
    for row, (chain, buffer) in enumerate(zip(chains, buffers, strict=True)):
        alone = TokenChain(root_key(salt=str(row)), buffer, page)
        assert chain.digests == alone.extend(ahead[row] + rounds)
        assert chain.extend(ahead[row] + rounds + 1) == alone.extend(ahead[row] + rounds + 1)


@given(st.lists(st.integers(0, 1), min_size=8, max_size=8), st.lists(st.integers(0, 1), min_size=8, max_size=8))
def test_equal_digests_mean_equal_prefixes(left: list[int], right: list[int]) -> None:
    a = TokenChain(root_key(), ids(*left), 2).extend(4)
    b = TokenChain(root_key(), ids(*right), 2).extend(4)
    for page in range(4):
        assert (a[page] == b[page]) == (left[: 2 * page + 2] == right[: 2 * page + 2])


def test_every_root_field_counts() -> None:
    base = {"weights_digest": b"w", "adapter": b"a", "salt": "s", "page_tokens": 16, "overrides": {"rope": "1"}}
    changed = [
        base,
        base | {"weights_digest": b"v"},
        base | {"adapter": b"b"},
        base | {"salt": "t"},
        base | {"page_tokens": 32},
        base | {"overrides": {"rope": "2"}},
        base | {"overrides": {"window": "1"}},
        base | {"overrides": {}},
    ]
    assert len({root_key(**fields) for fields in changed}) == len(changed)


def test_fields_cannot_run_into_each_other() -> None:
    """A salt is not an adapter, and no text moves from one field to the next."""
    roots = [
        root_key(adapter=b"x", salt=""),
        root_key(adapter=b"", salt="x"),
        root_key(adapter=b"ab", salt="c"),
        root_key(adapter=b"a", salt="bc"),
        root_key(salt="c", overrides={"a": "b"}),
        root_key(salt="", overrides={"ca": "b"}),
        root_key(overrides={"a": "", "b": "c"}),
        root_key(overrides={"a": "b", "": "c"}),
    ]
    assert len(set(roots)) == len(roots)


def test_overrides_in_any_order() -> None:
    assert root_key(overrides={"a": "1", "b": "2"}) == root_key(overrides={"b": "2", "a": "1"})


def item(digest: bytes, position: int, span: int = 2) -> MediaItem:
    return MediaItem(digest, position, span, 4)


def test_media_enter_the_page_they_begin_in() -> None:
    tokens = ids(*[9] * 12)
    plain = TokenChain(root_key(), tokens, 4).extend(3)
    with_item = TokenChain(root_key(), tokens, 4, media=[item(b"A", 5)]).extend(3)
    assert with_item[0] == plain[0]
    assert with_item[1] != plain[1]
    assert with_item[2] != plain[2]
    others = [item(b"B", 5), item(b"A", 6), item(b"A", 5, span=3)]
    chains = [TokenChain(root_key(), tokens, 4, media=[other]).extend(3)[1] for other in others]
    assert len({with_item[1], *chains}) == 4


def test_media_pages_depend_on_namespace_item_and_index() -> None:
    keys = media_keys(root_key(), item(b"A", 0), 3)
    assert len(set(keys)) == 3
    assert media_keys(root_key(), item(b"A", 77), 3) == keys  # wherever the item stands
    assert not set(keys) & set(media_keys(root_key(salt="t"), item(b"A", 0), 3))
    assert not set(keys) & set(media_keys(root_key(), item(b"B", 0), 3))


def test_short_keys_keep_the_chain_itself_whole() -> None:
    long = TokenChain(root_key(), ids(*range(8)), 2).extend(4)
    short = TokenChain(root_key(), ids(*range(8)), 2, key_bytes=1).extend(4)
    assert short == [digest[:1] for digest in long]


def test_a_long_prompt_is_hashed_in_a_few_calls_a_page() -> None:
    """128k tokens; what that takes is bench/prefix_cache.py's to measure."""
    tokens = np.random.default_rng(0).integers(0, 50_000, 131_072).astype(np.int32)
    assert calls(lambda: TokenChain(root_key(), tokens, 16).extend(8192)) <= 8192 * 4


def test_a_buffer_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="int64"):
        TokenChain(root_key(), np.arange(4), 2)  # type: ignore[arg-type]
