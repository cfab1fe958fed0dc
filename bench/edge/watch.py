"""For how long an event loop does not come back, and where that time went."""

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
"""How often the loop is looked at: uvloop's timers know milliseconds, so a hold is told to that."""


class Hold(NamedTuple):
    """A time for which a loop did not come back, in seconds.

    Attributes:
        late_s: all of it, by the clock: what a client waits.
        own_s: the loop's thread computed: its callbacks, garbage collections apart. On a busy
            machine these are several: what piled up while it had no core.
        collecting_s: the garbage collector ran, in whichever thread: all others wait for it.
        lock_s: at least so long it waited for the interpreter lock, or for a page of memory.
            Who has the lock may have no core, too.
        descheduled_s: it could have run, but had no core: others' doing (Linux tells; else 0).
    """

    late_s: float = 0.0
    own_s: float = 0.0
    collecting_s: float = 0.0
    lock_s: float = 0.0
    descheduled_s: float = 0.0


class LoopWatch:
    """Notes how much later than asked for the loop comes back.

    Attributes:
        longest: of each part the longest that was seen; parts of different holds.
    """

    def __init__(self) -> None:
        """Begin with nothing seen."""
        self.longest = Hold()
        self._thread = threading.get_ident()
        self._collected_s = 0.0  # in all threads, by the clock
        self._collected_here_s = 0.0  # in the loop's, computing
        self._began_s = self._began_here_s = 0.0

    def note(self, hold: Hold) -> None:
        """Take a hold into account."""
        self.longest = Hold(*map(max, self.longest, hold))

    async def watch(self) -> None:
        """Look until cancelled. In the thread that made it."""
        gc.callbacks.append(self._collected)
        try:
            with _scheduling() as delay_s:
                while True:
                    began_s, cpu_s, waited_s = time.perf_counter(), time.thread_time(), delay_s()
                    gc_s, gc_here_s = self._collected_s, self._collected_here_s
                    await asyncio.sleep(WATCH_S)
                    self.note(
                        parted(
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


def parted(
    late_s: float, cpu_s: float, descheduled_s: float, gc_s: float, gc_here_s: float
) -> Hold:
    """Return a hold by where it went.

    Args:
        late_s: how late the loop came back.
        cpu_s: what its thread computed since it was looked at last, so at least in the hold.
        descheduled_s: for how long it had no core.
        gc_s, gc_here_s: of garbage collections in all threads by the clock, and of those in the
            loop's as far as it computed.
    """
    late_s = max(late_s, 0.0)
    elsewhere_s = max(gc_s - gc_here_s, 0.0)
    lock_s = late_s - cpu_s - descheduled_s - elsewhere_s
    parts = cpu_s - gc_here_s, gc_s, lock_s, descheduled_s
    return Hold(late_s, *(min(max(part_s, 0.0), late_s) for part_s in parts))


@asynccontextmanager
async def watched() -> AsyncIterator[LoopWatch]:
    """Watch the running loop."""
    watch = LoopWatch()
    task = asyncio.create_task(watch.watch())
    try:
        yield watch
    finally:
        task.cancel()


@contextmanager
def _scheduling() -> Iterator[Any]:
    """Give a function that says for how many seconds this thread was ready, but had no core."""
    path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    if not path.exists():
        yield lambda: 0.0
        return
    file = os.open(path, os.O_RDONLY)
    try:
        yield lambda: int(os.pread(file, 64, 0).split()[1]) / 1e9
    finally:
        os.close(file)
