"""`fair`, the default: priority classes, tenant shares, deadlines and bounded waits."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import Final

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


# --- The tenants of one priority class, served in proportion to their shares ----------------------
#
# The method is start-time fair queueing (Goyal, Vin, Cheng: SIGCOMM 1996). Virtual time counts the
# work that a share of 1 has received. Each tenant has a start tag, its position in virtual time.
# Each served request moves the tag by work / share:
#
#     start = max(virtual time, last start + last work / share)     when the tenant begins to wait
#     virtual time = the smallest start of the waiting tenants
#
# Tenants whose starts are within a lag of the smallest start are even. The earliest deadline among
# them is next. Without a lag, a tenant's second request would wait for the first requests of all
# other tenants, however much later these arrived. Deadlines keep queues short, so such a wait could
# be most of a request's time in the queue.
#
# A tenant gains no credit by its absence, and a tenant that returns soon still pays for its earlier
# work. While two tenants both wait,
#
#     |served_a / share_a - served_b / share_b| <= lag + largest_a / share_a + largest_b / share_b,
#
# where `largest` is the work of a tenant's largest request. An empty class forgets all past
# service, because the pool had capacity for all tenants.


LEAST_WORK_S: Final = 1e-3
"""Minimum work of a request. All requests count alike if their work is unknown."""

LAG_S: Final = 0.5
"""Maximum difference in service, in seconds of work per share, at which tenants are even. The
earliest deadline among even tenants is next. With strict turns, new requests overtake a second
request with a promised time. Clients then kept 92 to 97% of the promises, and 97 to 99% with the
lag (simulated, tests/policies/overload_servers.py, 2026-11-21)."""

MOST_ABSENT_TENANTS: Final = 4096
"""Maximum number of remembered tenants without waiting requests, about half a megabyte. The tenants
nearest to even are forgotten first."""


@dataclass(slots=True)
class _Tenant:
    """A tenant's start tag, its share, and its waiting requests by deadline."""

    start: float
    share: float
    queue: PrefixSumQueue = field(default_factory=PrefixSumQueue)


class FairClass:
    """The waiting requests of one class."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._absent_starts: dict[str, float] = {}  # start tags of tenants without waiting requests
        self._virtual = 0.0

    def __bool__(self) -> bool:
        """Return whether a request waits."""
        return bool(self._tenants)

    @property
    def work_s(self) -> float:
        """Work of all waiting requests, in seconds of the pool."""
        return sum(tenant.queue.work_s for tenant in self._tenants.values())

    def push(self, ticket: Ticket) -> None:
        """Add a request."""
        tenant = self._tenants.get(ticket.tenant)
        if tenant is None:
            start = self._new_start(ticket.tenant)
            self._absent_starts.pop(ticket.tenant, None)
            tenant = self._tenants[ticket.tenant] = _Tenant(start, ticket.share)
        tenant.share = ticket.share
        tenant.queue.insert(_place(ticket), ticket.work_s)

    def choose(self) -> int:
        """Return the key of the next request: the earliest deadline among even tenants."""
        even = self._least_start() + LAG_S
        tenants = self._tenants.values()
        return min(tenant.queue.first() for tenant in tenants if tenant.start <= even)[1]

    def remove(self, ticket: Ticket) -> None:
        """Remove a request that was not served."""
        tenant = self._tenants[ticket.tenant]
        tenant.queue.remove(_place(ticket))
        if not tenant.queue:
            del self._tenants[ticket.tenant]
            self._absent_starts[ticket.tenant] = tenant.start
            if len(self._absent_starts) > MOST_ABSENT_TENANTS:
                by_start = sorted(self._absent_starts.items(), key=lambda item: item[1])
                self._absent_starts = dict(by_start[len(by_start) // 2 :])

    def serve(self, ticket: Ticket) -> None:
        """Remove a request that is served now, and charge its tenant."""
        self._virtual = self._least_start()
        tenant = self._tenants[ticket.tenant]
        tenant.start += max(ticket.work_s, LEAST_WORK_S) / ticket.share
        self.remove(ticket)

    def ahead_s(self, ticket: Ticket) -> float:
        """Return the work that the pool would serve before a ticket.

        The result follows generalised processor sharing. Each other tenant is served in proportion
        to its share while the tenant's earlier deadlines and the ticket itself are served. Requests
        with earlier deadlines get a lag more, and requests with later deadlines a lag less. So
        another tenant's backlog delays a new request by at most a lag and the time of its own
        service.
        """
        own, before_s = self._tenants.get(ticket.tenant), 0.0
        start = self._new_start(ticket.tenant)
        place, others_s = _place(ticket), 0.0
        if own is not None:
            start, before_s = own.start, own.queue.work_before(place)
        until = start + (before_s + max(ticket.work_s, LEAST_WORK_S)) / ticket.share
        for name, tenant in self._tenants.items():
            gap = until - tenant.start
            if name == ticket.tenant or gap <= -LAG_S:
                continue
            later_s = min(tenant.queue.work_s, max(gap - LAG_S, 0.0) * tenant.share)
            sooner_s = min(tenant.queue.work_before(place), (gap + LAG_S) * tenant.share)
            others_s += max(sooner_s, later_s)
        return before_s + others_s

    def _least_start(self) -> float:
        return min(tenant.start for tenant in self._tenants.values())

    def _new_start(self, name: str) -> float:
        """Return the start tag of a tenant that begins to wait."""
        return max(self._virtual, self._absent_starts.get(name, 0.0))


def _place(ticket: Ticket) -> Place:
    return ticket.deadline_s, ticket.key
