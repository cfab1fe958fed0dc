"""The concurrent execution of several prompts of one request, whose deltas are merged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final, TypeAlias

from draftgate.backends.types import Delta
from draftgate.gateway.dispatch.run import Run

PROMPTS_AT_ONCE: Final = 64
"""Maximum prompts of one request that wait or run at the same time.

The number equals a default batch. A request with thousands of prompts must neither fill the queue
nor block the event loop."""

RunOne: TypeAlias = Callable[[int], AsyncGenerator[Delta, None]]
"""A function that runs one prompt of a job by its index."""

_News: TypeAlias = "asyncio.Queue[Delta | Exception | None]"


async def merged(run: Run, run_one: RunOne) -> AsyncGenerator[Delta, None]:
    """Run a job's prompts in order and yield their merged deltas.

    At most `PROMPTS_AT_ONCE` prompts run at a time.
    """
    lanes = min(len(run.requests), PROMPTS_AT_ONCE)
    # The queue is short, because the backend's streams buffer and merge deltas for slow readers.
    news: _News = asyncio.Queue(lanes)
    indices = iter(range(len(run.requests)))

    async def lane() -> None:
        for index in indices:
            await _pump(run, index, run_one, news)

    tasks = [asyncio.create_task(lane()) for _ in range(lanes)]
    try:
        running = len(run.requests)
        while running:
            one = await news.get()
            if isinstance(one, Exception):
                raise one
            if one is None:
                running -= 1
            else:
                yield one
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(run: Run, index: int, run_one: RunOne, news: _News) -> None:
    """Put the deltas of one prompt into the queue, and then None or the final exception."""
    first_choice = index * run.job.n
    try:
        async with aclosing(run_one(index)) as deltas:
            async for delta in deltas:
                await news.put(delta._replace(choice=first_choice + delta.choice))
    except Exception as error:  # noqa: BLE001 - the reader raises the error
        await news.put(error)
    else:
        await news.put(None)
