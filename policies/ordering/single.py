"""`fcfs` and `edf`: a single queue, sorted by one time of each ticket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from draftgate.policies.ordering.prefix_sum_queue import Place, PrefixSumQueue
from draftgate.policies.protocols import OrderingPolicy
from draftgate.policies.types import Ticket


class SingleQueue:
    """A queue of all tickets that ignores classes and tenants.

    Tickets are sorted by `time_of`.

    Attributes:
        tickets: waiting tickets by key.
    """

    def __init__(self, name: str, time_of: Callable[[Ticket], float]) -> None:
        self.name = name
        self.tickets: dict[int, Ticket] = {}
        self._time_of = time_of
        self._tenants = Counter[str]()
        self._queue = PrefixSumQueue()

    @property
    def work_s(self) -> float:
        return self._queue.work_s

    def __len__(self) -> int:
        return len(self.tickets)

    def push(self, ticket: Ticket) -> None:
        if ticket.key in self.tickets:
            raise ValueError(f"{ticket.key} is already waiting")
        self.tickets[ticket.key] = ticket
        self._tenants[ticket.tenant] += 1
        self._queue.insert(self._place(ticket), ticket.work_s)

    def remove(self, key: int) -> Ticket | None:
        ticket = self.tickets.pop(key, None)
        if ticket is not None:
            self._queue.remove(self._place(ticket))
            self._tenants[ticket.tenant] -= 1
            if not self._tenants[ticket.tenant]:
                del self._tenants[ticket.tenant]
        return ticket

    def choose(self, now_s: float) -> Ticket | None:
        return self.tickets[self._queue.first()[1]] if self.tickets else None

    def take(self, now_s: float) -> Ticket | None:
        chosen = self.choose(now_s)
        return None if chosen is None else self.remove(chosen.key)

    def ahead_s(self, ticket: Ticket, now_s: float) -> float:
        return self.class_ahead_s(ticket)

    def class_ahead_s(self, ticket: Ticket) -> float:
        return self._queue.work_before(self._place(ticket))

    def queued_of(self, tenant: str) -> int:
        return self._tenants[tenant]

    def _place(self, ticket: Ticket) -> Place:
        return self._time_of(ticket), ticket.key


def fcfs() -> SingleQueue:
    """Return an empty queue that serves tickets in the order of arrival."""
    return SingleQueue("fcfs", lambda ticket: ticket.arrived_s)


def edf() -> SingleQueue:
    """Return an empty queue that serves the earliest deadline first.

    The order is optimal if all deadlines can be met (Liu, Layland 1973), and useless otherwise.
    """
    return SingleQueue("edf", lambda ticket: ticket.deadline_s)


# --- A queue that serves requests first if they had their turn but got no lease -------------------


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
