"""Tests of the tables of commands: each store knows each command, with its result."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from draftgate.gateway.cluster.snapshots import SharedSnapshots
from draftgate.gateway.state import commands
from draftgate.gateway.state.commands import NO_FALLBACK, ReleaseLeases, StoreCommand
from draftgate.gateway.state.local.store import LocalStore
from draftgate.gateway.state.memory.responses import MemoryResponses
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.gateway.state.redis.scripts import RESPONSE_SCRIPTS, SCRIPTS
from tests.gateway.stores import TimedLocal, granted, leased_tokens, report

COMMANDS = [
    kind
    for kind in vars(commands).values()
    if isinstance(kind, type) and issubclass(kind, StoreCommand) and kind is not StoreCommand
]


def test_every_store_knows_every_command() -> None:
    """Memory has a function for each command, and Redis a script."""
    assert len(COMMANDS) > 20
    in_memory = MemoryStore().handlers | MemoryResponses(1, 1.0).handlers
    assert set(in_memory) == set(COMMANDS)
    assert set(SCRIPTS) | set(RESPONSE_SCRIPTS) == set(COMMANDS)
    assert not set(SharedSnapshots().handlers) & set(COMMANDS)


@pytest.mark.parametrize("kind", [kind for kind in COMMANDS if kind.fallback is not NO_FALLBACK])
def test_a_fallback_is_a_result_of_its_command(kind: commands.CommandType) -> None:
    """What a caller gets without the store has the type of the result."""
    encoded = msgspec.msgpack.encode(kind.fallback)
    assert commands.result_decoder(kind).decode(encoded) == kind.fallback


async def test_a_command_that_need_not_wait_is_kept_without_a_connection(tmp_path: Path) -> None:
    """A release is sent with the next call, if the server was away when the request ended."""
    opened = TimedLocal(tmp_path / "store")
    await opened.begin()
    store, other = opened.store, LocalStore(tmp_path / "store")
    await store.call(commands.PublishReport(report()))
    await granted(store, "r", 100)
    other.post(ReleaseLeases(("r",)))
    assert await leased_tokens(store) == 100
    await other.call(commands.ListWorkers())
    assert await leased_tokens(store) == 0
    await other.close()
    await opened.close()
