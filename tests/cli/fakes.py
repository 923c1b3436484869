"""An engine that answers at once, for the commands that hold one."""

import asyncio
from dataclasses import dataclass, field

from aengine.errors import ContextLengthExceeded
from aengine.types import CompletionOutput, FinishReason, RequestOutput


@dataclass
class FakeReport:
    phases: tuple = (("find model", 0.5), ("weights", 1.25))
    ledger: tuple = (("weights", 256 * 2**20), ("KV pages", 3 * 2**30))
    pages: tuple = ("a table of pages",)
    lines: tuple = ("a note",)


@dataclass
class FakeText:
    chat_template: str | None = None

    def token_bytes(self, id):
        return b"?"


@dataclass
class FakeEngine:
    """Says the last message backwards, a character an output. `limit`: longest conversation, in messages."""

    config: object = None
    limit: int = 100
    ends: str = "stop"
    delay_s: float = 0.0
    start_error: Exception | None = None
    report: FakeReport = field(default_factory=FakeReport)
    text: FakeText = field(default_factory=FakeText)
    log: list = field(default_factory=list)

    async def start(self):
        self.log.append("start")
        if self.start_error is not None:
            raise self.start_error

    async def close(self, *, drain_s=0.0):
        self.log.append("close")

    async def generate(self, prompt, sampling):
        self.log.append(("generate", prompt, sampling))
        async for output in self._answer(prompt[::-1], sampling):
            yield output

    async def chat(self, messages, sampling):
        self.log.append(("chat", [dict(message) for message in messages], sampling))
        if len(messages) > self.limit:
            raise ContextLengthExceeded(f"{len(messages)} messages, {self.limit} fit")
        async for output in self._answer(messages[-1]["content"][::-1], sampling):
            yield output

    async def _answer(self, text, sampling):
        choice = CompletionOutput(0, "", [])
        try:
            for i, letter in enumerate(text[: sampling.max_tokens]):
                await asyncio.sleep(self.delay_s)
                choice.text += letter
                choice.token_ids.append(i)
                yield RequestOutput("r", text, [1, 2, 3], [choice], finished=False, ttft_s=0.25)
            choice.finish_reason = FinishReason(self.ends)
            yield RequestOutput("r", text, [1, 2, 3], [choice], finished=True, ttft_s=0.25, e2e_s=0.5)
        except GeneratorExit:
            self.log.append("aborted")
            raise
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise
