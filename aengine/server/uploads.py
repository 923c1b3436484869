"""Bodies while they come in.

Owns: `Uploads`: the limits of one body in bytes and seconds, and of all bodies together in bytes.
Does not know: what is in a body.
Invariants: whatever ends a reading gives its bytes back to the budget; the first FREE_BYTES of each body are not in it,
so that slow large uploads keep no small request out.
"""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web

from aengine.errors import BodyTimeout, BodyTooLarge, InvalidRequest, QueueFull
from aengine.server.counters import Counters

log = logging.getLogger("aengine.server")

FREE_BYTES = 64 * 2**10


class Uploads:
    """`max_bytes` of one body, `all_bytes` of all that are being read."""

    def __init__(self, counters: Counters, *, max_bytes: int, all_bytes: int, timeout_s: float) -> None:
        self._counters = counters
        self._max_bytes = max_bytes
        self._all_bytes = max(all_bytes, max_bytes)
        self._timeout_s = timeout_s

    async def read(self, request: web.Request) -> bytes:
        """Raises BodyTooLarge with both numbers, at once when the length was announced; BodyTimeout; QueueFull."""
        announced = request.content_length
        if announced is not None and announced > self._max_bytes:
            raise BodyTooLarge(f"the body has {announced} bytes; at most {self._max_bytes} are accepted")
        parts: list[bytes] = []
        held = _Held(self._counters)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._read(request, parts, held)
        except TimeoutError:
            self._counters.events["body_timeout"] += 1
            raise BodyTimeout(
                f"{held.read_bytes} bytes of the body came in {self._timeout_s:g} s, which is all the time it has"
            ) from None
        except web.RequestPayloadError as error:
            raise InvalidRequest(f"the body could not be read: {error}") from None
        finally:
            held.give_back()
        return b"".join(parts)

    async def _read(self, request: web.Request, parts: list[bytes], held: _Held) -> None:
        async for part in request.content.iter_any():
            held.add(len(part))
            parts.append(part)
            if held.read_bytes > self._max_bytes:
                raise BodyTooLarge(f"the body has more than the {self._max_bytes} bytes that are accepted")
            if held.counted_bytes and self._counters.upload_bytes > self._all_bytes:
                self._counters.events["uploads_full"] += 1
                raise QueueFull(
                    f"bodies that are being read hold {self._all_bytes:,} bytes, which is all they may", retry_after_s=2
                )


class _Held:
    """One body's share of the budget."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self.read_bytes = 0
        self.counted_bytes = 0

    def add(self, n_bytes: int) -> None:
        self.read_bytes += n_bytes
        counted = max(0, self.read_bytes - FREE_BYTES)
        self._counters.upload_bytes += counted - self.counted_bytes
        self.counted_bytes = counted

    def give_back(self) -> None:
        self._counters.upload_bytes -= self.counted_bytes
        self.counted_bytes = 0
