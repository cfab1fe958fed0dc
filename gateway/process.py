"""Settings of a node's process: garbage collection, thread switches and the C allocator."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SECRET_ENV: Final = "DRAFTGATE_PROCESS_SECRET"
"""The variable with the secret that the processes of a node share."""

YOUNG_OBJECTS: Final = 5_000
"""Threshold of the youngest garbage-collector generation, in objects.

Objects of a request are in no cycle, so collections find nothing. A request without collections
takes 0.85 of the time with Python's default of 700. A collection of 5,000 objects takes 0.8 ms, and
of 20,000 objects 3 ms. No callback may block the event loop for longer than 5 ms. (`bench edge`,
interleaved, busy machine, AMD Zen 4, 2026-11-21.)"""

LOADING_OBJECTS: Final = 1_000_000
"""The same threshold until everything is loaded.

Imported modules and models stay, so collections find nothing. With Python's default, they take 0.4
of the 2.4 CPU seconds of the imports of a server with an engine (busy AMD EPYC, 2026-11-29).
"""

SWITCH_S: Final = 0.001
"""Interpreter switch interval, for which a thread keeps the GIL while another thread waits.

Python's default of 5 ms delays the event loop by this time in each turn while a prompt is parsed.
The shorter interval raises the CPU time of an engine step with 48 open streams from 18.5 to 18.9
ms. (Medians of 4 or 5 runs, busy machine, AMD Zen 4, 2026-11-21.)"""

LARGE_BLOCK_BYTES: Final = 1 << 20
"""Size from which the C allocator takes a block from the system and returns it at once.

glibc raises this size to that of the largest freed block, up to 32 MiB. Large temporary blocks then
lie in the heap, and small blocks between them keep their memory after they are freed. Under mixed
traffic, the free part of the heap grew from 24 to 78 MB in ten minutes, and stays between 25 and 29
MB with this size. Prompts and steps take the same time. (`make test-long ARGS=tests/soak`, shipped
model, busy machine, AMD Zen 4, 2026-11-23.)"""

KEPT_BYTES: Final = 64 << 20
"""Free memory that the C allocator keeps at the end of its heap. The default of 128 KiB applies
once the other size is set, and steps then ask the system for the same memory again and again. With
16 MiB, a step of 16 sequences took 1.05 of the time (Zen 4, 2026-11-23)."""

_M_TRIM_THRESHOLD: Final = -1  # parameters of mallopt(3)
_M_MMAP_THRESHOLD: Final = -3


_PROC: Final = Path("/proc")


def resident_bytes() -> int | None:
    """Return the main memory of this process and its descendants, or None if it is unknown.

    Pages that several of them share count several times.
    """
    try:
        return sum(map(_resident_bytes, _with_descendants(os.getpid())))
    except OSError:  # systems other than Linux
        return None


def _resident_bytes(pid: int) -> int:
    pages = (_PROC / str(pid) / "statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _with_descendants(pid: int) -> Iterator[int]:
    yield pid
    for children in (_PROC / str(pid) / "task").glob("*/children"):
        for child in children.read_text(encoding="ascii").split():
            yield from _with_descendants(int(child))


def defer_collections() -> None:
    """Make garbage collections rare until `settle_process`, so that imports and loading are faster.

    Call this function before the imports.
    """
    gc.set_threshold(LOADING_OBJECTS, *gc.get_threshold()[1:])


def settle_process() -> None:
    """Configure the process for an event loop with busy threads, after everything is loaded.

    Existing objects are excluded from later garbage collections, and collections become rarer. A
    full collection blocks all threads for 60 ms with the simulator and 280 ms with the engine.
    (`gc.collect()` on a busy core, AMD Zen 4, 2026-11-21.)
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    sys.setswitchinterval(SWITCH_S)
    _limit_heap()


def _limit_heap() -> None:
    """Keep large blocks out of the heap of the C allocator, if the allocator is glibc's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
