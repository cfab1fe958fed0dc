"""The task of a direct request behaves as a task of asyncio, but begins at once."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

import pytest

from draftgate.gateway.http.eager_task import EagerTask

NAME: ContextVar[str] = ContextVar("name", default="none")


async def begun(coroutine: object) -> EagerTask:
    """Start a task as a callback of the event loop does, and return it."""
    loop, started = asyncio.get_running_loop(), asyncio.Event()
    task = EagerTask(coroutine, loop)  # type: ignore[arg-type]

    def start() -> None:
        task.start()
        started.set()

    loop.call_soon(start)
    await started.wait()
    return task


async def test_steps_before_the_first_wait_run_at_once() -> None:
    """The call that starts the task runs it until it waits, in a context of its own."""
    seen: list[str] = []

    async def work() -> None:
        NAME.set("inner")
        seen.append("first")
        await asyncio.sleep(0)
        seen.append(NAME.get())
        await asyncio.sleep(0.001)
        seen.append(NAME.get())

    def start() -> None:
        EagerTask(work(), asyncio.get_running_loop()).start()
        seen.append(NAME.get())

    asyncio.get_running_loop().call_soon(start)
    await asyncio.sleep(0.05)
    assert seen == ["first", "none", "inner", "inner"]


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_cancel_reaches_the_coroutine(turns: int) -> None:
    """A cancel ends the wait for a future, for a turn of the event loop and for another task."""
    seen: list[str] = []

    async def work() -> None:
        try:
            if turns == 0:
                await asyncio.sleep(0)
            elif turns == 1:
                await asyncio.get_running_loop().create_future()
            else:
                await asyncio.create_task(asyncio.sleep(10))
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    loop, task = asyncio.get_running_loop(), EagerTask(work(), asyncio.get_running_loop())
    loop.call_soon(task.start)
    loop.call_soon(task.cancel)
    await asyncio.sleep(0.02)
    task.cancel()  # has no effect after the end
    await asyncio.sleep(0)
    assert seen == ["cancelled"]


async def test_timeouts_work() -> None:
    """A timeout of asyncio cancels the block, and the task continues afterwards."""
    seen: list[str] = []

    async def work() -> None:
        try:
            async with asyncio.timeout(0.001):
                await asyncio.sleep(10)
        except TimeoutError:
            seen.append("late")
        await asyncio.sleep(0)
        seen.append("end")

    task = await begun(work())
    await asyncio.sleep(0.05)
    assert seen == ["late", "end"]
    assert task.cancelling() == 0


async def test_cancel_before_a_result_is_taken() -> None:
    """A cancel after the future has its result, but before the next step, is not lost."""
    seen: list[str] = []
    loop = asyncio.get_running_loop()
    news: asyncio.Future[None] = loop.create_future()

    async def work() -> None:
        try:
            await news
        except asyncio.CancelledError:
            seen.append("cancelled")

    task = await begun(work())
    news.set_result(None)
    task.cancel()
    await asyncio.sleep(0.01)
    assert seen == ["cancelled"]
