"""The contract of a store of flows, and its implementation in memory.

A *flow* is several requests of one tenant that serve one user action, and its requests are *hops*.
The store has the clock, so any gateway of a pool can serve the next hop. A flow is kept for a
bounded time after its deadline, and each tenant has a bounded number of flows. Every store passes
the tests in `tests/gateway/flow_contract.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from draftgate.gateway.state.expiries import Expiries
from draftgate.policies.flows.types import HopKind, HopRecord
from draftgate.policies.values import immutable, replace

MOST_FLOWS: Final = 4096
"""Maximum number of flows of a tenant. Requests of further flows run as ordinary requests.

A flow takes about 1 kB in Redis. With deadlines of 10 s, a tenant may begin 160 flows per second.
(Chosen, not tuned.)"""

MOST_FLOW_HOPS: Final = 64
"""Maximum number of hops of a flow. Further requests run as ordinary requests."""

KEEP_S: Final = 15.0
"""Seconds for which the store keeps a flow after its deadline.

The gateway of the first hop takes the flow earlier, `SETTLE_S` after the deadline
(`gateway.dispatch.flows`). The rest is for calls that are late."""


class FlowKey(NamedTuple):
    """The name of a flow. Two tenants that use the same id have two flows."""

    tenant: str
    flow_id: str

    @property
    def text(self) -> str:
        """The key as one text, which differs for any two keys."""
        return f"{len(self.tenant)}:{self.tenant}{self.flow_id}"


@immutable
class HopArrival:
    """A request that names its flow.

    Attributes:
        ago_s: seconds since its arrival.
        deadline_s: deadline of the flow after the arrival of its first request in seconds, or None
            if the request has none. Only the value of the first request counts.
    """

    kind: HopKind
    ago_s: float
    deadline_s: float | None


@immutable
class FlowHop:
    """The place of a request in its flow.

    Attributes:
        number: number of the hop in the order of arrival, from 1.
        age_s: seconds since the arrival of the first request.
        deadline_s: deadline of the flow after that arrival, in seconds.
        life: a number that distinguishes flows with the same key.
    """

    number: int
    age_s: float
    deadline_s: float
    life: int

    @property
    def remaining_s(self) -> float:
        """Seconds to the deadline, negative after the deadline."""
        return self.deadline_s - self.age_s


class HopLengths(NamedTuple):
    """The measured lengths of a hop that has ended, as in `HopRecord`."""

    prompt_tokens: int
    output_tokens: int
    service_s: float


class FlowStore(Protocol):
    """The flows of tenants, shared by the gateways of a pool.

    Raises:
        StoreError: from any method of a remote store (`GuardedFlows` handles it).
    """

    async def begin_hop(self, key: FlowKey, arrival: HopArrival) -> FlowHop | None:
        """Add a hop to a flow, or begin a flow with its first hop.

        Returns:
            The place of the hop, or None for an ordinary request: the flow is unknown and the
            request has no deadline, or the tenant or the flow has reached its maximum.
        """
        ...

    async def end_hop(self, key: FlowKey, hop: FlowHop, lengths: HopLengths) -> None:
        """Record that the response of a hop has ended.

        A hop of an unknown flow is ignored.
        """
        ...

    async def cancel(self, key: FlowKey, hop: FlowHop) -> bool:
        """End a flow whose first hop was refused, unless another hop has arrived.

        Returns:
            Whether the flow has ended.
        """
        ...

    async def take(self, key: FlowKey, hop: FlowHop) -> tuple[HopRecord, ...] | None:
        """End the flow of a hop, and return its hops in the order of their arrival.

        The result is None if the store does not know the flow.
        """
        ...


@dataclass(slots=True)
class _Flow:
    """A flow of a tenant with its hops."""

    tenant: str
    begun_s: float
    deadline_s: float
    life: int
    hops: list[HopRecord] = field(default_factory=list)


class MemoryFlows:
    """A `FlowStore` in this process, which is the reference for every other implementation.

    Its calls never suspend.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start empty.

        Args:
            clock: a monotonic clock, in seconds.
        """
        self._clock = clock
        self._flows: dict[str, _Flow] = {}  # by the text of the key
        self._tenants: dict[str, int] = {}  # number of flows, without zeros
        self._expiries = Expiries()

    def __contains__(self, key: FlowKey) -> bool:
        """Return whether a flow is known."""
        self._prune()
        return key.text in self._flows

    async def begin_hop(self, key: FlowKey, arrival: HopArrival) -> FlowHop | None:
        """Add a hop to a flow, as `FlowStore.begin_hop` describes."""
        now_s = self._prune()
        arrived_s = now_s - arrival.ago_s
        flow = self._flows.get(key.text)
        if flow is None:
            if arrival.deadline_s is None or self._tenants.get(key.tenant, 0) >= MOST_FLOWS:
                return None
            flow = _Flow(key.tenant, arrived_s, arrival.deadline_s, round(now_s * 1e6))
            self._add(key, flow)
        if len(flow.hops) >= MOST_FLOW_HOPS:
            return None
        flow.hops.append(HopRecord(arrival.kind, max(arrived_s - flow.begun_s, 0.0)))
        return FlowHop(len(flow.hops), now_s - flow.begun_s, flow.deadline_s, flow.life)

    async def end_hop(self, key: FlowKey, hop: FlowHop, lengths: HopLengths) -> None:
        """Record the end of a hop, as `FlowStore.end_hop` describes."""
        now_s = self._prune()
        flow = self._found(key, hop)
        if flow is not None:
            index = hop.number - 1
            ended_s = now_s - flow.begun_s
            flow.hops[index] = replace(
                flow.hops[index],
                ended_s=ended_s,
                prompt_tokens=lengths.prompt_tokens,
                output_tokens=lengths.output_tokens,
                service_s=lengths.service_s,
            )

    async def cancel(self, key: FlowKey, hop: FlowHop) -> bool:
        """End a flow, as `FlowStore.cancel` describes."""
        self._prune()
        flow = self._found(key, hop)
        if flow is None or len(flow.hops) > 1:
            return False
        self._drop(key.text)
        return True

    async def take(self, key: FlowKey, hop: FlowHop) -> tuple[HopRecord, ...] | None:
        """End a flow and return its hops, as `FlowStore.take` describes."""
        self._prune()
        flow = self._found(key, hop)
        if flow is None:
            return None
        self._drop(key.text)
        return tuple(flow.hops)

    def adopt(self, key: FlowKey, kind: HopKind, hop: FlowHop) -> None:
        """Add a hop that another store has placed, with its flow if that is new here.

        Hops that only the other store knows are added without an end.
        """
        now_s = self._prune()
        flow = self._found(key, hop)
        if flow is None:
            self._drop(key.text)
            flow = _Flow(key.tenant, now_s - hop.age_s, hop.deadline_s, hop.life)
            self._add(key, flow)
        while len(flow.hops) < hop.number:
            flow.hops.append(HopRecord(kind, hop.age_s))

    def _found(self, key: FlowKey, hop: FlowHop) -> _Flow | None:
        """Return the flow of a hop, or None if the key is unknown or names another flow."""
        flow = self._flows.get(key.text)
        return flow if flow is not None and flow.life == hop.life else None

    def _add(self, key: FlowKey, flow: _Flow) -> None:
        self._flows[key.text] = flow
        self._tenants[key.tenant] = self._tenants.get(key.tenant, 0) + 1
        self._expiries.put(key.text, flow.begun_s + flow.deadline_s + KEEP_S)

    def _drop(self, text: str) -> None:
        flow = self._flows.pop(text, None)
        if flow is None:
            return
        self._expiries.drop(text)
        self._tenants[flow.tenant] -= 1
        if not self._tenants[flow.tenant]:
            del self._tenants[flow.tenant]

    def _prune(self) -> float:
        """Forget flows that have expired, and return the time in seconds."""
        now_s = self._clock()
        for text in self._expiries.pop_due(now_s):
            self._drop(text)
        return now_s
