"""What crosses between a front-end and the engine process.

Owns: the messages, their encoding (msgpack, arrays as bytes), framing over a socket, and its bounds.
Does not know: engines, servers.
Invariants: messages arrive whole and in order. What was sent and not yet taken is bounded: `room` waits for a peer that
is slow and gives up on one that takes nothing for STUCK_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Mapping
from typing import Any, get_origin

import msgspec
import numpy as np

from aengine import errors
from aengine.config import AengineConfig
from aengine.engine.facts import ModelInfo
from aengine.errors import AengineError
from aengine.metrics import Counts
from aengine.types import Grammar, MediaInput, StepOutputs, Submission

HIGH_BYTES = 1 << 20  # about 150 steps of 512 rows: behind them the sender waits
STUCK_S = 5.0
READ_BYTES = 1 << 20
_LENGTH = struct.Struct("<Q")


class Fault(msgspec.Struct, frozen=True):
    """An AengineError as plain values."""

    kind: str
    fields: Mapping[str, Any]

    @classmethod
    def of(cls, error: Exception) -> Fault:
        if isinstance(error, AengineError):
            return cls(type(error).__name__, vars(error))
        return cls("AengineError", vars(AengineError("internal error; see the server's log")))

    def error(self) -> AengineError:
        kind: type[AengineError] = getattr(errors, self.kind)
        made = kind.__new__(kind)
        Exception.__init__(made, self.fields["message"])
        vars(made).update(self.fields)
        return made


# ---- from a front-end


class Up(msgspec.Struct, frozen=True, tag=True):
    """It has its tokenizer and can serve."""


class Submit(msgspec.Struct, frozen=True, tag=True):
    """`number`: the front-end's own, of this request. Its images are named by what `Answer` to "images" brought."""

    number: int
    submission: Submission


class Abort(msgspec.Struct, frozen=True, tag=True):
    handles: tuple[int, ...]


class Ask(msgspec.Struct, frozen=True, tag=True):
    """`what`: "metrics", "trace" (with `seconds`), "reset_prefix_cache", "prepare" (with `grammar`) or "images" (with
    `sources`)."""

    number: int
    what: str
    grammar: Grammar | None = None
    sources: tuple[str, ...] = ()
    seconds: float = 0.0


class Counted(msgspec.Struct, frozen=True, tag=True):
    """All that the front-end has counted so far. `number`: of the `Count` it answers, else 0."""

    number: int
    counts: Counts


# ---- from the engine process


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """`index`: which front-end it is. `restarted`: others serve already, so it need not answer before it can serve."""

    config: AengineConfig
    index: int
    restarted: bool


class State(msgspec.Struct, frozen=True, tag=True):
    """The engine's phase and health, whenever they change. `model` once it is known."""

    phase: str
    ok: bool
    reason: str | None
    model: ModelInfo | None = None


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The handles of a request's choices, before any of their output."""

    number: int
    handles: tuple[int, ...]


class Refused(msgspec.Struct, frozen=True, tag=True):
    number: int
    fault: Fault


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """One step's outputs for this front-end."""

    outputs: StepOutputs


class Answer(msgspec.Struct, frozen=True, tag=True):
    number: int
    body: bytes = b""
    images: tuple[MediaInput, ...] = ()
    fault: Fault | None = None


class Count(msgspec.Struct, frozen=True, tag=True):
    """Asks for `Counted`."""

    number: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Refuse new requests, end the open ones, then leave."""


ToEngine = Up | Submit | Abort | Ask | Counted
ToFrontend = Welcome | State | Accepted | Refused | Outputs | Answer | Count | Stop


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    raise TypeError(f"{type(value).__name__} cannot cross")


def _rebuilt(kind: Any, value: Any) -> Any:
    if get_origin(kind) is not np.ndarray:
        raise TypeError(f"{kind} cannot cross")
    dtype, shape, data = value
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode


class Pipe:
    """One end. `kinds`: the union of what the other end sends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kinds: Any) -> None:
        self._reader, self._writer = reader, writer
        self._decode = msgspec.msgpack.Decoder(kinds, dec_hook=_rebuilt).decode
        writer.transport.set_write_buffer_limits(high=HIGH_BYTES)

    @classmethod
    async def over(cls, connected: socket.socket, kinds: Any) -> Pipe:
        """`kinds`: the union of messages that the other end sends."""
        return cls(*await asyncio.open_unix_connection(sock=connected, limit=READ_BYTES), kinds)

    def send(self, message: ToEngine | ToFrontend) -> None:
        """Returns at once. To an end that is gone: nothing happens, as `receive` tells."""
        if self._writer.transport.is_closing():  # uvloop's would raise
            return
        data = encode(message)
        self._writer.write(_LENGTH.pack(len(data)) + data)

    async def receive(self) -> Any:
        """The next message; None: the other end is gone."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return self._decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    @property
    def crowded(self) -> bool:
        return self._writer.transport.get_write_buffer_size() > HIGH_BYTES

    async def room(self) -> bool:
        """Wait until the other end has taken most of what was sent; False: it takes nothing, or is gone."""
        while self.crowded:
            before = self._writer.transport.get_write_buffer_size()
            try:
                async with asyncio.timeout(STUCK_S):
                    await self._writer.drain()
            except TimeoutError:
                if self._writer.transport.get_write_buffer_size() >= before:
                    return False
            except ConnectionError:
                return False
        return True

    async def close(self) -> None:
        """What was sent is still written."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    def cut(self) -> None:
        """Close at once; what was not written is lost."""
        self._writer.transport.abort()
