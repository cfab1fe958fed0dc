"""`fair`, the default: priority classes, tenant shares, deadlines and bounded waits."""

from __future__ import annotations

from bisect import insort
from typing import Final

from draftgate.policies.ordering.fair_class import FairClass
from draftgate.policies.ordering.prefix_sum_queue import Place, PrefixSumQueue
from draftgate.policies.ordering.single import fcfs
from draftgate.policies.types import Ticket

STARVATION_S: Final = 30.0
"""Wait in seconds after which a ticket of any class is overdue. People and the timeouts of clients
give up on a first token at about this time. (Chosen. SMG promotes after 5 to 120 s by class.)"""

OVERDUE_EVERY: Final = 4
"""One of this many taken tickets is the oldest overdue ticket. A quarter of the pool keeps old
traffic moving, and three quarters remain for the promised order if every ticket is overdue.
(Chosen, not tuned.)"""

PRESSING_SHARE: Final = 0.5
"""Share of its allowed wait after which a ticket outside the best waiting class is pressing. Half
of the time remains, in which the ticket can be taken as one of `OVERDUE_EVERY`. (Chosen, not
tuned.)"""


class Fair:
    """Order by class, then by tenant shares, then by the deadlines of a tenant's requests.

    Higher-priority requests that arrive later do not make all admitted requests late. While a
    ticket outside the best class is pressing, one of `overdue_every` taken tickets is of its class.
    If several classes have pressing tickets, the class that has been pressing for longest is
    served.

    No ticket starves. A ticket that has waited longer than `starvation_s` is overdue. One of
    `overdue_every` taken tickets is then the oldest overdue ticket instead of a pressing one. So
    the r-th oldest ticket, once overdue, is taken within the next

        overdue_every x r

    tickets, whatever arrives meanwhile. If the pool takes a ticket every s seconds, the wait is
    less than `starvation_s + overdue_every x r x s`.
    """

    name = "fair"

    def __init__(
        self, starvation_s: float = STARVATION_S, overdue_every: int = OVERDUE_EVERY
    ) -> None:
        self._starvation_s = starvation_s
        self._overdue_every = overdue_every
        self._by_arrival = fcfs()
        self._classes: dict[int, FairClass] = {}  # only tenants with waiting tickets
        self._pressing: dict[int, PrefixSumQueue] = {}  # by pressing time
        self._priorities: list[int] = []  # sorted keys of both
        self._passed_over = 0  # tickets taken since the last overdue or pressing ticket

    @property
    def work_s(self) -> float:
        return self._by_arrival.work_s

    def __len__(self) -> int:
        return len(self._by_arrival)

    def push(self, ticket: Ticket) -> None:
        self._by_arrival.push(ticket)
        if ticket.priority not in self._classes:
            self._classes[ticket.priority] = FairClass()
            self._pressing[ticket.priority] = PrefixSumQueue()
            insort(self._priorities, ticket.priority)
        self._pressing[ticket.priority].insert(_pressing_place(ticket), ticket.work_s)
        self._classes[ticket.priority].push(ticket)

    def remove(self, key: int) -> Ticket | None:
        ticket = self._by_arrival.tickets.get(key)
        if ticket is not None:
            self._classes[ticket.priority].remove(ticket)
            self._forget(ticket)
        return ticket

    def choose(self, now_s: float) -> Ticket | None:
        claimant = self._claimant(now_s)
        if claimant is not None and self._passed_over >= self._overdue_every - 1:
            return claimant
        return self._first_of(self._priorities[0]) if self._priorities else None

    def take(self, now_s: float) -> Ticket | None:
        chosen = self.choose(now_s)
        if chosen is None:
            return None
        self._passed_over = 0 if chosen is self._claimant(now_s) else self._passed_over + 1
        self._classes[chosen.priority].serve(chosen)
        self._forget(chosen)
        return chosen

    def ahead_s(self, ticket: Ticket, now_s: float) -> float:
        ahead_s, worse_s = self.class_ahead_s(ticket), 0.0
        for priority in self._priorities:
            if priority < ticket.priority:
                ahead_s += self._classes[priority].work_s
        for priority in self._priorities:
            if priority > ticket.priority:
                place = now_s + ahead_s, ticket.key
                worse_s += self._pressing[priority].work_before(place)
        return ahead_s + min(worse_s, ahead_s / (self._overdue_every - 1))

    def class_ahead_s(self, ticket: Ticket) -> float:
        own = self._classes.get(ticket.priority)
        return 0.0 if own is None else own.ahead_s(ticket)

    def queued_of(self, tenant: str) -> int:
        return self._by_arrival.queued_of(tenant)

    def _first_of(self, priority: int) -> Ticket:
        return self._by_arrival.tickets[self._classes[priority].choose()]

    def _claimant(self, now_s: float) -> Ticket | None:
        """Return the overdue or pressing ticket that is taken once in `overdue_every` times."""
        oldest = self._by_arrival.choose(now_s)
        if oldest is None or now_s - oldest.arrived_s > self._starvation_s:
            return oldest
        firsts = [(self._pressing[level].first()[0], level) for level in self._priorities[1:]]
        since_s, priority = min(firsts, default=(now_s, 0))
        return self._first_of(priority) if since_s < now_s else None

    def _forget(self, ticket: Ticket) -> None:
        """Remove a ticket that has left its class from all other structures."""
        self._by_arrival.remove(ticket.key)
        self._pressing[ticket.priority].remove(_pressing_place(ticket))
        if not self._classes[ticket.priority]:
            del self._classes[ticket.priority], self._pressing[ticket.priority]
            self._priorities.remove(ticket.priority)


def _pressing_place(ticket: Ticket) -> Place:
    allowed_s = max(ticket.deadline_s - ticket.arrived_s, 0.0)
    return ticket.arrived_s + PRESSING_SHARE * allowed_s, ticket.key
