"""Classes, tenants, deadlines, and a bound for all: the order by default."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from typing import Final

from draftgate.policies.ordering.fair_class import FairClass
from draftgate.policies.ordering.prefix_sum_queue import Place, PrefixSumQueue
from draftgate.policies.ordering.ticket import Ticket

STARVATION_S: Final = 30.0
"""Who has waited longer is overdue, of whatever class: about when people and clients' timeouts give
up on a first token. (Chosen; SMG promotes after 5 to 120 s by class.)"""

OVERDUE_EVERY: Final = 4
"""One taking in so many is for who is overdue longest. A quarter of the pool keeps old traffic
moving, and leaves three to the order that was promised when all of the bulk is overdue.
(Chosen.)"""

PRESSING_SHARE: Final = 0.5
"""Who has waited for this share of what its deadline allows, and is not of the best class that
waits, is pressing: there is as much left to reach it, one taking in so many at a time. (Chosen.)"""


class Fair:
    """Lower classes first; in a class tenants by their shares; in a tenant the earliest deadline.

    Better classes that come later do not make all late who were let in before them: while one of
    another class than the best that waits has waited half of what its deadline allows, one taking
    in `overdue_every` is of its class, that of the longest such if there are several.

    Nobody starves: a ticket that has waited longer than `starvation_s` is overdue, and if the r-th
    of those that wait, by arrival, is overdue, then it is taken within the next

        overdue_every x r

    takings, whatever comes in the meantime: one in `overdue_every` is for who is overdue longest
    (then nobody who presses), and nobody who comes later is that before it. With takings every s
    seconds it waits less than `starvation_s + overdue_every x r x s`.
    """

    def __init__(
        self, starvation_s: float = STARVATION_S, overdue_every: int = OVERDUE_EVERY
    ) -> None:
        """Begin empty."""
        self._starvation_s = starvation_s
        self._overdue_every = overdue_every
        self._tickets: dict[int, Ticket] = {}
        self._tenants = Counter[str]()
        self._arrivals = PrefixSumQueue()
        self._classes: dict[int, FairClass] = {}  # those in which somebody waits
        self._pressing: dict[int, PrefixSumQueue] = {}  # of each, by when they are pressing
        self._priorities: list[int] = []  # their keys, sorted
        self._passed_over = 0  # takings since one was for who is overdue longest, or presses

    @property
    def name(self) -> str:
        return "fair"

    @property
    def work_s(self) -> float:
        return self._arrivals.work_s

    def __len__(self) -> int:
        return len(self._tickets)

    def push(self, ticket: Ticket) -> None:
        if ticket.key in self._tickets:
            raise ValueError(f"{ticket.key} waits already")
        self._tickets[ticket.key] = ticket
        self._tenants[ticket.tenant] += 1
        self._arrivals.add((ticket.arrived_s, ticket.key), ticket.work_s)
        if ticket.priority not in self._classes:
            self._classes[ticket.priority] = FairClass()
            self._pressing[ticket.priority] = PrefixSumQueue()
            insort(self._priorities, ticket.priority)
        self._pressing[ticket.priority].add(_pressing_place(ticket), ticket.work_s)
        self._classes[ticket.priority].push(ticket)

    def remove(self, key: int) -> Ticket | None:
        ticket = self._tickets.get(key)
        if ticket is not None:
            self._classes[ticket.priority].remove(ticket)
            self._forget(ticket)
        return ticket

    def choose(self, now_s: float) -> Ticket | None:
        if not self._tickets:
            return None
        claimant = self._claimant(now_s)
        if claimant is not None and self._passed_over >= self._overdue_every - 1:
            return claimant
        return self._in_turn(self._priorities[0])

    def take(self, now_s: float) -> Ticket | None:
        chosen = self.choose(now_s)
        if chosen is None:
            return None
        self._passed_over = 0 if chosen is self._claimant(now_s) else self._passed_over + 1
        self._classes[chosen.priority].serve(chosen)
        self._forget(chosen)
        return chosen

    def ahead_s(self, ticket: Ticket, now_s: float) -> float:
        ahead_s, behind_s = self.class_ahead_s(ticket), 0.0
        for priority in self._priorities:
            if priority < ticket.priority:
                ahead_s += self._classes[priority].work_s
        for priority in self._priorities:
            if priority > ticket.priority:
                behind_s += self._pressing[priority].before((now_s + ahead_s, ticket.key))
        return ahead_s + min(behind_s, ahead_s / (self._overdue_every - 1))

    def class_ahead_s(self, ticket: Ticket) -> float:
        own = self._classes.get(ticket.priority)
        return 0.0 if own is None else own.ahead_s(ticket)

    def queued_of(self, tenant: str) -> int:
        return self._tenants[tenant]

    def _in_turn(self, priority: int) -> Ticket:
        """Return who is next of a class; somebody of it must wait."""
        return self._tickets[self._classes[priority].choose()]

    def _claimant(self, now_s: float) -> Ticket | None:
        """Return for whom one taking in so many is; somebody must wait."""
        oldest = self._tickets[self._arrivals.first()[1]]
        if now_s - oldest.arrived_s > self._starvation_s:
            return oldest
        firsts = [(self._pressing[level].first()[0], level) for level in self._priorities[1:]]
        since_s, priority = min(firsts, default=(now_s, 0))
        return self._in_turn(priority) if since_s < now_s else None

    def _forget(self, ticket: Ticket) -> None:
        """Take a ticket that left its class out of all else."""
        del self._tickets[ticket.key]
        self._arrivals.discard((ticket.arrived_s, ticket.key))
        self._pressing[ticket.priority].discard(_pressing_place(ticket))
        self._tenants[ticket.tenant] -= 1
        if not self._tenants[ticket.tenant]:
            del self._tenants[ticket.tenant]
        if not self._classes[ticket.priority]:
            del self._classes[ticket.priority], self._pressing[ticket.priority]
            self._priorities.remove(ticket.priority)


def _pressing_place(ticket: Ticket) -> Place:
    allowed_s = max(ticket.deadline_s - ticket.arrived_s, 0.0)
    return ticket.arrived_s + PRESSING_SHARE * allowed_s, ticket.key
