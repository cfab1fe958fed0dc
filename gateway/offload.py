"""Work that takes longer than the event loop may be held: parsing, tokenising, spelling.

It has a few threads of its own, not asyncio's, of which there are up to 32: what a thread frees the
allocator keeps for that thread, so each of them ends up with as much memory as the longest prompt
ever took (20 MB for one of 200,000 characters, glibc 2.36, 2026-11-21), and a node grows for as
long as there is a thread that has not had it. Nor does a wait for a name server or a disk, which
take place in asyncio's threads, hold a prompt up.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Final, ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")

MOST_THREADS: Final = 4
"""Of a process, if it has as many cores: the work is computing, which more threads make no
faster. Each tokenises some 2.5 MB in a second (AMD EPYC Zen 4, 2026-11-21)."""

THREADS: Final = min(MOST_THREADS, os.cpu_count() or 1)

_pool: Final = ThreadPoolExecutor(THREADS, "offload")


async def offload(
    work: Callable[Given, Result], *arguments: Given.args, **named: Given.kwargs
) -> Result:
    """Return what the work returns, done in a thread that sees this task's context variables."""
    run = copy_context().run
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_pool, lambda: run(work, *arguments, **named))
