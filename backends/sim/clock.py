"""Time for the simulator: the event loop's, which may be virtual.

`VirtualTimeLoop` is an asyncio event loop whose time stands still while any task can run, and
jumps to the next timer when none can. asyncio itself knows when that is: it asks its selector to
wait. So every sleep, timeout and deadline of the program is virtual, not only those that know of
it, and a run is as deterministic as the tasks in it.

What is handed to a thread is done at once, by the loop itself, or its end would come at another
virtual instant each time. Limits: sockets, and threads that somebody starts by himself, live in
real time, and the virtual loop does not wait for them.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, Protocol, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Clock(Protocol):
    """Where time comes from, in seconds since any fixed instant."""

    def now_s(self) -> float:
        """Return the time."""
        ...

    async def sleep_s(self, seconds: float) -> None:
        """Let others run for this long; for zero or less, let each run once."""
        ...


class LoopClock:
    """The running event loop's clock: wall time, or virtual time on a `VirtualTimeLoop`."""

    def now_s(self) -> float:
        """Return the running loop's time."""
        return asyncio.get_running_loop().time()

    async def sleep_s(self, seconds: float) -> None:
        """Sleep on the running loop."""
        await asyncio.sleep(max(0.0, seconds))


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop that starts at 0 s and never waits."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual time."""
        return self._jumping.now_s

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run the function now, and return a future that is done."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - whoever waits for it gets it
            future.set_exception(error)
        return future


class _JumpingSelector(selectors.SelectSelector):
    """A selector that skips the wait and moves the time by it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready; if nothing is, the time moves on by `timeout`.

        Raises:
            RuntimeError: there is nothing to wait for: every task waits for another.
        """
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("deadlock in virtual time: no task can run and no timer is set")
            self._move_on(max(0.0, timeout))
        return ready

    def _move_on(self, seconds: float) -> None:
        self.now_s += seconds
        # asyncio fires timers that are due before now + 1 ns. After some 100 days floats are
        # coarser than that, and a timer due exactly now would wait for ever.
        if seconds > 0.0 and self.now_s + 1e-9 == self.now_s:
            self.now_s = math.nextafter(self.now_s, math.inf)


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time, like `asyncio.run`."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
