"""A model of gateways that place requests by stale loads, without queues or network.

A worker is a backlog of tokens with a constant service rate. Each gateway has its own routing
policy. A gateway sees every worker as in the last report, plus its own requests since the report.

With leases, gateways also see a snapshot of the store, with the leases made after the reports. A
gateway then sends its offers to a current ledger that all gateways share. The offer with the lowest
score, including its leases in the ledger, gets the request (`least_with_leases`), as in a state
store.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean
from typing import Final, NamedTuple

from draftgate.policies.capacity import WorkerUsage
from draftgate.policies.protocols import RoutingPolicy
from draftgate.policies.registry import routing_policy
from draftgate.policies.routing.types import Candidate, Candidates, Route, RouteView
from draftgate.policies.types import RequestView, WorkerLoad, WorkerSpeed

MEMORY_TOKENS: Final = 1 << 30
"""Memory of a worker in tokens, more than its backlog ever needs."""

SNAPSHOT_S: Final = 0.1
"""Age of a gateway's snapshot of the store, in seconds. Gateways do not read the store for each
request."""

GOLDEN: Final = 0.618
"""Fraction whose multiples, modulo 1, are evenly spread. The multiples are the phases of workers'
heartbeats."""

MEDIAN_TOKENS, SIGMA = 300.0, 1.0
"""Parameters of lognormal request lengths with a mean of 495 tokens and a standard deviation of 1.3
times the mean."""


class Arrival(NamedTuple):
    """A request and the gateway that receives it."""

    at_s: float
    gateway: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Bursts:
    """Requests in bursts, with silence between bursts.

    Attributes:
        bursts: number of bursts.
        every_s, length_s: period and length of a burst, in seconds.
        requests: number of requests per burst, at uniformly random times and gateways.
        utilisation: utilisation of all workers over a whole period.
    """

    bursts: int = 10
    every_s: float = 5.0
    length_s: float = 2.0
    requests: int = 1600
    utilisation: float = 0.7
    gateways: int = 16
    workers: int = 16

    @property
    def ends_s(self) -> list[float]:
        """End time of each burst, in seconds."""
        return [number * self.every_s + self.length_s for number in range(self.bursts)]

    def arrivals(self, seed: int) -> list[Arrival]:
        """Return the requests in order of arrival, identical for the same seed."""
        drawn = Random(f"herd/{seed}")
        found = [
            Arrival(
                number * self.every_s + drawn.random() * self.length_s,
                drawn.randrange(self.gateways),
                max(round(MEDIAN_TOKENS * drawn.lognormvariate(0.0, SIGMA)), 1),
            )
            for number in range(self.bursts)
            for _ in range(self.requests)
        ]
        return sorted(found)

    def tokens_per_s(self, arrivals: Sequence[Arrival]) -> float:
        """Return the service rate of a worker that gives the chosen utilisation."""
        tokens = sum(one.tokens for one in arrivals)
        return tokens / (self.workers * self.bursts * self.every_s * self.utilisation)


@dataclass(slots=True)
class Backlog:
    """The backlog of a worker at any time up to the last arrival."""

    tokens_per_s: float
    at_s: list[float] = field(default_factory=lambda: [0.0])
    tokens: list[float] = field(
        default_factory=lambda: [0.0]
    )  # backlog after the arrival at that time
    arrived: list[int] = field(default_factory=lambda: [0])  # cumulative tokens

    def add(self, now_s: float, tokens: int) -> None:
        """Add the tokens of a request."""
        self.tokens.append(self.at(now_s) + tokens)
        self.arrived.append(self.arrived[-1] + tokens)
        self.at_s.append(now_s)

    def at(self, at_s: float) -> float:
        """Return the backlog at a time, in tokens."""
        place = bisect_right(self.at_s, at_s) - 1
        if place < 0:
            return 0.0
        return max(self.tokens[place] - (at_s - self.at_s[place]) * self.tokens_per_s, 0.0)

    def arrived_until(self, at_s: float) -> int:
        """Return the number of tokens that had arrived by a time."""
        return self.arrived[max(bisect_right(self.at_s, at_s) - 1, 0)]


@dataclass(frozen=True, slots=True)
class Ages:
    """Ages of the load reports.

    Attributes:
        mean_s: mean age over all workers at any time, in seconds.
        staggered: whether each worker reports at its own times, as with heartbeats. The age then
            varies from 0 to twice the mean. Otherwise all ages equal the mean.
    """

    mean_s: float
    staggered: bool = False

    def at(self, now_s: float, number: int) -> float:
        """Return the age of a worker's report in seconds, by the worker's index."""
        if not self.staggered:
            return self.mean_s
        every_s = 2.0 * self.mean_s
        return (now_s + number * GOLDEN * every_s) % every_s


class Gateway:
    """A gateway that knows its own requests and the workers as of their last reports."""

    def __init__(self, policy: RoutingPolicy, rivals: int, seed: str) -> None:
        """Create a gateway without requests.

        Args:
            policy: name of the routing policy.
            rivals: number of other gateways that the policy assumes.
            seed: seed of the policy.
        """
        self._policy = policy
        self._rivals = rivals
        self._draw = Random(seed).random
        self._sent: dict[str, list[tuple[float, int]]] = {}

    def place(
        self, arrival: Arrival, workers: dict[str, Backlog], ages: Ages, *, leased: bool
    ) -> str:
        """Place a request, and return the id of its worker."""
        now_s, tokens = arrival.at_s, arrival.tokens
        request = RouteView(RequestView(tokens, 1, 0.0), tokens, 0.0)
        age_s = {name: ages.at(now_s, number) for number, name in enumerate(workers)}
        views = {
            name: self._candidate(name, backlog, now_s, age_s[name], leased=leased)
            for name, backlog in workers.items()
        }
        candidates = Candidates(tuple(views.values()), 0 if leased else self._rivals)
        route = self._policy.route(request, candidates, self._draw)
        chosen = route.worker_id
        if leased:
            loads = {
                name: backlog.arrived_until(now_s) - backlog.arrived_until(now_s - age_s[name])
                for name, backlog in workers.items()
            }
            chosen = least_with_leases(route, loads)
        self._policy.placed(request, views[chosen])
        self._sent.setdefault(chosen, []).append((now_s, tokens))
        return chosen

    def _candidate(
        self, name: str, backlog: Backlog, now_s: float, age_s: float, *, leased: bool
    ) -> Candidate:
        """Return the gateway's view of a worker, including leases of the last snapshot if used."""
        tokens = round(backlog.at(now_s - age_s))
        if leased:
            read_s = now_s - min(SNAPSHOT_S, age_s)
            unreported = backlog.arrived_until(read_s) - backlog.arrived_until(now_s - age_s)
        else:
            unreported = self._unreported(name, now_s - age_s)
        load = WorkerLoad(
            *(int(tokens > 0), 0, MEMORY_TOKENS - tokens, MEMORY_TOKENS, 0.0, 0.0, ()),
            prompt_tokens=tokens,
            kv_block_tokens=1,
            speed=WorkerSpeed(step_s=1e-3, step_token_s=1.0 / backlog.tokens_per_s),
        )
        return Candidate(name, WorkerUsage(load), leased_tokens=unreported, age_s=age_s, own=False)

    def _unreported(self, name: str, since_s: float) -> int:
        """Return the tokens that the gateway has sent to a worker since a time."""
        sent = self._sent.get(name, [])
        while sent and sent[0][0] <= since_s:
            del sent[0]
        return sum(tokens for _, tokens in sent)


def least_with_leases(route: Route, leased_tokens: Mapping[str, int]) -> str:
    """Return the worker with the lowest score, after adding its leased tokens to its load."""
    return min(
        route.offers,
        key=lambda offer: offer.score + offer.score_per_token * leased_tokens[offer.worker_id],
    ).worker_id


class Imbalance(NamedTuple):
    """The imbalance of workers at the end of a burst, and its cost.

    Attributes:
        backlog: max / mean of the workers' backlogs.
        placed: max / mean of the tokens that the burst added to each worker.
        wait_s: mean seconds of work that the burst's requests found before them.
    """

    backlog: float
    placed: float
    wait_s: float


def imbalances(
    bursts: Bursts, policy: str, ages: Ages, seed: int, *, leased: bool
) -> Iterator[Imbalance]:
    """Yield the imbalance at the end of each burst.

    Raises:
        ValueError: the policy is unknown.
    """
    arrivals = bursts.arrivals(seed)
    rate = bursts.tokens_per_s(arrivals)
    workers = {f"w-{number:02}": Backlog(rate) for number in range(bursts.workers)}
    gateways = [
        Gateway(routing_policy(policy), bursts.gateways - 1, f"gateway/{seed}/{number}")
        for number in range(bursts.gateways)
    ]
    waits_s = []
    for one in arrivals:
        chosen = workers[gateways[one.gateway].place(one, workers, ages, leased=leased)]
        waits_s.append(chosen.at(one.at_s) / rate)
        chosen.add(one.at_s, one.tokens)
    for number, end_s in enumerate(bursts.ends_s):
        begin_s = end_s - bursts.length_s
        placed = [w.arrived_until(end_s) - w.arrived_until(begin_s) for w in workers.values()]
        first = number * bursts.requests
        yield Imbalance(
            _unequal([w.at(end_s) for w in workers.values()]),
            _unequal(placed),
            fmean(waits_s[first : first + bursts.requests]),
        )


def _unequal(tokens: Sequence[float]) -> float:
    """Return max / mean, or 1 if all values are zero."""
    mean = sum(tokens) / len(tokens)
    return max(tokens) / mean if mean else 1.0
