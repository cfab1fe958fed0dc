"""A pool under overload in virtual time: servers, gateways with queues, and returning clients.

Service times are random, and policies know only the expected service time. Each attempt of a client
goes to a random gateway, and a free server takes a request of the gateway that runs the fewest.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from draftgate.gateway.dispatch.sharing import SOON_S
from draftgate.policies.admission.appointments import Appointments, BookingNote
from draftgate.policies.admission.types import AdmissionView, Admitted, PoolView, QueueView
from draftgate.policies.protocols import SharesAppointments
from draftgate.policies.registry import admission_policy, ordering_policy
from draftgate.policies.types import ServiceLevel, Ticket, WorkerSpeed
from tests.policies.hindsight import QueuedRequest, earliest_starts_s

TPOT_S = 0.02
PROMPT_TOKEN_S = 1e-4


@dataclass
class Client:
    """A request and the history of its refusals and returns."""

    number: int
    arrived_s: float
    expected_s: float
    service_s: float
    ttft_s: float | None
    tenant: str
    priority: int = 0
    # (time in seconds, delay in seconds)
    refusals: list[tuple[float, float]] = field(default_factory=list)
    # (time in seconds, whether admitted)
    returns: list[tuple[float, bool]] = field(default_factory=list)
    admitted_s: float | None = None
    start_s: float | None = None
    admission: Admitted | None = None

    @property
    def wait_allowed_s(self) -> float:
        """The longest wait that meets the target, in seconds."""
        return MAX_WAIT_S if self.ttft_s is None else self.ttft_s

    @property
    def waited_s(self) -> float:
        """Seconds from the admission to the start of a request that has started."""
        assert self.start_s is not None
        assert self.admitted_s is not None
        return self.start_s - self.admitted_s

    @property
    def entered_s(self) -> float:
        """Time of the first refusal, or of the admission of a client that was never refused."""
        if self.refusals:
            return self.refusals[0][0]
        assert self.admitted_s is not None
        return self.admitted_s


MAX_WAIT_S = 20.0

ReturnTime = Callable[[random.Random, float, float], float | None]
"""The time of a client's return, from the time and delay of its refusal, or None for no return."""


def obeys(rng: random.Random, now_s: float, retry_s: float) -> float | None:
    """Return the time of a client that returns up to 0.3 s late."""
    return now_s + retry_s + rng.uniform(0, 0.3)


@dataclass
class Pool:
    """A queue and its servers."""

    load: float
    return_time: ReturnTime = obeys
    seconds: float = 60.0
    servers: int = 32
    mean_s: float = 3.2
    bias: float = 1.0  # true service time / expected service time
    spread: float = 0.5  # standard deviation / mean of service times
    without_target: float = 0.0
    tenants: int = 1
    priorities: tuple[int, ...] = (0,)  # assigned to clients in turn
    flood: float = 0.0  # extra share of requests from the first tenant
    ttft_s: float = 2.0
    seed: int = 1
    admission: str = "deadline"
    ordering: str = "fair"
    gateways: int = 1
    exchange_s: float = SOON_S  # interval at which the gateways share their bookings

    def run(self) -> list[Client]:
        rng = random.Random(self.seed)
        gateways = [Gateway(self, index) for index in range(self.gateways)]
        clients = self._clients(random.Random(self.seed))
        events = [(c.arrived_s, 0, c.number, "arrival") for c in clients]
        heapq.heapify(events)
        order, exchanged_s = 0, 0.0
        runs_at: dict[int, Gateway] = {}
        while events:
            now_s, _, number, event = heapq.heappop(events)
            if now_s >= exchanged_s + self.exchange_s:
                exchanged_s = now_s
                exchange_bookings(gateways, now_s)
            client = clients[number]
            if event == "departure":
                runs_at.pop(number).running -= 1
            else:
                gateway = gateways[rng.randrange(self.gateways) if self.gateways > 1 else 0]
                view = self._view(client, gateway, len(runs_at), now_s)
                decision = gateway.policy.decide(view, now_s)
                if client.refusals:
                    client.returns.append((now_s, isinstance(decision, Admitted)))
                if isinstance(decision, Admitted):
                    client.admitted_s, client.admission = now_s, decision
                    order += 1
                    ticket = self._ticket(client, order, now_s, decision.work_s)
                    gateway.queue.push(ticket)
                else:
                    client.refusals.append((now_s, decision.retry_after_s))
                    return_s = self.return_time(rng, now_s, decision.retry_after_s)
                    if return_s is not None and len(client.refusals) < 30:
                        heapq.heappush(events, (return_s, 0, number, "arrival"))
            while len(runs_at) < self.servers and (waiting := [g for g in gateways if g.queue]):
                gateway = min(waiting, key=lambda one: one.running)
                taken = gateway.queue.take(now_s)
                assert taken is not None
                started = clients[self._numbers[taken.key]]
                started.start_s = now_s
                runs_at[started.number] = gateway
                gateway.running += 1
                assert started.admission is not None
                gateway.policy.learn(started.admission, started.waited_s)
                heapq.heappush(events, (now_s + started.service_s, 1, started.number, "departure"))
        return clients

    def _clients(self, rng: random.Random) -> list[Client]:
        self._numbers: dict[int, int] = {}
        clients, now_s, target_rng = list[Client](), 0.0, random.Random(self.seed)
        sigma = math.sqrt(math.log(1 + self.spread**2))
        while True:
            now_s += rng.expovariate(self.load * self.servers / (self.mean_s * self.bias))
            if now_s > self.seconds:
                return clients
            expected_s = self.mean_s * rng.lognormvariate(-0.08, 0.4)
            service_s = expected_s * self.bias * rng.lognormvariate(-(sigma**2) / 2, sigma)
            target_s = None if target_rng.random() < self.without_target else self.ttft_s
            tenant = 0 if target_rng.random() < self.flood else target_rng.randrange(self.tenants)
            clients.append(
                Client(
                    len(clients),
                    now_s,
                    expected_s,
                    service_s,
                    target_s,
                    f"t{tenant}",
                    self.priorities[len(clients) % len(self.priorities)],
                )
            )

    def _ticket(self, client: Client, order: int, now_s: float, work_s: float) -> Ticket:
        self._numbers[order] = client.number
        deadline_s = now_s + client.wait_allowed_s
        return Ticket(order, now_s, deadline_s, client.priority, client.tenant, 1.0, work_s)

    def _view(self, client: Client, gateway: Gateway, running: int, now_s: float) -> AdmissionView:
        queue, work_s = gateway.queue, client.expected_s / self.servers
        own = max(1, gateway.running)
        share = own / (own + running - gateway.running)
        ticket = self._ticket(client, 10**9, now_s, work_s)
        return AdmissionView(
            fingerprint=client.number,
            prompt_tokens=0,
            output_tokens=client.expected_s / TPOT_S,
            max_wait_s=MAX_WAIT_S,
            service=ServiceLevel(client.ttft_s, priority=client.priority),
            tenant=client.tenant,
            pool=PoolView(1, self.servers, running, 0, WorkerSpeed(TPOT_S, PROMPT_TOKEN_S), share),
            queue=QueueView(
                len(queue),
                1024,
                queue.queued_of(client.tenant),
                queue.work_s / share,
                queue.ahead_s(ticket, now_s) / share,
                queue.ahead_s(replace(ticket, deadline_s=math.inf), now_s) / share,
                class_s=queue.class_ahead_s(ticket) / share,
            ),
        )


class Gateway:
    """A gateway with its own policies and queue.

    Attributes:
        running: number of its requests that run.
    """

    def __init__(self, pool: Pool, index: int) -> None:
        self.name = f"g{index}"
        self.policy = admission_policy(pool.admission)
        self.queue = ordering_policy(pool.ordering)
        self.running = 0

    @property
    def appointments(self) -> Appointments:
        """The bookings of an admission policy that has any."""
        assert isinstance(self.policy, SharesAppointments)
        return self.policy.appointments


def exchange_bookings(gateways: list[Gateway], now_s: float) -> None:
    """Tell each gateway what the others have booked since the last exchange."""
    if len(gateways) == 1:
        return
    taken: dict[Gateway, list[BookingNote]] = {}
    for gateway in gateways:
        taken[gateway] = gateway.appointments.take(now_s, 1 << 30, gateway.name)
        gateway.appointments.confirm()
    for gateway in gateways:
        others = [note for other in gateways if other is not gateway for note in taken[other]]
        gateway.appointments.merge(others, now_s)


def started_in_time(client: Client) -> bool:
    """Return whether an admitted request started within its TTFT target or had no target."""
    return client.ttft_s is None or client.waited_s <= client.wait_allowed_s


def goodput(pool: Pool, clients: list[Client], begin_s: float = 10.0) -> float:
    """Return the requests per second that started in time during the overload."""
    started = [c for c in clients if c.start_s is not None and begin_s <= c.start_s < pool.seconds]
    return sum(map(started_in_time, started)) / (pool.seconds - begin_s)


def attainment(clients: list[Client], with_target: bool = True) -> float:
    """Return the share of admitted requests that started in time."""
    considered = [
        c for c in clients if c.start_s is not None and (c.ttft_s is not None) == with_target
    ]
    return sum(map(started_in_time, considered)) / len(considered) if considered else 1.0


def kept_share(clients: list[Client]) -> float:
    """Return the share of punctual returns that were admitted.

    A return is punctual up to 1.2 s after its appointment.
    """
    on_time = [
        admitted
        for c in clients
        for (refused_s, retry_s), (returned_s, admitted) in zip(c.refusals, c.returns, strict=False)
        if -1e-9 <= returned_s - refused_s - retry_s <= 1.2
    ]
    return sum(on_time) / len(on_time) if on_time else math.nan


def earliest_delays(pool: Pool, clients: list[Client]) -> list[tuple[Client, float]]:
    """Return each refused client with its earliest correct delay in hindsight.

    The hindsight is a pool that never idles. It serves the clients in the order of their arrivals,
    with their true service times (`earliest_starts_s`).
    """
    served = [c for c in clients if c.start_s is not None]
    requests = [QueuedRequest(c.entered_s, c.priority, c.service_s) for c in served]
    return [
        (c, max(start_s - c.wait_allowed_s - c.entered_s, 0.0))
        for c, start_s in zip(served, earliest_starts_s(requests, pool.servers), strict=True)
        if c.refusals
    ]


def idle_while_clients_wait(pool: Pool, clients: list[Client]) -> tuple[float, float]:
    """Return how much of the pool was idle while clients waited for their appointments.

    Returns:
        Seconds in which no request ran, and the unused share of the servers.
    """
    changes = []
    for client in clients:
        if client.start_s is not None:
            changes.append((client.start_s, 1, 0))
            changes.append((client.start_s + client.service_s, -1, 0))
        for (refused_s, _), (returned_s, _) in zip(client.refusals, client.returns, strict=False):
            changes += [(refused_s, 0, 1), (returned_s, 0, -1)]
    running, waiting, last_s, waited_s, idle_s, unused_s = 0, 0, 0.0, 0.0, 0.0, 0.0
    for at_s, started, refused in sorted(changes):
        if waiting:
            waited_s += at_s - last_s
            idle_s += (at_s - last_s) * (running == 0)
            unused_s += (at_s - last_s) * (1.0 - running / pool.servers)
        running, waiting, last_s = running + started, waiting + refused, at_s
    return idle_s, unused_s / waited_s


def retry_ratio(pool: Pool, clients: list[Client]) -> float:
    """Return the median delay of refused clients divided by the median earliest correct delay."""
    delays = earliest_delays(pool, clients)
    feasible_s = statistics.median(f for _, f in delays)
    return statistics.median(c.refusals[0][1] for c, _ in delays) / feasible_s
