"""A queue that serves requests first if they had their turn but got no lease."""

from __future__ import annotations

from collections.abc import Callable

from draftgate.policies.protocols import OrderingPolicy
from draftgate.policies.types import Ticket


class ReturningFirst:
    """Two queues of one policy, in which returning tickets (`Ticket.returning`) are first.

    Such a request had its turn, but other gateways had filled the chosen workers. The tenant paid
    for the request when it was first taken. If the request waited among new requests, the tenant
    would be charged again. Requests that lost their worker do not use this queue
    (`gateway.dispatch.claims`).
    """

    def __init__(self, build: Callable[[], OrderingPolicy]) -> None:
        self._returning, self._others = build(), build()

    @property
    def name(self) -> str:
        return self._others.name

    @property
    def work_s(self) -> float:
        return self._returning.work_s + self._others.work_s

    def __len__(self) -> int:
        return len(self._returning) + len(self._others)

    def push(self, ticket: Ticket) -> None:
        self._queue_of(ticket).push(ticket)

    def remove(self, key: int) -> Ticket | None:
        return self._returning.remove(key) or self._others.remove(key)

    def choose(self, now_s: float) -> Ticket | None:
        return self._returning.choose(now_s) or self._others.choose(now_s)

    def take(self, now_s: float) -> Ticket | None:
        return self._returning.take(now_s) or self._others.take(now_s)

    def ahead_s(self, ticket: Ticket, now_s: float) -> float:
        ahead_s = self._queue_of(ticket).ahead_s(ticket, now_s)
        return ahead_s if ticket.returning else self._returning.work_s + ahead_s

    def class_ahead_s(self, ticket: Ticket) -> float:
        return self._queue_of(ticket).class_ahead_s(ticket)

    def queued_of(self, tenant: str) -> int:
        return self._returning.queued_of(tenant) + self._others.queued_of(tenant)

    def _queue_of(self, ticket: Ticket) -> OrderingPolicy:
        return self._returning if ticket.returning else self._others
