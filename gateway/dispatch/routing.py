"""Routing, which chooses one of the workers with capacity for a request."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from draftgate.gateway.fleet import FleetWorker
from draftgate.policies.capacity import WorkerUsage
from draftgate.policies.protocols import RoutingPolicy
from draftgate.policies.routing.types import Candidates, Draw, Route, RouteView

View = Callable[[], RouteView]
"""A function that returns the current view of a request, called only for the policy."""


class Routed(NamedTuple):
    """The worker of a request.

    Attributes:
        route: the decision, or None with only one worker to choose.
        choices: the workers that may be leased, the chosen worker first.
        begun_s, ended_s: the time of the decision, on the clock of spans.
    """

    worker: FleetWorker
    route: Route | None = None
    choices: tuple[FleetWorker, ...] = ()
    begun_s: float = 0.0
    ended_s: float = 0.0


class Router:
    """A router that chooses workers by a policy, and informs the policy about sent requests."""

    def __init__(self, policy: RoutingPolicy, draw: Draw) -> None:
        """Use a policy exclusively.

        Args:
            draw: the policy's source of randomness.
        """
        self._policy = policy
        self._draw = draw

    def choose(
        self,
        view: View,
        usable: Sequence[tuple[FleetWorker, WorkerUsage]],
        *,
        alone: bool,
        rivals: int = 0,
    ) -> Routed:
        """Choose a worker for a request.

        Args:
            usable: the workers with capacity, and their usage. At least one is required.
            alone: whether the node has only one worker, so that the policy is not needed.
            rivals: number of other gateways whose requests to these workers are unknown.
        """
        begun_s = time.monotonic()
        if alone:
            return Routed(usable[0][0], begun_s=begun_s, ended_s=time.monotonic())
        routed = self._choose(view, usable, rivals)
        return routed._replace(begun_s=begun_s, ended_s=time.monotonic())

    def moved(self, view: View, worker: FleetWorker) -> None:
        """Report to the policy that a worker other than the chosen worker got the request."""
        self._policy.placed(view(), worker.candidate(worker.usage))

    def _choose(
        self, view: View, usable: Sequence[tuple[FleetWorker, WorkerUsage]], rivals: int
    ) -> Routed:
        """Choose a worker by the policy."""
        request = view()
        candidates = tuple(worker.candidate(at) for worker, at in usable)
        if len(usable) == 1:
            self._policy.placed(request, candidates[0])
            return Routed(usable[0][0])
        route = self._policy.route(request, Candidates(candidates, rivals), self._draw)
        places = {one.worker_id: place for place, one in enumerate(candidates)}
        chosen = [places[offer.worker_id] for offer in route.offers]
        self._policy.placed(request, candidates[chosen[0]])
        choices = tuple(usable[place][0] for place in chosen)
        return Routed(choices[0], route, choices)
