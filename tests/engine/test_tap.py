"""The tap of a request stream: deltas that reach a waiting reader without waking it."""

from __future__ import annotations

import asyncio

import pytest

from aengine.engine.stream import PENDING_MAX, RequestStream
from aengine.types import FinishReason, OutputDelta


def delta(text: str, *, index: int = 0, finish: FinishReason | None = None) -> OutputDelta:
    return OutputDelta(index, text, (1,), None, finish)


class Tapped:
    """A stream with a tap and a reader; `seen` has all texts in their order, `read` the reader's."""

    def __init__(self, n: int = 1) -> None:
        self.stream = RequestStream("r", [1], n, lambda: None)
        self.seen: list[str] = []
        self.read: list[str] = []
        self.open = True
        self.stream.tap(self.take)

    def take(self, got: OutputDelta) -> bool:
        if self.open:
            self.seen.append(got.text)
        return self.open

    async def reader(self) -> None:
        async for got in self.stream:
            self.seen.append(got.text)
            self.read.append(got.text)


async def test_a_waiting_reader_is_not_woken_and_gets_the_last_delta():
    made = Tapped()
    made.stream.push(delta("a"))  # nobody reads yet
    task = asyncio.create_task(made.reader())
    await asyncio.sleep(0)
    for text in "bcd":
        made.stream.push(delta(text))
    made.stream.push(delta("e", finish=FinishReason.STOP))
    await task
    assert made.seen == ["a", "b", "c", "d", "e"]
    assert made.read == ["a", "e"]
    assert made.stream.completion_tokens == 5


async def test_nothing_overtakes_what_the_tap_refused():
    made = Tapped(n=2)
    task = asyncio.create_task(made.reader())
    await asyncio.sleep(0)
    made.open = False
    made.stream.push(delta("a", index=1))
    made.open = True
    made.stream.push(delta("b"))  # the reader has been woken, and has something to read first
    made.stream.push(delta("c", index=1))
    await asyncio.sleep(0)
    assert made.seen == ["ac", "b"]
    made.stream.push(delta("d"))
    for index in range(2):
        made.stream.push(delta("", index=index, finish=FinishReason.LENGTH))
    await task
    assert made.seen == ["ac", "b", "d", "", ""]


async def test_a_tap_that_raises_is_taken_off_and_the_reader_goes_on():
    made = Tapped()

    def fault(got: OutputDelta) -> bool:
        raise ValueError(got.text)

    made.stream.tap(fault)
    task = asyncio.create_task(made.reader())
    await asyncio.sleep(0)
    for text in "ab":
        made.stream.push(delta(text))
    made.stream.push(delta("c", finish=FinishReason.STOP))
    await task
    assert "".join(made.read) == "abc"
    assert made.stream.completion_tokens == 3


@pytest.mark.parametrize("count", [1, PENDING_MAX - 1, PENDING_MAX, 3 * PENDING_MAX + 1])
async def test_what_is_pending_is_read_as_one_delta(count):
    stream = RequestStream("r", [1], 1, lambda: None)
    for i in range(count):
        stream.push(OutputDelta(0, f"{i},", (i,)))
    got = await anext(stream)
    assert got.text == "".join(f"{i}," for i in range(count))
    assert got.token_ids == tuple(range(count))
    assert len(stream._pending) == 0
