"""Memory for KV blocks in transit, which a gateway shares with its engine processes.

The memory consists of slots for one chunk each. The gateway reserves a slot when an engine process
exports a chunk. The engine writes the chunk to the slot, and the gateway or the next engine reads
it there, so no socket carries the bytes. The slot is free again when nothing refers to its bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from functools import cache
from typing import Final

from draftgate.backends.kv_transfer.transfer import CHUNK_BYTES, WINDOW_CHUNKS
from draftgate.backends.remote_worker import SharedBytes

SLOTS: Final = 8 * WINDOW_CHUNKS
"""Number of slots, for four transfers that wait at both workers. The memory of a slot is allocated
when it is first used. Without a free slot, a socket carries the chunk. (Chosen, not tuned,
2026-11-23.)"""


class _Slot(ctypes.Array[ctypes.c_ubyte]):
    """The bytes of a slot. Views of it keep it reserved, because they refer to this object."""

    _type_ = ctypes.c_ubyte
    _length_ = CHUNK_BYTES
    number: int


class SharedMemory:
    """The slots, in the gateway or in an engine process. Any thread may call the methods.

    Attributes:
        fd: file descriptor of the memory, which engine processes inherit.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, SLOTS * CHUNK_BYTES)
        self._free = list(range(SLOTS))

    def reserve(self) -> memoryview | None:
        """Return the bytes of a free slot, or None without one.

        The last free slot is reserved first, because its bytes are probably in the cache of a
        core.
        """
        try:
            number = self._free.pop()
        except IndexError:
            return None
        slot = self._slot(number)
        weakref.finalize(slot, self._free.append, number)
        return memoryview(slot).cast("B")

    def view(self, place: SharedBytes) -> memoryview:
        """Return the bytes at a place, which another process has reserved."""
        return memoryview(self._slot(place.slot)).cast("B")[: place.num_bytes]

    def _slot(self, number: int) -> _Slot:
        slot = _Slot.from_buffer(self._memory, number * CHUNK_BYTES)
        slot.number = number
        return slot


def place_of(data: memoryview) -> SharedBytes | None:
    """Return the place of the leading bytes of a slot, or None for other bytes."""
    return SharedBytes(data.obj.number, len(data)) if isinstance(data.obj, _Slot) else None


@cache
def shared_memory() -> SharedMemory | None:
    """Return the memory of this gateway, or None if the system has no anonymous files."""
    if not hasattr(os, "memfd_create"):
        return None
    fd = os.memfd_create("draftgate-kv-blocks")
    os.ftruncate(fd, SLOTS * CHUNK_BYTES)
    return SharedMemory(fd)
