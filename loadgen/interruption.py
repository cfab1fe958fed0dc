"""Signals that end a long command early, which then keeps what it knows."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


class Interruption:
    """The signal that ended a command early.

    Attributes:
        number: SIGTERM if it was this signal, or else SIGINT.
    """

    def __init__(self) -> None:
        self.number = signal.SIGINT

    @property
    def status(self) -> int:
        """The exit status of an interrupted command, as shells report it: 130 or 143."""
        return 128 + self.number

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in an event loop. SIGTERM cancels it, as Ctrl-C does.

        Raises:
            KeyboardInterrupt: the coroutine ended because it was cancelled.
        """

        async def run_here() -> T:
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._cancel, task)
            return await work

        try:
            return uvloop.run(run_here())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        self.number = signal.SIGTERM
        task.cancel()

    def interrupt(self, _number: int, _frame: FrameType | None) -> None:
        """Handle SIGTERM.

        Raises:
            KeyboardInterrupt: always.
        """
        self.number = signal.SIGTERM
        raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Let SIGTERM raise KeyboardInterrupt, as Ctrl-C does, and yield which of them it was."""
    interruption = Interruption()
    before = signal.signal(signal.SIGTERM, interruption.interrupt)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGTERM, before)
