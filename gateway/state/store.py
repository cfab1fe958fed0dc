"""The contract of the state store: loads that workers publish, and leases on their capacity.

Time belongs to the store (memory: a clock it is given; Redis: the server's), so that no caller's
clock can disagree with another's. `tests/gateway/test_store.py` holds what every store must do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from policies.types import WorkerLoad


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as the store knows it.

    Attributes:
        load: what it published last.
        age_s: seconds since then.
        leased_tokens: tokens of prompt and output reserved by leases that live.
    """

    worker_id: str
    load: WorkerLoad
    age_s: float
    leased_tokens: int


class Store(Protocol):
    """State shared by the nodes of a pool."""

    async def publish(self, worker_id: str, load: WorkerLoad) -> None:
        """Replace what is known of a worker's load."""
        ...

    async def withdraw(self, worker_id: str) -> None:
        """Forget a worker: it leaves. No-op if it is not known. Its leases stay until released."""
        ...

    async def snapshot(self) -> list[WorkerView]:
        """Return every known worker, sorted by id. What is stale is for the reader to judge."""
        ...

    async def reserve(self, worker_id: str, request_id: str, tokens: int, ttl_s: float) -> None:
        """Lease `tokens` of a worker's capacity to a request; a second call replaces the first.

        The lease ends at `release`, or by itself `ttl_s` seconds from now.
        """
        ...

    async def renew(self, request_ids: Iterable[str], ttl_s: float) -> None:
        """Let living leases of these requests last until `ttl_s` from now; ignore others."""
        ...

    async def release(self, request_id: str) -> None:
        """End a lease. Idempotent."""
        ...

    async def close(self) -> None:
        """Give back connections. Idempotent."""
        ...
