"""One line for all: the baselines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from draftgate.policies.ordering.prefix_sum_queue import Place, PrefixSumQueue
from draftgate.policies.ordering.ticket import Ticket


class SingleQueue:
    """Everybody in one line, by one instant of their tickets; classes and tenants do not count."""

    def __init__(self, name: str, instant: Callable[[Ticket], float]) -> None:
        """Begin empty, ordered by what `instant` says of a ticket."""
        self._name = name
        self._instant = instant
        self._tickets: dict[int, Ticket] = {}
        self._tenants = Counter[str]()
        self._line = PrefixSumQueue()

    @property
    def name(self) -> str:
        return self._name

    @property
    def work_s(self) -> float:
        return self._line.work_s

    def __len__(self) -> int:
        return len(self._tickets)

    def push(self, ticket: Ticket) -> None:
        if ticket.key in self._tickets:
            raise ValueError(f"{ticket.key} waits already")
        self._tickets[ticket.key] = ticket
        self._tenants[ticket.tenant] += 1
        self._line.add(self._place(ticket), ticket.work_s)

    def remove(self, key: int) -> Ticket | None:
        ticket = self._tickets.pop(key, None)
        if ticket is not None:
            self._line.discard(self._place(ticket))
            self._tenants[ticket.tenant] -= 1
            if not self._tenants[ticket.tenant]:
                del self._tenants[ticket.tenant]
        return ticket

    def choose(self, now_s: float) -> Ticket | None:
        return self._tickets[self._line.first()[1]] if self._tickets else None

    def take(self, now_s: float) -> Ticket | None:
        chosen = self.choose(now_s)
        return None if chosen is None else self.remove(chosen.key)

    def ahead_s(self, ticket: Ticket, now_s: float) -> float:
        return self._line.before(self._place(ticket))

    def class_ahead_s(self, ticket: Ticket) -> float:
        return self._line.before(self._place(ticket))

    def queued_of(self, tenant: str) -> int:
        return self._tenants[tenant]

    def _place(self, ticket: Ticket) -> Place:
        return self._instant(ticket), ticket.key


def fcfs() -> SingleQueue:
    """First come, first served."""
    return SingleQueue("fcfs", lambda ticket: ticket.arrived_s)


def edf() -> SingleQueue:
    """Earliest deadline first: best where all can be met, useless where not (Liu, Layland 1973)."""
    return SingleQueue("edf", lambda ticket: ticket.deadline_s)
