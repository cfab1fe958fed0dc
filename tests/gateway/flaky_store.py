"""A store that can be slow, stuck or unreachable, and a guarded store that uses it."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

from draftgate.gateway.state.commands import ListWorkers, ReadTotals, RenewQuotas, StoreCommand, T
from draftgate.gateway.state.guarded.store import GuardedStore
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.gateway.state.store import StoreError


class FlakyStore:
    """A `RemoteStore` that keeps its data in memory and simulates an unreliable connection.

    Attributes:
        inner: the memory store, which other flaky stores may share.
        delay_s: the delay of each call, in seconds. A call takes effect after the delay.
        failure: the message of the error that each call raises, or None.
        gateways: the number of gateways that a snapshot reports.
        calls: the number of calls by the name of the command.
    """

    outage = None
    memory = None

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self.inner = MemoryStore(self._clock)
        self.delay_s = 0.0
        self.failure: str | None = None
        self.gateways = 1
        self.calls = Counter[str]()

    def forget(self) -> None:
        """Delete all data."""
        self.inner = MemoryStore(self._clock)

    async def warm_up(self) -> None:
        if self.failure is not None:
            raise StoreError(self.failure)
        await asyncio.sleep(self.delay_s)

    async def call(self, command: StoreCommand[T]) -> T:
        if not isinstance(command, ReadTotals):  # only tests read totals
            self.calls[type(command).__name__] += 1
            await self.warm_up()
        found = self.inner.apply(command)
        if isinstance(command, ListWorkers):
            return replace(found, gateways=self.gateways)
        return self.gateways if isinstance(command, RenewQuotas) else found

    async def close(self) -> None:
        self.calls["close"] += 1


def guarded(remote: FlakyStore) -> GuardedStore:
    """Return a guarded store that uses the running loop's clock and no jitter."""
    return GuardedStore(remote, clock=asyncio.get_running_loop().time, uniform=lambda: 0.0)
