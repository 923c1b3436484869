"""Names of pages: what makes two pages interchangeable.

Owns: the root of a namespace, the hash chain over token pages, the keys of media pages.
Does not know: pages, groups, pools.
Invariants: h(0) = SHA-256(root), h(i) = SHA-256(h(i-1) || token ids of page i as little-endian int32 || media that
begin in page i); every variable field is tagged and length-prefixed, so no two different inputs share an encoding.
Full digests are the keys; a shorter `key_bytes` exists for tests that need collisions.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from operator import add

import msgspec
import numpy as np
from numpy.typing import NDArray

SCHEMA = b"aengine-kv-1"
HASH_AHEAD_PAGES = 64  # pages hashed at a time: amortises the call, and what is hashed in vain is small


class MediaItem(msgspec.Struct, frozen=True):
    """One image (or audio clip) of a prompt.

    `digest`: SHA-256 of the decoded pixels, their size and mode, and the processor's settings. `position`: index of its
    first placeholder token; `span`: number of placeholder tokens. `tokens`: entries it has in Cross and Media groups.
    """

    digest: bytes
    position: int
    span: int
    tokens: int


def root_key(
    *,
    weights_digest: bytes = b"",
    adapter: bytes = b"",
    salt: str = "",
    page_tokens: int = 16,
    overrides: Mapping[str, str] | None = None,
) -> bytes:
    """The start of every chain of one namespace. `adapter`: digest of the adapter's weights, not its name."""
    fields: list[tuple[bytes, bytes]] = [
        (b"schema", SCHEMA),
        (b"weights", weights_digest),
        (b"adapter", adapter),
        (b"salt", salt.encode()),
        (b"page", str(page_tokens).encode()),
    ]
    fields += [(b"override:" + name.encode(), value.encode()) for name, value in sorted((overrides or {}).items())]
    return sha256(b"".join(_field(tag, value) for tag, value in fields)).digest()


def media_keys(root: bytes, item: MediaItem, pages: int) -> list[bytes]:
    """Keys of the pages of one item: they depend on the namespace and the item, never on the text around it."""
    head = sha256(_field(b"media", root) + _field(b"digest", item.digest)).digest()
    return [sha256(head + index.to_bytes(8, "little")).digest() for index in range(pages)]


class TokenChain:
    """Keys of the full pages of one sequence, hashed once, as far as asked for.

    `tokens` is the sequence's live int32 buffer; positions once hashed must not change. About 1.3 us per 16-token page.
    """

    __slots__ = (
        "_digests",
        "_key_bytes",
        "_last",
        "_media",
        "_row",
        "_rows",
        "_seen",
        "page_tokens",
        "plain",
        "root",
        "tokens",
    )

    def __init__(
        self,
        root: bytes,
        tokens: NDArray[np.int32],
        page_tokens: int,
        *,
        media: Sequence[MediaItem] = (),
        key_bytes: int = 32,
    ) -> None:
        if tokens.dtype != np.int32 or tokens.ndim != 1:
            raise TypeError(f"token ids are {tokens.dtype} {tokens.shape}, not one-dimensional int32")
        self.root = root
        self.tokens = tokens
        self.page_tokens = page_tokens
        self._digests: list[bytes] = []
        self._rows: ChainRows | None = None  # who goes on with it, and as which row
        self._row = self._seen = 0
        self._last = root  # the digest of the last page in full; only where `plain` is False
        self._key_bytes = key_bytes
        self._media = _media_by_page(media, page_tokens)
        self.plain = not self._media and key_bytes == 32 and sys.byteorder == "little"  # hashes what lies in memory

    @property
    def digests(self) -> list[bytes]:
        """digests[i] names the prefix that ends with page i."""
        rows = self._rows
        if rows is not None and len(rows.made) > self._seen:
            row = self._row
            self._digests += [made[row] for made in rows.made[self._seen :]]
            self._seen = len(rows.made)
        return self._digests

    def join(self, rows: ChainRows, row: int) -> None:
        """From now on `rows`, which has gone on with nothing yet, does so with it."""
        assert self.plain, f"row {row} is hashed in another way"
        self._digests = self.digests  # what others have made of it
        self._rows, self._row, self._seen = rows, row, 0

    def leave(self) -> list[bytes]:
        """All digests so far; whoever has asked goes on with them."""
        digests = self.digests
        self._rows = None
        return digests

    def extend(self, pages: int) -> list[bytes]:
        """Hash the first `pages` pages (all their tokens must be there) and return all digests so far."""
        digests = self.digests
        first = len(digests)
        if pages <= first:
            return digests
        self._rows = None
        if not self.plain:
            self._extend_general(first, pages)
            return digests
        size, last, append = self.page_tokens, digests[-1] if digests else self.root, digests.append
        for ids in self.tokens[first * size : pages * size].view(_whole(size)).tolist():
            last = sha256(last + ids).digest()
            append(last)
        return digests

    def _extend_general(self, first: int, pages: int) -> None:
        size = self.page_tokens
        for page in range(first, pages):
            ids = self.tokens[page * size : (page + 1) * size].astype("<i4").tobytes()
            self._last = sha256(self._last + ids + self._media.get(page, b"")).digest()
            self._digests.append(self._last[: self._key_bytes])

    def prefix(self, pages: int) -> bytes:
        """Digest of the first `pages` pages; the root when there are none."""
        return self.extend(pages)[pages - 1] if pages else self.root

    def tail_key(self, tokens: int) -> bytes:
        """Key of the prefix of exactly `tokens` tokens, which need not end a page."""
        pages = tokens // self.page_tokens
        if tokens == pages * self.page_tokens:
            return self.prefix(pages)
        head = self.prefix(pages)
        ids = self.tokens[pages * self.page_tokens : tokens].astype("<i4").tobytes()
        return sha256(_field(b"tail", head) + ids + self._media.get(pages, b"")).digest()[: self._key_bytes]


class ChainRows:
    """Plain chains that go on by a page each, in one call, until one of them is extended by itself.

    A chain takes over what is `made` when it is asked for: page by page it would be out of the caches each time.
    """

    __slots__ = ("_last", "made")

    def __init__(self, chains: Sequence[TokenChain]) -> None:
        self._last = [chain.prefix(len(chain.digests)) for chain in chains]
        self.made: list[list[bytes]] = []  # by page, then row
        for row, chain in enumerate(chains):
            chain.join(self, row)

    def extend(self, ids: NDArray[np.int32]) -> list[bytes]:
        """`ids` int32 [rows, page_tokens] of the next page of each: its digests."""
        self._last = made = _next_digests(self._last, ids)
        self.made.append(made)
        return made


def leave_all(chains: Iterable[TokenChain]) -> list[list[bytes]]:
    """`chain.leave()` of many, without a call for those that nobody else goes on with."""
    return [chain._digests if chain._rows is None else chain.leave() for chain in chains]


def extend_all(chains: Sequence[TokenChain], known: Sequence[list[bytes]], ids: NDArray[np.int32]) -> list[bytes]:
    """`ids` int32 [chains, page_tokens] of the next page of each plain chain, left with `known`: its digests."""
    last = [digests[-1] if digests else chain.root for digests, chain in zip(known, chains, strict=True)]
    made = _next_digests(last, ids)
    for digests, digest in zip(known, made, strict=True):
        digests.append(digest)
    return made


@functools.cache
def _whole(tokens: int) -> np.dtype[np.void]:
    """So many ids as one item, which Python sees as bytes."""
    return np.dtype((np.void, 4 * tokens))


def _next_digests(last: Sequence[bytes], ids: NDArray[np.int32]) -> list[bytes]:
    """Those of pages with the tokens ids[i], behind last[i]."""
    pages: list[bytes] = ids.view(_whole(ids.shape[1]))[:, 0].tolist()
    return [made.digest() for made in map(sha256, map(add, last, pages))]


def _field(tag: bytes, value: bytes) -> bytes:
    return len(tag).to_bytes(4, "little") + tag + len(value).to_bytes(4, "little") + value


def _media_by_page(media: Sequence[MediaItem], page_tokens: int) -> dict[int, bytes]:
    """What page i's hash takes in: the items that begin in it, with their offsets."""
    out: dict[int, bytes] = {}
    for item in media:
        page, offset = divmod(item.position, page_tokens)
        entry = _field(b"item", item.digest) + offset.to_bytes(4, "little") + item.span.to_bytes(4, "little")
        out[page] = out.get(page, b"") + entry
    return out
