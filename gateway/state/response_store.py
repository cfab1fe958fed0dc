"""The store of responses, for requests that continue or retrieve an earlier response.

A value belongs to a tenant, and only this tenant can read or delete the value. Values end after a
fixed time. The store has a capacity in bytes that all tenants share. If the values exceed the
capacity, the tenant with the most bytes loses its oldest values. A tenant with many values
therefore cannot displace the values of a tenant with few. Every store passes the tests in
`tests/gateway/test_response_store.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class StoreUsage(NamedTuple):
    """The values of a store that have not ended, and their bytes."""

    values: int
    bytes: int


class ResponseStore(Protocol):
    """Values of tenants by response id.

    Ids are unique among all tenants.

    Attributes:
        evicted: number of values that this object's calls of `put` displaced.

    Raises:
        StoreError: from any method of a remote store.
    """

    @property
    def evicted(self) -> int: ...

    async def put(self, tenant: str, response_id: str, value: bytes) -> bool:
        """Store a value, and return whether it has a place.

        A value gets no place if it exceeds the capacity, or if its tenant has the most bytes and
        the value is the tenant's only one.
        """
        ...

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        """Return a value of the tenant, or None if the store does not have it."""
        ...

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a value of the tenant, and return whether the store had it."""
        ...

    async def usage(self) -> StoreUsage:
        """Return the usage of the store by all tenants and nodes."""
        ...

    async def close(self) -> None:
        """Close all connections.

        The method is idempotent.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Value:
    """A value, its owner, and the time at which it ends."""

    tenant: str
    content: bytes
    end_s: float


class MemoryResponseStore:
    """A `ResponseStore` in this process, whose calls never suspend.

    The store is the reference for every other implementation.
    """

    def __init__(
        self, capacity_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start empty.

        Args:
            capacity_bytes: the bytes of all values together.
            ttl_s: seconds after which a value ends.
            clock: a monotonic clock, in seconds.
        """
        self.evicted = 0
        self._capacity_bytes = capacity_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._values: dict[str, _Value] = {}  # the oldest first, which also ends first
        self._ids: dict[str, dict[str, None]] = {}  # of each tenant with values, the oldest first
        self._tenant_bytes: dict[str, int] = {}

    async def put(self, tenant: str, response_id: str, value: bytes) -> bool:
        """Store a value, as `ResponseStore.put` describes."""
        now_s = self._clock()
        self._prune(now_s)
        self._drop(response_id)
        if len(value) > self._capacity_bytes:
            return False
        self._values[response_id] = _Value(tenant, value, now_s + self._ttl_s)
        self._ids.setdefault(tenant, {})[response_id] = None
        self._tenant_bytes[tenant] = self._tenant_bytes.get(tenant, 0) + len(value)
        while sum(self._tenant_bytes.values()) > self._capacity_bytes:
            largest = max(self._tenant_bytes, key=lambda name: (self._tenant_bytes[name], name))
            displaced = next(iter(self._ids[largest]))
            self._drop(displaced)
            self.evicted += displaced != response_id
        return response_id in self._values

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        """Return a value, as `ResponseStore.get` describes."""
        self._prune(self._clock())
        found = self._values.get(response_id)
        return found.content if found is not None and found.tenant == tenant else None

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a value, as `ResponseStore.delete` describes."""
        found = await self.get(tenant, response_id)
        if found is not None:
            self._drop(response_id)
        return found is not None

    async def usage(self) -> StoreUsage:
        """Return the usage, as `ResponseStore.usage` describes."""
        self._prune(self._clock())
        return StoreUsage(len(self._values), sum(self._tenant_bytes.values()))

    async def close(self) -> None:
        """Do nothing, because the store has no connections."""

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
