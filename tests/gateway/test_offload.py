"""Long work beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar

from draftgate.gateway.offload import MOST_THREADS, offload


async def test_long_work_has_few_threads_however_much_there_is() -> None:
    """At most `MOST_THREADS` works run at once, so no more threads keep memory of the longest."""
    go_on = threading.Event()

    def work() -> int:
        go_on.wait()
        return threading.get_ident()

    running = [asyncio.create_task(offload(work)) for _ in range(20 * MOST_THREADS)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # all are handed over: who would get a thread of its own has one
    go_on.set()
    assert len(set(await asyncio.gather(*running))) <= MOST_THREADS


async def test_work_beside_sees_the_context_of_its_task() -> None:
    """Log lines and spans of a thread are those of the request."""
    name: ContextVar[str] = ContextVar("name")
    name.set("a request")
    assert await offload(name.get) == "a request"
