"""Tests of deadlines of coroutines that usually do not wait."""

from __future__ import annotations

import asyncio
import time

import pytest

from draftgate.gateway.deadlines import within


async def wait(*times_s: float, result: int = 7, error: Exception | None = None) -> int:
    for time_s in times_s:
        await asyncio.sleep(time_s)
    if error is not None:
        raise error
    return result


@pytest.mark.parametrize("times_s", [(), (0,), (0.001, 0, 0.001)])
async def test_result_or_error_of_the_coroutine(times_s: tuple[float, ...]) -> None:
    """The result and the error are those of the coroutine, however often it waits."""
    assert await within(60, wait(*times_s)) == 7
    with pytest.raises(ValueError, match="mine"):
        await within(60, wait(*times_s, error=ValueError("mine")))


async def test_a_coroutine_is_cancelled_at_its_deadline() -> None:
    """A coroutine that takes too long is cancelled, and the caller gets a `TimeoutError`."""
    ended = []

    async def late() -> None:
        try:
            await wait(0, 60)
        finally:
            ended.append(True)

    begin_s = time.monotonic()
    with pytest.raises(TimeoutError):
        await within(0.01, late())
    assert ended
    assert time.monotonic() - begin_s < 30


async def test_a_coroutine_may_outlive_a_cancellation() -> None:
    """The caller's cancellation reaches the coroutine, which may end in its own way."""

    async def stubborn() -> int:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            return 1
        return 2

    task = asyncio.create_task(within(60, stubborn()))
    await asyncio.sleep(0)
    task.cancel()
    assert await task == 1


async def test_no_timer_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coroutine that does not wait needs no timer."""
    monkeypatch.setattr(asyncio, "timeout", None)
    assert await within(60, wait()) == 7
