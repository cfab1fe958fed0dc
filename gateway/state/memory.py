"""The store of a node that stands alone: dictionaries. No call ever suspends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gateway.state.store import WorkerView
from policies.types import WorkerLoad


@dataclass(slots=True)
class _Lease:
    worker_id: str
    tokens: int
    expires_s: float


class MemoryStore:
    """Implements `Store` in this process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start empty; `clock` returns seconds that never go back."""
        self._clock = clock
        self._loads: dict[str, tuple[WorkerLoad, float]] = {}
        self._leases: dict[str, _Lease] = {}

    async def publish(self, worker_id: str, load: WorkerLoad) -> None:
        """See `Store`."""
        self._loads[worker_id] = (load, self._clock())

    async def withdraw(self, worker_id: str) -> None:
        """See `Store`."""
        self._loads.pop(worker_id, None)

    async def snapshot(self) -> list[WorkerView]:
        """See `Store`."""
        now_s = self._clock()
        self._prune(now_s)
        leased: dict[str, int] = {}
        for lease in self._leases.values():
            leased[lease.worker_id] = leased.get(lease.worker_id, 0) + lease.tokens
        return [
            WorkerView(worker_id, load, now_s - then_s, leased.get(worker_id, 0))
            for worker_id, (load, then_s) in sorted(self._loads.items())
        ]

    async def reserve(self, worker_id: str, request_id: str, tokens: int, ttl_s: float) -> None:
        """See `Store`."""
        self._leases[request_id] = _Lease(worker_id, tokens, self._clock() + ttl_s)

    async def renew(self, request_ids: Iterable[str], ttl_s: float) -> None:
        """See `Store`."""
        now_s = self._clock()
        self._prune(now_s)
        for request_id in request_ids:
            lease = self._leases.get(request_id)
            if lease is not None:
                lease.expires_s = now_s + ttl_s

    async def release(self, request_id: str) -> None:
        """See `Store`."""
        self._leases.pop(request_id, None)

    async def close(self) -> None:
        """See `Store`."""

    def _prune(self, now_s: float) -> None:
        expired = [key for key, lease in self._leases.items() if lease.expires_s <= now_s]
        for key in expired:
            del self._leases[key]
