"""Work in threads beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar

from draftgate.gateway.offload import MOST_THREADS, offload


async def test_offloaded_work_uses_a_bounded_number_of_threads() -> None:
    """At most `MOST_THREADS` threads keep the memory of a long prompt."""
    go_on = threading.Event()

    def work() -> int:
        go_on.wait()
        return threading.get_ident()

    running = [asyncio.create_task(offload(work)) for _ in range(20 * MOST_THREADS)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # all are handed over: who would get a thread of its own has one
    go_on.set()
    assert len(set(await asyncio.gather(*running))) <= MOST_THREADS


async def test_offloaded_work_sees_the_context_of_its_task() -> None:
    """Log lines and spans of a thread belong to the request."""
    name: ContextVar[str] = ContextVar("name")
    name.set("a request")
    assert await offload(name.get) == "a request"
