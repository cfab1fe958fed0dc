"""Several prompts of one request, run side by side: their deltas, merged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final, TypeAlias

from draftgate.backends.types import Delta
from draftgate.gateway.dispatch.run import Run

PROMPTS_AT_ONCE: Final = 64
"""Prompts of one request that wait or run at a time, as many as a default batch holds: a request of
thousands must fill neither the queue nor, while they are placed, the event loop."""

RunOne: TypeAlias = Callable[[Run, int], AsyncGenerator[Delta, None]]
"""Runs one prompt of a job, given its index."""

_News: TypeAlias = "asyncio.Queue[Delta | Exception | None]"


async def merged(run: Run, run_one: RunOne) -> AsyncGenerator[Delta, None]:
    """Run a job's prompts, at most `PROMPTS_AT_ONCE` at a time, in their order."""
    lanes = min(len(run.requests), PROMPTS_AT_ONCE)
    # The queue is short: what waits for a slow reader waits, merged, in the backend's streams.
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
    """Run one prompt into the queue; end with None, or with the exception it ended with."""
    first_choice = index * run.job.n
    try:
        async with aclosing(run_one(run, index)) as deltas:
            async for delta in deltas:
                await news.put(delta._replace(choice=first_choice + delta.choice))
    except Exception as error:  # noqa: BLE001 - handed to the reader, who raises it
        await news.put(error)
    else:
        await news.put(None)
