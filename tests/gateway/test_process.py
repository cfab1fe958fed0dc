"""Tests of the settings of a node's process."""

import ctypes
import gc
import subprocess
import sys

import pytest

from draftgate.gateway.app import Listening
from draftgate.gateway.process import (
    LOADING_OBJECTS,
    YOUNG_OBJECTS,
    defer_collections,
    settle_process,
)

FRAGMENTING = """
import ctypes
from draftgate.gateway.process import LARGE_BLOCK_BYTES, settle_process

class Mallinfo(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.mallinfo2.restype = ctypes.c_void_p, Mallinfo
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
settle_process()
libc.free(libc.malloc(4 * LARGE_BLOCK_BYTES))  # glibc then places smaller blocks in its heap
blocks = [(libc.malloc(2 * LARGE_BLOCK_BYTES), libc.malloc(65_536)) for _ in range(50)]
for large, _ in blocks:
    libc.free(large)
print(libc.mallinfo2().fordblks)
"""
"""Allocates large blocks between small ones, frees the large blocks, and prints the free bytes.

The small blocks together do not fit into the free parts of the heap."""


async def test_garbage_collection_skips_startup_objects(sim: Listening) -> None:
    """The server freezes modules, vocabularies and models, so garbage collection skips them.
    Until then, collections are rare."""
    thresholds, switch_s = gc.get_threshold(), sys.getswitchinterval()
    try:
        defer_collections()
        assert gc.get_threshold() == (LOADING_OBJECTS, *thresholds[1:])
        settle_process()
        assert gc.get_threshold() == (YOUNG_OBJECTS, *thresholds[1:])
        kept = gc.get_freeze_count()
        assert kept > 10 * len(gc.get_objects())
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(switch_s)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc 2.33 or later")
def test_freed_large_blocks_leave_the_heap() -> None:
    """A hundred megabytes of large blocks leave no free memory between the small blocks."""
    script = [sys.executable, "-c", FRAGMENTING]
    output = subprocess.run(script, capture_output=True, check=True, text=True).stdout
    assert int(output) < 10_000_000
