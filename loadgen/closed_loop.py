"""Closed loop: so many clients, each asking again as soon as it has its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import aiohttp

from loadgen.client import Question, Record, ask


async def run_closed_loop(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    questions: Iterator[Question],
    concurrency: int,
    on_record: Callable[[Record], None],
) -> None:
    """Ask all questions, `concurrency` at a time. In a closed loop, scheduled means sent."""

    async def client() -> None:
        for question in questions:
            on_record(await ask(session, url, model, question))

    async with asyncio.TaskGroup() as clients:
        for _ in range(concurrency):
            clients.create_task(client())
