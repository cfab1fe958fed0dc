"""A table of leases by request and by worker, which expire."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from draftgate.gateway.state.expiries import Expiries
from draftgate.gateway.state.values import Lease


class LeaseTable:
    """At most one lease of each request, with its expiry."""

    def __init__(self) -> None:
        self._by_request: dict[str, Lease] = {}
        self._by_worker: defaultdict[str, dict[str, Lease]] = defaultdict(dict)
        self._tokens: defaultdict[str, int] = defaultdict(int)  # by worker
        self._expiries = Expiries()  # by request

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    def get(self, request_id: str) -> Lease | None:
        """Return the lease of a request, or None without a lease."""
        return self._by_request.get(request_id)

    def all(self) -> list[Lease]:
        """Return all leases."""
        return list(self._by_request.values())

    def of_worker(self, worker_id: str) -> Collection[Lease]:
        """Return the leases of a worker."""
        return self._by_worker[worker_id].values() if worker_id in self._by_worker else ()

    def tokens(self, worker_id: str, above: int = -1) -> int:
        """Return the tokens of a worker's leases with numbers above `above`."""
        if above < 0:
            return self._tokens.get(worker_id, 0)
        return sum([lease.tokens for lease in self.of_worker(worker_id) if lease.number > above])

    def put(self, lease: Lease, until_s: float) -> None:
        """Add a lease, which replaces any lease of its request."""
        self.drop(lease.request_id)
        self._by_request[lease.request_id] = lease
        self._by_worker[lease.worker_id][lease.request_id] = lease
        self._tokens[lease.worker_id] += lease.tokens
        self._expiries.put(lease.request_id, until_s)

    def extend(self, request_id: str, until_s: float) -> None:
        """Set the expiry of a lease."""
        self._expiries.put(request_id, until_s)

    def drop(self, request_id: str) -> None:
        """End the lease of a request, if it has one."""
        lease = self._by_request.pop(request_id, None)
        if lease is None:
            return
        self._expiries.drop(request_id)
        self._tokens[lease.worker_id] -= lease.tokens
        leases = self._by_worker[lease.worker_id]
        del leases[request_id]
        if not leases:
            del self._by_worker[lease.worker_id], self._tokens[lease.worker_id]

    def drop_worker(self, worker_id: str) -> None:
        """End all leases of a worker."""
        for lease in tuple(self.of_worker(worker_id)):
            self.drop(lease.request_id)

    def prune(self, now_s: float) -> int:
        """End expired leases, and return their number."""
        expired = self._expiries.pop_due(now_s)
        for request_id in expired:
            self.drop(request_id)
        return len(expired)
