"""Stored responses in memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from draftgate.gateway.state.commands import DeleteResponse, GetResponse, PutResponse, ReadUsage
from draftgate.gateway.state.store import InMemory
from draftgate.gateway.state.values import PutResult, StoreUsage


@dataclass(frozen=True, slots=True)
class _Value:
    """A value, its owner, and the time at which it ends."""

    tenant: str
    content: bytes
    end_s: float


class MemoryResponses(InMemory):
    """Responses in this process, which are the reference for every other implementation."""

    def __init__(
        self, capacity_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start empty.

        Args:
            capacity_bytes: the bytes of all values together.
            ttl_s: seconds after which a value ends.
            clock: a monotonic clock, in seconds.
        """
        self._capacity_bytes = capacity_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._values: dict[str, _Value] = {}  # the oldest first, which also ends first
        self._ids: dict[str, dict[str, None]] = {}  # of each tenant with values, the oldest first
        self._tenant_bytes: dict[str, int] = {}
        self.handlers = {
            PutResponse: self.put,
            GetResponse: self.get,
            DeleteResponse: self.delete,
            ReadUsage: self.usage,
        }

    def put(self, command: PutResponse) -> PutResult:
        """Store a value."""
        tenant, response_id, value = command.tenant, command.response_id, command.value
        now_s, evicted = self._clock(), 0
        self._prune(now_s)
        self._drop(response_id)
        if len(value) > self._capacity_bytes:
            return PutResult(kept=False, evicted=0)
        self._values[response_id] = _Value(tenant, value, now_s + self._ttl_s)
        self._ids.setdefault(tenant, {})[response_id] = None
        self._tenant_bytes[tenant] = self._tenant_bytes.get(tenant, 0) + len(value)
        while sum(self._tenant_bytes.values()) > self._capacity_bytes:
            largest = max(self._tenant_bytes, key=lambda name: (self._tenant_bytes[name], name))
            displaced = next(iter(self._ids[largest]))
            self._drop(displaced)
            evicted += displaced != response_id
        return PutResult(response_id in self._values, evicted)

    def get(self, command: GetResponse | DeleteResponse) -> bytes | None:
        """Return a value of the tenant."""
        self._prune(self._clock())
        found = self._values.get(command.response_id)
        return found.content if found is not None and found.tenant == command.tenant else None

    def delete(self, command: DeleteResponse) -> bool:
        """Delete a value of the tenant."""
        found = self.get(command)
        if found is not None:
            self._drop(command.response_id)
        return found is not None

    def usage(self, _command: ReadUsage) -> StoreUsage:
        """Return the usage by all tenants."""
        self._prune(self._clock())
        return StoreUsage(len(self._values), sum(self._tenant_bytes.values()))

    def _drop(self, response_id: str) -> None:
        value = self._values.pop(response_id, None)
        if value is None:
            return
        del self._ids[value.tenant][response_id]
        self._tenant_bytes[value.tenant] -= len(value.content)
        if not self._ids[value.tenant]:
            del self._ids[value.tenant], self._tenant_bytes[value.tenant]

    def _prune(self, now_s: float) -> None:
        """Drop the values that have ended."""
        while self._values:
            response_id, oldest = next(iter(self._values.items()))
            if oldest.end_s > now_s:
                return
            self._drop(response_id)
