"""What a gateway sees of workers that are elsewhere, and by which price it decides.

Of a worker it knows what that said with its last heartbeat; what has been leased behind that it
learns from the state store with each reservation. What is left out: the network.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, cast

from draftgate.backends.base import Backend
from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.types import Delta, GenerationRequest
from draftgate.gateway.assembly import loop_time_s
from draftgate.gateway.dispatch.decisions import Decisions
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.placement import Placement, Placer
from draftgate.gateway.dispatch.routing import Routed
from draftgate.gateway.fleet import Fleet, FleetWorker
from draftgate.gateway.state.store import Reservation, WorkerReport
from draftgate.policies.capacity import WorkerUsage, with_other_gateways
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.types import WorkerLoad


class Price(StrEnum):
    """By which price of a worker a gateway decides how far a request may draft."""

    REPORTED = "reported"
    """The one that it told with its last heartbeat."""
    PROJECTED = "projected"
    """The same, with what is leased behind it (`cluster_price`), as gateways have it."""
    PRESENT = "present"
    """The one that it has at that moment, which no gateway knows: what there is to gain."""


@dataclass(slots=True)
class Reported:
    """A worker, and what all gateways know of it.

    Attributes:
        load, at_s: its last report.
        watermark: number of the last lease that this includes.
        arrived: number of the last lease whose request is there.
    """

    worker_id: str
    backend: SimBackend
    load: WorkerLoad
    at_s: float
    watermark: int = 0
    arrived: int = 0
    seq: int = 0

    def report(self) -> WorkerReport:
        """Take a heartbeat: all that has arrived by now is part of what is told."""
        self.load, self.at_s = self.backend.load(), loop_time_s()
        self.watermark, self.seq = self.arrived, self.seq + 1
        capacity_tokens = self.load.kv_blocks_total * self.load.kv_block_tokens
        return WorkerReport(self.worker_id, "", self.seq, capacity_tokens, self.watermark)


class Seen(FleetWorker):
    """A worker as one gateway sees it."""

    own = False

    def __init__(self, reported: Reported, gateways: int) -> None:
        """See a worker that so many gateways see."""
        self.reported = reported
        self._gateways = gateways
        self.shown: WorkerLoad | None = None
        super().__init__(reported.worker_id, cast(Backend, _ShownBackend(reported.backend, self)))

    @property
    def watermark(self) -> int:
        """Number of the last lease that its load includes."""
        return self.reported.watermark

    @property
    def load_age_s(self) -> float:
        """How old its load is, in seconds."""
        return loop_time_s() - self.reported.at_s

    @property
    def usage(self) -> WorkerUsage:
        """What it has on its hands, and what others have sent there (as of any peer)."""
        return with_other_gateways(super().usage, self._gateways)

    def run(self, request: GenerationRequest, lease_number: int) -> AsyncGenerator[Delta, None]:
        """See `FleetWorker`: the lease counts once it is there, which is at once."""
        self.reported.arrived = max(self.reported.arrived, lease_number)
        return self.generating.generate(request)

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


class PricedPlacer(Placer):
    """Decides about drafts by the price that it is told to look at."""

    def __init__(
        self, fleet: Fleet, policy: SpeculationPolicy, decisions: Decisions, price: Price
    ) -> None:
        """Place requests on the workers of a fleet."""
        super().__init__(fleet, policy, decisions, reads_prompts=True)
        self._price = price

    def place(
        self,
        job: Job,
        index: int,
        request: GenerationRequest,
        routed: Routed,
        reservation: Reservation,
    ) -> Placement:
        """Decide how far a request may speculate on its worker."""
        if self._price is Price.PROJECTED:
            return super().place(job, index, request, routed, reservation)
        reported = cast(Seen, routed.worker).reported
        load = reported.load if self._price is Price.REPORTED else reported.backend.load()
        with cast(Seen, routed.worker).showing(load):
            nothing_behind = replace(reservation, behind_tokens=0)
            return super().place(job, index, request, routed, nothing_behind)
