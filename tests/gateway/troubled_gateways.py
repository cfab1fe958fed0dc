"""A state machine of gateways whose connections to a shared memory store fail, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from hypothesis.stateful import RuleBasedStateMachine

from draftgate.gateway.state.guarded.calls import PATIENCE
from draftgate.gateway.state.guarded.store import GuardedStore
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.lab.sim.virtual_time import VirtualTimeLoop
from tests.gateway.flaky_store import FlakyStore

BACK_S = 2 * PATIENCE.longest_pause_s
"""Time after which every gateway uses a store again that has recovered."""


class TroubledGateway(Protocol):
    """A gateway with its own connection to the store that it shares."""

    @property
    def remote(self) -> FlakyStore:
        """The connection."""

    @property
    def store(self) -> GuardedStore:
        """The store that the gateway uses."""


def is_connected(gateway: TroubledGateway) -> bool:
    """Return whether calls of a gateway reach the store."""
    remote = gateway.remote
    return remote.failure is None and not remote.delay_s and gateway.store.outage is None


class TroubledGateways(RuleBasedStateMachine):
    """Gateways with a shared store. A subclass creates `gateways` in `begin`.

    Attributes:
        inner: the shared store.
    """

    gateways: Sequence[TroubledGateway]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
        self.runner.run(self._open())

    async def _open(self) -> None:
        self.inner = MemoryStore(asyncio.get_running_loop().time)
        await self.begin()

    async def begin(self) -> None:
        """Create the gateways, and give each its first heartbeat."""
        raise NotImplementedError

    async def beat(self) -> None:
        """Give every gateway a heartbeat."""
        raise NotImplementedError

    def teardown(self) -> None:
        self.runner.run(self._close())
        self.runner.close()

    async def _close(self) -> None:
        for gateway in self.gateways:
            await gateway.store.close()

    async def pass_seconds(self, seconds: float) -> None:
        """Let time pass, with a heartbeat of every gateway each second."""
        await asyncio.sleep(seconds % 1.0)
        for _ in range(int(seconds)):
            await asyncio.sleep(1.0)
            await self.beat()

    async def flush_store(self) -> None:
        """Delete the memory of the store."""
        self.inner = MemoryStore(asyncio.get_running_loop().time)
        for gateway in self.gateways:
            gateway.remote.inner = self.inner

    async def end_trouble(self, seconds: float) -> None:
        """Repair all connections, and let time pass until every gateway has noticed."""
        for gateway in self.gateways:
            gateway.remote.failure, gateway.remote.delay_s = None, 0.0
        await self.pass_seconds(seconds)
