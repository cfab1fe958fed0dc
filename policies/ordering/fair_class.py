"""Tenants of one class of priority, served by their shares.

Start-time fair queueing (Goyal, Vin, Cheng: SIGCOMM 1996). Virtual time counts the work that a
share of 1 was served. A tenant has a start tag, where its service has come to, and taking a request
moves it by work / share:

    start = max(virtual time, start of its last + work of its last / share)   when it begins to wait
    virtual time = the least start of those who wait

Tenants whose start is less than a lag behind the least are even; of these, the earliest deadline is
next. (With no lag, a tenant's second request waits for everybody's first ones, however much later
these came: queues are short where deadlines are promised.) So whoever was away gains no credit, who
comes back at once pays for what it took, and of two tenants that both wait for the whole of any
interval

    |served_a / share_a - served_b / share_b| <= lag + largest_a / share_a + largest_b / share_b,

their largest requests, however long it is. A class in which nobody waits any more is forgotten,
with all that was served: there was room for everybody.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from draftgate.policies.ordering.prefix_sum_queue import Place, PrefixSumQueue
from draftgate.policies.ordering.ticket import Ticket

LEAST_WORK_S: Final = 1e-3
"""A request counts as so much at least: where nobody knows what requests take, all count alike."""

LAG_S: Final = 0.5
"""Tenants whose service is no further apart are even, and the earliest deadline among them is next.
Strict turns let newcomers overtake a second request that was promised its time: 92 to 97% of the
promises were kept, with this 97 to 99% (simulated, tests/policies/overload.py, 2026-11-21)."""

MOST_DEBTORS: Final = 4096
"""Tenants that do not wait and whose last service is remembered, half a megabyte or so. Beyond it
those who are nearest to being even are forgiven."""


@dataclass(slots=True)
class _Tenant:
    """Who waits of a tenant, by deadline, and where its service has come to."""

    start: float
    share: float
    line: PrefixSumQueue = field(default_factory=PrefixSumQueue)


class FairClass:
    """Who waits of one class."""

    def __init__(self) -> None:
        """Begin empty."""
        self._tenants: dict[str, _Tenant] = {}
        self._debtors: dict[str, float] = {}  # where those have come to who do not wait
        self._virtual = 0.0

    def __bool__(self) -> bool:
        """Return whether anybody waits."""
        return bool(self._tenants)

    @property
    def work_s(self) -> float:
        """Seconds of the pool that all who wait take."""
        return sum(tenant.line.work_s for tenant in self._tenants.values())

    def push(self, ticket: Ticket) -> None:
        """Let a request wait."""
        tenant = self._tenants.get(ticket.tenant)
        if tenant is None:
            start = self._start(ticket.tenant)
            self._debtors.pop(ticket.tenant, None)
            tenant = self._tenants[ticket.tenant] = _Tenant(start, ticket.share)
        tenant.share = ticket.share
        tenant.line.add(_place(ticket), ticket.work_s)

    def choose(self) -> int:
        """Return the key of who is next: the earliest deadline of the tenants who are even."""
        even = self._furthest_behind() + LAG_S
        tenants = self._tenants.values()
        return min(tenant.line.first() for tenant in tenants if tenant.start <= even)[1]

    def remove(self, ticket: Ticket) -> None:
        """Take out a request that was not served."""
        tenant = self._tenants[ticket.tenant]
        tenant.line.discard(_place(ticket))
        if not tenant.line:
            del self._tenants[ticket.tenant]
            self._debtors[ticket.tenant] = tenant.start
            if len(self._debtors) > MOST_DEBTORS:
                self._forgive()

    def serve(self, ticket: Ticket) -> None:
        """Take out a request that is served now, and charge its tenant."""
        self._virtual = self._furthest_behind()
        tenant = self._tenants[ticket.tenant]
        tenant.start += max(ticket.work_s, LEAST_WORK_S) / ticket.share
        self.remove(ticket)

    def ahead_s(self, ticket: Ticket) -> float:
        """Return the work that would be served before a ticket.

        By generalised processor sharing: until its tenant has been served what waits of it with
        earlier deadlines, and the ticket itself, each other tenant is served as much by its share;
        what has an earlier deadline a lag further, what has a later one a lag less. So no backlog
        of another, however long, delays a newcomer by more than a lag and its own service at its
        share.
        """
        own, before_s = self._tenants.get(ticket.tenant), 0.0
        start = self._start(ticket.tenant)
        if own is not None:
            start, before_s = own.start, own.line.before(_place(ticket))
        until = start + (before_s + max(ticket.work_s, LEAST_WORK_S)) / ticket.share
        place, others_s = _place(ticket), 0.0
        for name, tenant in self._tenants.items():
            gap = until - tenant.start
            if name == ticket.tenant or gap <= -LAG_S:
                continue
            later_s = min(tenant.line.work_s, max(gap - LAG_S, 0.0) * tenant.share)
            sooner_s = min(tenant.line.before(place), (gap + LAG_S) * tenant.share)
            others_s += max(sooner_s, later_s)
        return before_s + others_s

    def _furthest_behind(self) -> float:
        """Return where the tenant has come to that is furthest behind of those who wait."""
        return min(tenant.start for tenant in self._tenants.values())

    def _start(self, name: str) -> float:
        """Return where a tenant begins that does not wait."""
        return max(self._virtual, self._debtors.get(name, 0.0))

    def _forgive(self) -> None:
        """Forget the half of the debtors that is nearest to being even."""
        by_debt = sorted(self._debtors.items(), key=lambda item: item[1])
        self._debtors = dict(by_debt[len(by_debt) // 2 :])


def _place(ticket: Ticket) -> Place:
    return ticket.deadline_s, ticket.key
