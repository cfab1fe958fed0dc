"""Calls whose callers are cancelled while the calls end."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from draftgate.gateway.state.commands import ReadUsage, StoreCommand
from draftgate.gateway.state.guarded.calls import GuardedCalls
from draftgate.gateway.state.store import InMemory, StoreError
from tests.gateway.test_guarded_store import in_virtual_time, now_s


async def nothing() -> None:
    """Return immediately."""


async def run_cancelled(end: Callable[[], str], when_late: Callable[[], None]) -> None:
    """Cancel a caller in the moment in which its call ends."""

    class Ending(InMemory):
        async def call(self, command: StoreCommand[Any]) -> Any:
            await asyncio.sleep(0)
            caller.cancel()
            return end()

    calls = GuardedCalls(Ending(), ReadUsage(), purpose="test", clock=now_s, uniform=lambda: 0.0)

    caller = asyncio.create_task(calls.run(ReadUsage(), when_late))
    with suppress(asyncio.CancelledError):
        await caller
    assert caller.cancelled()
    await asyncio.sleep(0)


@in_virtual_time
async def test_a_call_that_fails_for_a_cancelled_caller_leaves_no_error() -> None:
    """The event loop reports no error of a call whose caller was cancelled as the call failed."""
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, error: unhandled.append(error))

    def fail() -> str:
        raise StoreError("connection lost")

    await run_cancelled(fail, lambda: None)
    gc.collect()
    assert unhandled == []


@in_virtual_time
async def test_a_call_that_succeeds_for_a_cancelled_caller_counts_as_late() -> None:
    """A call whose caller was cancelled as the call succeeded is handled like a late call."""
    late: list[str] = []
    await run_cancelled(lambda: "granted", lambda: late.append("granted"))
    assert late == ["granted"]
