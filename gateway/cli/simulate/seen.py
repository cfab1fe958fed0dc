"""What a gateway sees of workers that are elsewhere, and how it decides by that.

Of a worker it knows what that said with its last heartbeat, and what has been leased since, which
a ledger knows that all gateways share: the least score with these leases takes a request, and they
are what is behind the report where its drafts are decided, as a state store answers in one round
trip. What is left out: the network, and that a lease may be on its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, cast

from backends.base import Backend
from backends.sim.backend import SimBackend
from backends.types import GenerationRequest
from gateway.assembly import loop_time_s
from gateway.dispatch.decisions import Decisions
from gateway.dispatch.job import Job
from gateway.dispatch.placement import Placement, Placer, need_of
from gateway.dispatch.routing import Routed, Router, View
from gateway.fleet import Fleet, FleetWorker
from policies.cluster_price import UsualNeed, projected
from policies.protocols import SpeculationPolicy
from policies.room import Occupancy
from policies.routing import Candidate, Candidates
from policies.routing.choosing import settled
from policies.types import WorkerLoad


class Price(StrEnum):
    """By which price of a worker a gateway decides how far a request may draft."""

    REPORTED = "reported"
    """The one that it told with its last heartbeat."""
    PROJECTED = "projected"
    """The same, with what is leased behind it (`policies.cluster_price`)."""
    PRESENT = "present"
    """The one that it has at that moment, which no gateway knows: what there is to gain."""


@dataclass(slots=True)
class Reported:
    """A worker, and what all gateways know of it.

    Attributes:
        load, at_s: its last report.
        behind_tokens: leased since then.
    """

    backend: SimBackend
    load: WorkerLoad
    at_s: float
    behind_tokens: int = 0

    def report(self, now_s: float) -> None:
        """Take a heartbeat: all that is leased has arrived by now."""
        self.load, self.at_s, self.behind_tokens = self.backend.load(), now_s, 0


class Seen(FleetWorker):
    """A worker as one gateway sees it."""

    def __init__(self, worker_id: str, reported: Reported) -> None:
        """See a worker that others see, too."""
        self.reported = reported
        self.shown: WorkerLoad | None = None
        super().__init__(worker_id, cast(Backend, _ShownBackend(reported.backend, self)))

    def candidate(self, at: Occupancy) -> Candidate:
        """Return what a routing policy may know of it."""
        return replace(
            super().candidate(at),
            leased_tokens=self.reported.behind_tokens,
            age_s=loop_time_s() - self.reported.at_s,
            own=False,
        )

    @contextmanager
    def showing(self, load: WorkerLoad) -> Iterator[None]:
        """Let its load be another one than the reported one meanwhile."""
        self.shown = load
        try:
            yield
        finally:
            self.shown = None


class _ShownBackend:
    """A worker's backend, but for the load that is seen of it."""

    def __init__(self, backend: SimBackend, seen: Seen) -> None:
        self._backend = backend
        self._seen = seen

    def load(self) -> WorkerLoad:
        return self._seen.shown or self._seen.reported.load

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


class LeasingRouter(Router):
    """Chooses among offers by all leases, and leases what it has chosen."""

    def choose(
        self, view: View, there: Sequence[tuple[FleetWorker, Occupancy]], *, alone: bool
    ) -> Routed:
        """Return which of these workers takes a request."""
        request = view()
        seen = {worker.worker_id: cast(Seen, worker) for worker, _ in there}
        candidates = Candidates(tuple(worker.candidate(at) for worker, at in there))
        route = self._policy.route(request, candidates, self._draw)
        behind = {name: worker.reported.behind_tokens for name, worker in seen.items()}
        chosen = seen[settled(route.offers, behind).worker_id]
        (candidate,) = (one for one in candidates.workers if one.worker_id == chosen.worker_id)
        self._policy.placed(request, candidate)
        chosen.reported.behind_tokens += request.most_tokens
        return Routed(chosen, None if alone else route)


class PricedPlacer(Placer):
    """Decides about drafts by the price that it is told to look at."""

    def __init__(
        self, fleet: Fleet, policy: SpeculationPolicy, decisions: Decisions, price: Price
    ) -> None:
        """Place requests on the workers of a fleet."""
        super().__init__(fleet, policy, decisions, reads_prompts=True)
        self._price = price
        self._usual = UsualNeed()

    def place(self, job: Job, index: int, request: GenerationRequest, routed: Routed) -> Placement:
        """Decide how far a request may speculate on its worker."""
        need, seen = need_of(request), cast(Seen, routed.worker)
        self._usual.note(need)
        reported = seen.reported
        load = reported.load
        if self._price is Price.PROJECTED:
            behind_tokens = reported.behind_tokens - need.most_tokens
            load = projected(load, behind_tokens, self._usual.need)
        elif self._price is Price.PRESENT:
            load = reported.backend.load()
        with seen.showing(load):
            return super().place(job, index, request, routed)
