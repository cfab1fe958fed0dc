"""Routing: which of the workers with room a request goes to, and what was weighed for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gateway.fleet import FleetWorker
from policies.protocols import RoutingPolicy
from policies.room import Occupancy
from policies.routing import Candidates, Draw, Route, RouteView

View = Callable[[], RouteView]
"""Returns what is known of a request by now; asked only where there is a choice to be made."""


class Routed(NamedTuple):
    """A request's worker.

    Attributes:
        route: the decision; None where there was nothing to decide.
    """

    worker: FleetWorker
    route: Route | None = None


class Router:
    """Chooses workers by a policy, and tells it where requests went."""

    def __init__(self, policy: RoutingPolicy, draw: Draw) -> None:
        """Ask this policy, and no one else may; `draw` is its source of randomness."""
        self._policy = policy
        self._draw = draw

    def choose(
        self, view: View, there: Sequence[tuple[FleetWorker, Occupancy]], *, alone: bool
    ) -> Routed:
        """Return which of these workers, at least one, takes a request.

        Args:
            there: the workers with what they have on their hands.
            alone: the node has one worker: nothing is asked, and nothing has to be remembered.
        """
        if alone:
            return Routed(there[0][0])
        request = view()
        candidates = Candidates(tuple(worker.candidate(at) for worker, at in there))
        place, route = 0, None
        if len(there) > 1:
            route = self._policy.route(request, candidates, self._draw)
            place = [worker.worker_id for worker, _ in there].index(route.worker_id)
        self._policy.placed(request, candidates.workers[place])
        return Routed(there[place][0], route)
