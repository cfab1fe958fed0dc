"""Routing policies: which worker a request goes to."""

from draftgate.policies.routing.price import Price
from draftgate.policies.routing.scored import (
    Scored,
    least_loaded,
    power_of_two,
    prefix_affinity,
    round_robin,
    weighted,
)
from draftgate.policies.routing.types import Candidate, Candidates, Draw, Offer, Route, RouteView

__all__ = [
    "Candidate",
    "Candidates",
    "Draw",
    "Offer",
    "Price",
    "Route",
    "RouteView",
    "Scored",
    "least_loaded",
    "power_of_two",
    "prefix_affinity",
    "round_robin",
    "weighted",
]
