"""Virtual time: an event loop that never waits.

The time of a `VirtualTimeLoop` does not change while any task can run, and jumps to the next timer
when none can. asyncio signals that moment by calling its selector with a timeout. So every sleep,
timeout and deadline of the program is virtual, and a run is as deterministic as its tasks.

The loop runs the functions of `run_in_executor` itself, because threads would finish at a different
virtual time in each run. Sockets and other threads use real time, and the loop does not wait for
them.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, Final, TypeVar, TypeVarTuple, Unpack

POLL_TURNS: Final = 64
"""Turns of a loop without sockets between two looks at signals and other threads. (Chosen, not
tuned, 2026-11-30.)"""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def loop_time_s() -> float:
    """Return the running loop's time, which is virtual on a `VirtualTimeLoop`."""
    return asyncio.get_running_loop().time()


def skip_time(seconds: float) -> bool:
    """Call `VirtualTimeLoop.skip_time` of the running loop."""
    loop = asyncio.get_running_loop()
    return isinstance(loop, VirtualTimeLoop) and loop.skip_time(seconds)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop that starts at 0 s and never waits."""

    # Attributes of asyncio's base class.
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _clock_resolution: float

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual time."""
        return self._jumping.now_s

    def skip_time(self, seconds: float) -> bool:
        """Advance the time within a turn, and return False if anything may happen meanwhile.

        A timer of that length would have the same effect, but would take a turn of the loop.
        """
        # `call_later` and the selector compute the time in this order, on which its last bit
        # depends.
        now_s = self._jumping.now_s
        left_s = max(0.0, now_s + seconds - now_s)
        ends_s = now_s + left_s + self._clock_resolution
        if self._ready or (self._scheduled and self._scheduled[0].when() <= ends_s):
            return False
        self._jumping.advance(left_s)
        return True

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run the function immediately and return a completed future."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - raised where the future is awaited
            future.set_exception(error)
        return future


class _JumpingSelector(selectors.SelectSelector):
    """A selector that advances the time instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self._turn = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return the ready sockets, or advance the time by `timeout` if no socket is ready.

        Raises:
            RuntimeError: every task waits for another task.
        """
        self._turn += 1
        # The loop's own file wakes it for signals and threads. A simulation has no other, and a
        # system call in each turn would take 3% of its time.
        polls = timeout is None or len(self.get_map()) > 1 or not self._turn % POLL_TURNS
        ready = super().select(0) if polls else []
        if not ready:
            if timeout is None:
                raise RuntimeError("deadlock in virtual time: no task can run and no timer is set")
            self.advance(max(0.0, timeout))
        return ready

    def advance(self, seconds: float) -> None:
        """Move the time, by more than rounding if `seconds` is positive."""
        self.now_s += seconds
        # asyncio fires timers due before now + 1 ns. After about 100 days, floats are coarser than
        # that, and a timer due exactly now would never fire.
        if seconds > 0.0 and self.now_s + 1e-9 == self.now_s:
            self.now_s = math.nextafter(self.now_s, math.inf)


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time, like `asyncio.run`."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        try:
            return runner.run(main)
        except (KeyboardInterrupt, SystemExit):
            # The signal may have left a request half ended, whose task then fails.
            runner.get_loop().set_exception_handler(lambda _loop, _context: None)
            raise
