"""Routing: which of the workers with room a request goes to, and what was weighed for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from draftgate.gateway.fleet import FleetWorker
from draftgate.policies.capacity import WorkerUsage
from draftgate.policies.protocols import RoutingPolicy
from draftgate.policies.routing.types import Candidates, Draw, Route, RouteView

View = Callable[[], RouteView]
"""Returns what is known of a request by now; asked only where there is a choice to be made."""


class Routed(NamedTuple):
    """A request's worker.

    Attributes:
        route: the decision; None where there was nothing to decide.
        choices: the workers of its offers, the chosen one first.
    """

    worker: FleetWorker
    route: Route | None = None
    choices: tuple[FleetWorker, ...] = ()


class Router:
    """Chooses workers by a policy, and tells it where requests went."""

    def __init__(self, policy: RoutingPolicy, draw: Draw) -> None:
        """Ask this policy, and no one else may; `draw` is its source of randomness."""
        self._policy = policy
        self._draw = draw

    def choose(
        self,
        view: View,
        there: Sequence[tuple[FleetWorker, WorkerUsage]],
        *,
        alone: bool,
        rivals: int = 0,
    ) -> Routed:
        """Return which of these workers, at least one, takes a request.

        Args:
            there: the workers with what they have on their hands.
            alone: the node has one worker: nothing is asked, and nothing has to be remembered.
            rivals: other gateways that send to them unseen.
        """
        if alone:
            return Routed(there[0][0])
        request = view()
        candidates = tuple(worker.candidate(at) for worker, at in there)
        if len(there) == 1:
            self._policy.placed(request, candidates[0])
            return Routed(there[0][0])
        route = self._policy.route(request, Candidates(candidates, rivals), self._draw)
        places = {one.worker_id: place for place, one in enumerate(candidates)}
        chosen = [places[offer.worker_id] for offer in route.offers]
        self._policy.placed(request, candidates[chosen[0]])
        choices = tuple(there[place][0] for place in chosen)
        return Routed(choices[0], route, choices)

    def moved(self, view: View, worker: FleetWorker) -> None:
        """Tell the policy that a request went to another worker than was chosen."""
        self._policy.placed(view(), worker.candidate(worker.usage))
