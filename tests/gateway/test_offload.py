"""Tests of work in threads beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar

from draftgate.gateway.offload import MOST_THREADS, offload


async def test_offloaded_work_uses_a_bounded_number_of_threads() -> None:
    """Offloaded work uses at most `MOST_THREADS` threads."""
    may_finish = threading.Event()

    def work() -> int:
        may_finish.wait()
        return threading.get_ident()

    running = [asyncio.create_task(offload(work)) for _ in range(20 * MOST_THREADS)]
    # Two iterations of the loop start every task and its thread.
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    may_finish.set()
    assert len(set(await asyncio.gather(*running))) <= MOST_THREADS


async def test_offloaded_work_sees_the_context_of_its_task() -> None:
    """Offloaded work sees the context variables of its task."""
    name: ContextVar[str] = ContextVar("name")
    name.set("a request")
    assert await offload(name.get) == "a request"
