"""Flows that wrap a remote store and always respond in time.

A *mirror* has the flows whose hops this gateway serves, and continues them while the remote store
does not respond. A flow that begins meanwhile stays in this process until it ends, because the
remote store would take its next hop for the first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from draftgate.gateway.state.commands import BeginHop, CancelFlow, CommandType, EndHop, TakeFlow
from draftgate.gateway.state.guarded.calls import GuardedCalls
from draftgate.gateway.state.memory.flows import MemoryFlows
from draftgate.gateway.state.store import StoreError
from draftgate.gateway.state.values import FlowHop


class GuardedFlows:
    """Flows whose commands never raise `StoreError`.

    Attributes:
        rules: the functions that execute the commands.
    """

    def __init__(self, calls: GuardedCalls, clock: Callable[[], float]) -> None:
        """Wrap the flows of a remote store.

        Args:
            clock: a monotonic clock, in seconds.
        """
        self._calls = calls
        self._mirror = MemoryFlows(clock)  # flows that the remote store knows
        self._alone = MemoryFlows(clock)  # flows that began during an outage
        self.rules: dict[CommandType, Callable[[Any], Awaitable[Any]]] = {
            BeginHop: self._begin_hop,
            EndHop: self._continue,
            CancelFlow: self._continue,
            TakeFlow: self._continue,
        }

    async def _begin_hop(self, command: BeginHop) -> FlowHop | None:
        key = command.key
        if key in self._alone:
            return self._alone.apply(command)
        try:
            hop = await self._calls.run(command)
        except StoreError:
            known = self._mirror if key in self._mirror else self._alone
            return known.apply(command)
        if hop is not None:
            self._mirror.adopt(key, command.arrival.kind, hop)
        return hop

    async def _continue(self, command: EndHop | CancelFlow | TakeFlow) -> Any:
        """Execute a command about a known flow.

        The hops of other gateways are unknown while the remote store does not respond.
        """
        if command.key in self._alone:
            return self._alone.handlers[type(command)](command)
        mirrored = self._mirror.handlers[type(command)](command)
        try:
            return await self._calls.run(command)
        except StoreError:
            return mirrored
