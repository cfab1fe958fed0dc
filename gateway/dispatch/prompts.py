"""The concurrent execution of several prompts of one request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from draftgate.gateway.dispatch.prompt import Prompt

PROMPTS_AT_ONCE: Final = 64
"""Maximum prompts of one request that wait or run at the same time.

The number equals a default batch. A request with thousands of prompts must neither fill the queue
nor block the event loop."""


class Prompts:
    """The prompts of a job, which run in order, and at most `at_once` at a time."""

    def __init__(self, prompt: Callable[[int], Prompt], count: int, at_once: int) -> None:
        """Create a job's prompts, which run from the first `wait` on.

        Args:
            prompt: a function that returns a prompt by its index.
        """
        self._prompt = prompt
        self._count = count
        self._at_once = at_once
        self._tasks: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()
        self._woken = False

    def wake(self) -> None:
        """Let `wait` return."""
        self._woken = True
        self._news.set()

    async def wait(self) -> bool:
        """Run until all prompts have ended, or until `wake` is called, as `Prompt.wait`."""
        if not self._tasks:
            indices = iter(range(self._count))

            async def lane() -> None:
                for index in indices:
                    prompt = self._prompt(index)
                    try:
                        while await prompt.wait():
                            pass
                    finally:
                        await prompt.aclose()

            lanes = range(min(self._count, self._at_once))
            self._tasks = [asyncio.create_task(lane()) for _ in lanes]
            for task in self._tasks:
                task.add_done_callback(lambda _: self._news.set())
        while True:
            if self._woken:
                self._woken = False
                return True
            ended = [task for task in self._tasks if task.done()]
            for task in ended:
                task.result()
            if len(ended) == len(self._tasks):
                return False
            self._news.clear()
            await self._news.wait()

    async def aclose(self) -> None:
        """Cancel all prompts."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
