"""Routing policies: which worker a request goes to."""

from draftgate.policies.routing.least_cost import LeastCost
from draftgate.policies.routing.scored import (
    Scored,
    least_loaded,
    power_of_two,
    prefix_affinity,
    round_robin,
    weighted,
)
from draftgate.policies.routing.types import (
    Candidate,
    Candidates,
    Draw,
    Route,
    RouteView,
    ScoredWorker,
)

__all__ = [
    "Candidate",
    "Candidates",
    "Draw",
    "LeastCost",
    "Route",
    "RouteView",
    "Scored",
    "ScoredWorker",
    "least_loaded",
    "power_of_two",
    "prefix_affinity",
    "round_robin",
    "weighted",
]
