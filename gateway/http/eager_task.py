"""The task of a direct request, which runs in the call that delivers the request.

A task of asyncio begins in a later turn of the event loop. The first steps of most requests wait
for nothing, so that the request is on its way to a worker or an upstream when the call returns. The
class follows the rules for tasks of other libraries ("Extending" in the documentation of asyncio).
`asyncio.timeout` therefore works in it. No code waits for such a task.
"""

from __future__ import annotations

import asyncio
from asyncio.tasks import _enter_task, _leave_task
from collections.abc import Coroutine
from contextvars import copy_context
from typing import Any


class EagerTask:
    """A coroutine that handles its own errors, with the methods of a task that are used."""

    __slots__ = ("_cancels", "_context", "_coroutine", "_loop", "_must_cancel", "_waits_for")

    def __init__(
        self, coroutine: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop
    ) -> None:
        """Prepare a coroutine, which runs from `start` on in a context of its own."""
        self._coroutine = coroutine
        self._loop = loop
        self._context = copy_context()
        self._waits_for: asyncio.Future[Any] | None = None
        self._must_cancel = False
        self._cancels = 0

    def start(self) -> None:
        """Run until the coroutine has to wait for the first time. No other task may run."""
        self._context.run(self._step, None)

    def _step(self, _: object) -> None:
        """Run until the coroutine has to wait again. The caller has entered the context."""
        self._waits_for = None
        _enter_task(self._loop, self)  # type: ignore[arg-type]  # not a subclass of Task
        try:
            if self._must_cancel:
                self._must_cancel = False
                waits_for = self._coroutine.throw(asyncio.CancelledError())
            else:
                waits_for = self._coroutine.send(None)
        except (StopIteration, asyncio.CancelledError):
            return
        finally:
            _leave_task(self._loop, self)  # type: ignore[arg-type]
        if waits_for is None:  # such as `asyncio.sleep(0)`
            self._loop.call_soon(self._step, None, context=self._context)
            return
        waits_for._asyncio_future_blocking = False  # noqa: SLF001 - as `asyncio.Task` does
        waits_for.add_done_callback(self._step, context=self._context)
        self._waits_for = waits_for
        if self._must_cancel:
            self._must_cancel = not waits_for.cancel()

    def cancel(self, msg: object = None) -> bool:
        """Raise `CancelledError` in the coroutine soon."""
        self._cancels += 1
        waits_for = self._waits_for
        # Otherwise the coroutine runs, or will run in this turn of the event loop.
        self._must_cancel = waits_for is None or not waits_for.cancel()
        return True

    def cancelling(self) -> int:
        """Return the number of cancels, as `asyncio.Task.cancelling`."""
        return self._cancels

    def uncancel(self) -> int:
        """Undo a cancel, as `asyncio.Task.uncancel`."""
        self._cancels = max(self._cancels - 1, 0)
        return self._cancels
