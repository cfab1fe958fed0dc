"""Durations and causes of a blocked event loop."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

WATCH_S: Final = 0.001
"""Seconds between two observations of the loop. The interval is the resolution of a hold, because
uvloop's timers have milliseconds."""


class Hold(NamedTuple):
    """A period in which a loop was blocked, in seconds.

    Attributes:
        late_s: wall-clock duration of the period, which a client has to wait.
        own_s: CPU time of the loop's thread in callbacks, without garbage collections. On a
            busy machine it covers several callbacks that piled up while the thread had no core.
        collecting_s: wall time of garbage collections in any thread, which stop all threads.
        lock_s: lower bound of the wait for the interpreter lock or for a page of memory.
            The thread that holds the lock may have no core either.
        descheduled_s: time in which the thread was ready but had no core (0 outside Linux).
    """

    late_s: float = 0.0
    own_s: float = 0.0
    collecting_s: float = 0.0
    lock_s: float = 0.0
    descheduled_s: float = 0.0


class LoopWatch:
    """Recorder of the delays with which a loop runs a timer.

    Attributes:
        longest: the longest value of each part, possibly from different holds.
    """

    def __init__(self) -> None:
        self.longest = Hold()
        self._thread = threading.get_ident()
        self._collected_s = 0.0  # in all threads, wall time
        self._collected_here_s = 0.0  # in the loop's thread, CPU time
        self._began_s = self._began_here_s = 0.0

    def note(self, hold: Hold) -> None:
        """Record a hold."""
        self.longest = Hold(*map(max, self.longest, hold))

    async def watch(self) -> None:
        """Observe the loop until cancelled, in the thread that created the watch."""
        gc.callbacks.append(self._collected)
        try:
            with _scheduling() as delay_s:
                while True:
                    began_s, cpu_s, waited_s = time.perf_counter(), time.thread_time(), delay_s()
                    gc_s, gc_here_s = self._collected_s, self._collected_here_s
                    await asyncio.sleep(WATCH_S)
                    self.note(
                        split_hold(
                            time.perf_counter() - began_s - WATCH_S,
                            time.thread_time() - cpu_s,
                            delay_s() - waited_s,
                            self._collected_s - gc_s,
                            self._collected_here_s - gc_here_s,
                        )
                    )
        finally:
            gc.callbacks.remove(self._collected)

    def _collected(self, phase: str, _info: dict[str, Any]) -> None:
        if phase == "start":
            self._began_s, self._began_here_s = time.perf_counter(), time.thread_time()
            return
        self._collected_s += time.perf_counter() - self._began_s
        if threading.get_ident() == self._thread:
            self._collected_here_s += time.thread_time() - self._began_here_s


def split_hold(
    late_s: float, cpu_s: float, descheduled_s: float, gc_s: float, gc_here_s: float
) -> Hold:
    """Split a hold into its parts.

    Args:
        late_s: delay of the timer, in seconds.
        cpu_s: CPU seconds of the thread since the previous observation, an upper bound of the hold.
        descheduled_s: seconds without a core.
        gc_s: wall seconds of garbage collections in all threads.
        gc_here_s: CPU seconds of garbage collections in the loop's thread.
    """
    late_s = max(late_s, 0.0)
    elsewhere_s = max(gc_s - gc_here_s, 0.0)
    lock_s = late_s - cpu_s - descheduled_s - elsewhere_s
    parts = cpu_s - gc_here_s, gc_s, lock_s, descheduled_s
    return Hold(late_s, *(min(max(part_s, 0.0), late_s) for part_s in parts))


@asynccontextmanager
async def watch_loop() -> AsyncIterator[LoopWatch]:
    """Watch the running loop while the context lasts."""
    watch = LoopWatch()
    task = asyncio.create_task(watch.watch())
    try:
        yield watch
    finally:
        task.cancel()


@contextmanager
def _scheduling() -> Iterator[Any]:
    """Return a function that returns the seconds in which this thread was ready without a core."""
    path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    if not path.exists():
        yield lambda: 0.0
        return
    file = os.open(path, os.O_RDONLY)
    try:
        yield lambda: int(os.pread(file, 64, 0).split()[1]) / 1e9
    finally:
        os.close(file)
