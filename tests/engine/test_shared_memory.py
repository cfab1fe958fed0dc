"""Memory that a gateway shares with its engine processes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from draftgate.backends.engine.shared_memory import SLOTS, SharedMemory, place_of
from draftgate.backends.kv_transfer.transfer import CHUNK_BYTES

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs anonymous files")


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("test")
    os.ftruncate(fd, SLOTS * CHUNK_BYTES)
    yield fd
    os.close(fd)


def test_another_process_reads_the_reserved_bytes(fd: int) -> None:
    """The bytes of a slot are at the same place in each mapping of the memory."""
    gateway, engine = SharedMemory(fd), SharedMemory(fd)
    first, second = gateway.reserve(), gateway.reserve()
    assert first is not None
    assert second is not None
    engine.view(place_of(first))[:3] = b"abc"
    engine.view(place_of(second))[:3] = b"xyz"
    assert (bytes(first[:3]), bytes(second[:3])) == (b"abc", b"xyz")
    assert bytes(engine.view(place_of(first[:2]))) == b"ab"


def test_slot_is_reserved_while_a_view_of_its_bytes_exists(fd: int) -> None:
    """No slot is reserved twice, and a slot is free when the last view of its bytes is gone."""
    memory = SharedMemory(fd)
    slots = [memory.reserve() for _ in range(SLOTS)]
    assert None not in slots
    assert len({place_of(slot).slot for slot in slots}) == SLOTS
    assert memory.reserve() is None
    view = slots.pop(7)[:100]
    assert memory.reserve() is None
    number = place_of(view).slot
    del view
    again = memory.reserve()
    assert place_of(again).slot == number
    assert memory.reserve() is None


def test_other_bytes_have_no_place() -> None:
    """Bytes outside of shared memory follow their message."""
    assert place_of(memoryview(b"abc")) is None
    assert place_of(memoryview(bytearray(3))) is None
