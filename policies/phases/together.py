"""`together`: compute the prompt and the output of every request on one worker."""

from __future__ import annotations

from draftgate.policies.phases.types import PhaseChoice, PhasePool, Together
from draftgate.policies.routing.types import RouteView


class OneWorker:
    """Lets the routing policy choose among all workers, whatever their roles."""

    name = "together"
    separates = False

    def choose(self, request: RouteView, pool: PhasePool) -> PhaseChoice:
        ids = tuple(worker.worker_id for worker in pool.usable)
        return Together(ids, "requests stay on one worker")
