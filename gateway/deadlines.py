"""Deadlines of coroutines that usually do not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from functools import partial
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def within(seconds: float, call: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine, whose timer starts only when it has to wait.

    Raises:
        TimeoutError: the coroutine took longer, and was cancelled.
    """
    try:
        awaited = call.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    async with asyncio.timeout(seconds):
        return await _rest(call, awaited)


@coroutine
def _rest(call: Coroutine[Any, Any, T], awaited: Any) -> Generator[Any, Any, T]:
    """Continue a coroutine that awaits something."""
    while True:
        try:
            proceed = partial(call.send, (yield awaited))
        except BaseException as error:  # noqa: BLE001 - such as a cancellation
            proceed = partial(call.throw, error)
        try:
            awaited = proceed()
        except StopIteration as end:
            result: T = end.value
            return result
