"""Flows that wrap a remote store and always respond in time.

A *mirror* has the flows whose hops this gateway serves, and continues them while the remote store
does not respond. A flow that begins meanwhile stays in this process until it ends, because the
remote store would take its next hop for the first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from draftgate.gateway.state.flow_store import (
    FlowHop,
    FlowKey,
    FlowStore,
    HopArrival,
    HopLengths,
    MemoryFlows,
)
from draftgate.gateway.state.guarded.calls import GuardedCalls
from draftgate.gateway.state.store import StoreError
from draftgate.policies.flows.types import HopRecord


class GuardedFlows:
    """A `FlowStore` that never raises `StoreError`."""

    def __init__(self, remote: FlowStore, calls: GuardedCalls, clock: Callable[[], float]) -> None:
        """Wrap flows.

        Args:
            calls: the caller of the remote store.
            clock: a monotonic clock, in seconds.
        """
        self._remote = remote
        self._calls = calls
        self._mirror = MemoryFlows(clock)  # flows that the remote store knows
        self._alone = MemoryFlows(clock)  # flows that began during an outage

    async def begin_hop(self, key: FlowKey, arrival: HopArrival) -> FlowHop | None:
        """Add a hop to a flow, as `FlowStore.begin_hop` describes."""
        if key in self._alone:
            return await self._alone.begin_hop(key, arrival)
        try:
            hop = await self._calls.run(partial(self._remote.begin_hop, key, arrival))
        except StoreError:
            known = self._mirror if key in self._mirror else self._alone
            return await known.begin_hop(key, arrival)
        if hop is not None:
            self._mirror.adopt(key, arrival.kind, hop)
        return hop

    async def end_hop(self, key: FlowKey, hop: FlowHop, lengths: HopLengths) -> None:
        """Record the end of a hop, as `FlowStore.end_hop` describes."""
        if key in self._alone:
            await self._alone.end_hop(key, hop, lengths)
            return
        await self._mirror.end_hop(key, hop, lengths)
        with suppress(StoreError):
            await self._calls.run(partial(self._remote.end_hop, key, hop, lengths))

    async def cancel(self, key: FlowKey, hop: FlowHop) -> bool:
        """End a flow, as `FlowStore.cancel` describes."""
        if key in self._alone:
            return await self._alone.cancel(key, hop)
        ended = await self._mirror.cancel(key, hop)
        with suppress(StoreError):
            return await self._calls.run(partial(self._remote.cancel, key, hop))
        return ended

    async def take(self, key: FlowKey, hop: FlowHop) -> tuple[HopRecord, ...] | None:
        """End a flow and return its hops, as `FlowStore.take` describes.

        The hops of other gateways are unknown while the remote store does not respond.
        """
        if key in self._alone:
            return await self._alone.take(key, hop)
        mirrored = await self._mirror.take(key, hop)
        try:
            return await self._calls.run(partial(self._remote.take, key, hop))
        except StoreError:
            return mirrored
