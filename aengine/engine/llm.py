"""The blocking engine: an AsyncEngine on a loop of its own thread.

Owns: the thread, and the progress bar.
Does not know: anything the AsyncEngine does.
Invariants: calls may come from any thread but that one; `close` (or the end of a with block) ends the thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from aengine.config import EngineConfig, ModelConfigArgs
from aengine.engine.async_engine import AsyncEngine
from aengine.engine.prompts import Prompt
from aengine.errors import InvalidRequest, NotReady
from aengine.types import RequestOutput, SamplingParams

T = TypeVar("T")


class LLM:
    """Offline generation.

    >>> with LLM("smollm2-135m") as llm:
    ...     for out in llm.generate(["Hello", "Once upon a time"], SamplingParams(max_tokens=16)):
    ...         print(out.outputs[0].text)
    """

    def __init__(self, model: str | None = None, config: EngineConfig | None = None) -> None:
        """`model` alone means EngineConfig's defaults with that model. Raises as AsyncEngine.start does."""
        if model is not None and config is not None:
            raise ValueError("give either a model or a config")
        if config is None:
            config = EngineConfig(model=ModelConfigArgs(model=model)) if model else EngineConfig()
        self._config = config
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="aengine-llm", daemon=True)
        self._thread.start()
        self.engine = AsyncEngine(config)
        try:
            self._call(self.engine.start()).result()
        except BaseException:
            self._stop_loop()
            raise

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        if self._thread.is_alive():
            self._call(self.engine.close()).result()
            self._stop_loop()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many at once; the outputs are in the order of the prompts.

        A prompt is a text, a list of token ids, or a list of chat messages. `sampling`: one for all, or one for each.
        Raises what the first failing prompt raised; the others are then aborted.
        """
        listed = _listed(prompts)
        if isinstance(sampling, SamplingParams) or sampling is None:
            each = [sampling or SamplingParams()] * len(listed)
        else:
            each = list(sampling)
        if len(each) != len(listed):
            raise InvalidRequest(f"{len(listed)} prompts, but {len(each)} SamplingParams", param="sampling")
        if self._loop.is_closed():
            raise NotReady("this LLM is closed")
        running = self._call(self._generate(listed, each, progress))
        try:
            return running.result()
        except BaseException:  # Ctrl-C too: nothing may go on that nobody waits for
            running.cancel()
            raise

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or many."""
        return self.generate(messages, sampling, progress=progress)

    async def _generate(
        self, prompts: list[Prompt], sampling: list[SamplingParams], progress: bool
    ) -> list[RequestOutput]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        room = asyncio.Semaphore(max(1, self._config.scheduler.max_waiting // max((p.n for p in sampling), default=1)))
        with Progress(*columns, disable=not progress, transient=True) as bar:
            task = bar.add_task("prompts", total=len(prompts))

            async def one(prompt: Prompt, params: SamplingParams) -> RequestOutput:
                async with room:
                    output = await self._last(prompt, params)
                bar.advance(task)
                return output

            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(p, s)) for p, s in zip(prompts, sampling, strict=True)]
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _last(self, prompt: Prompt, sampling: SamplingParams) -> RequestOutput:
        last: RequestOutput | None = None
        async for output in self.engine.generate(prompt, sampling):
            last = output
        assert last is not None
        return last

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt -> [prompt]. A list is one prompt when it holds token ids or messages."""
    if isinstance(prompts, str | Mapping) or (isinstance(prompts, np.ndarray) and prompts.ndim == 1):
        return [prompts]
    if len(prompts) and (isinstance(prompts[0], int | np.integer) or _is_message(prompts[0])):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and "role" in value
