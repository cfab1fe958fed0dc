"""Those first who had their turn already: their workers broke, and they go on elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from draftgate.policies.ordering.ticket import Ticket
from draftgate.policies.protocols import OrderingPolicy


class ReturningFirst:
    """Two lines of the same policy: who returns (`Ticket.returning`) comes before all others.

    What such a request took was its own until the worker broke, and its client has half of an
    answer. It was charged when it had its turn: among newcomers its tenant pays for it once.
    """

    def __init__(self, build: Callable[[], OrderingPolicy]) -> None:
        """Begin empty.

        Args:
            build: makes an empty line.
        """
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
        (self._returning if ticket.returning else self._others).push(ticket)

    def remove(self, key: int) -> Ticket | None:
        return self._returning.remove(key) or self._others.remove(key)

    def choose(self, now_s: float) -> Ticket | None:
        return self._first.choose(now_s)

    def take(self, now_s: float) -> Ticket | None:
        return self._first.take(now_s)

    def ahead_s(self, ticket: Ticket, now_s: float) -> float:
        if ticket.returning:
            return self._returning.ahead_s(ticket, now_s)
        return self._returning.work_s + self._others.ahead_s(ticket, now_s)

    def class_ahead_s(self, ticket: Ticket) -> float:
        return (self._returning if ticket.returning else self._others).class_ahead_s(ticket)

    def queued_of(self, tenant: str) -> int:
        return self._returning.queued_of(tenant) + self._others.queued_of(tenant)

    @property
    def _first(self) -> OrderingPolicy:
        """The line that is served now."""
        return self._returning if len(self._returning) else self._others
