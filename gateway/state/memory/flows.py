"""The flows of tenants in memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from draftgate.gateway.state import commands
from draftgate.gateway.state.expiries import Expiries
from draftgate.gateway.state.store import InMemory
from draftgate.gateway.state.values import KEEP_S, MOST_FLOW_HOPS, MOST_FLOWS, FlowHop, FlowKey
from draftgate.policies.flows.types import HopKind, HopRecord
from draftgate.policies.values import replace


@dataclass(slots=True)
class _Flow:
    """A flow of a tenant with its hops."""

    tenant: str
    begun_s: float
    deadline_s: float
    life: int
    hops: list[HopRecord] = field(default_factory=list)


class MemoryFlows(InMemory):
    """Flows in this process, which are the reference for every other implementation."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start empty.

        Args:
            clock: a monotonic clock, in seconds.
        """
        self._clock = clock
        self._flows: dict[str, _Flow] = {}  # by the text of the key
        self._tenants: dict[str, int] = {}  # number of flows, without zeros
        self._expiries = Expiries()
        self.handlers = {
            commands.BeginHop: self.begin_hop,
            commands.EndHop: self.end_hop,
            commands.CancelFlow: self.cancel,
            commands.TakeFlow: self.take,
        }

    def __contains__(self, key: FlowKey) -> bool:
        """Return whether a flow is known."""
        self._prune()
        return key.text in self._flows

    def begin_hop(self, command: commands.BeginHop) -> FlowHop | None:
        """Add a hop to a flow."""
        key, arrival, now_s = command.key, command.arrival, self._prune()
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

    def end_hop(self, command: commands.EndHop) -> None:
        """Record the end of a hop."""
        now_s, lengths = self._prune(), command.lengths
        flow = self._found(command.key, command.hop)
        if flow is not None:
            index = command.hop.number - 1
            ended_s = now_s - flow.begun_s
            flow.hops[index] = replace(
                flow.hops[index],
                ended_s=ended_s,
                prompt_tokens=lengths.prompt_tokens,
                output_tokens=lengths.output_tokens,
                service_s=lengths.service_s,
            )

    def cancel(self, command: commands.CancelFlow) -> bool:
        """End a flow that has one hop."""
        self._prune()
        flow = self._found(command.key, command.hop)
        if flow is None or len(flow.hops) > 1:
            return False
        self._drop(command.key.text)
        return True

    def take(self, command: commands.TakeFlow) -> tuple[HopRecord, ...] | None:
        """End a flow and return its hops."""
        self._prune()
        flow = self._found(command.key, command.hop)
        if flow is None:
            return None
        self._drop(command.key.text)
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
