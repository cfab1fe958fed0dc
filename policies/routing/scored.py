"""Scorers with weights, and the baselines that are made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from draftgate.policies.routing.placements import Placements
from draftgate.policies.routing.scorers import READ_PROMPTS, SCORERS
from draftgate.policies.routing.selection import Pick, Score, least, less_of_two, ranked, spread
from draftgate.policies.routing.types import Candidate, Candidates, Draw, Route, RouteView

MOST_OFFERS: Final = 64
"""Workers of a decision that are offered to a reservation, the best ones: it looks at each."""


class Scored:
    """The least weighted sum of scores wins. Without scorers all are equal, and get turns."""

    def __init__(
        self,
        name: str,
        weights: Mapping[str, float],
        pick: Pick = spread,
        placements: Placements | None = None,
    ) -> None:
        """Weigh scorers (`scorers.SCORERS`), and take one of what they score by `pick`.

        Args:
            placements: somebody else's memory, who is told of what is placed; None makes its own.
        """
        self._name = name
        self._weights = dict(weights)
        self._pick = pick
        self._placements = Placements() if placements is None else placements

    @property
    def name(self) -> str:
        return self._name

    @property
    def reads_prompts(self) -> bool:
        return not READ_PROMPTS.isdisjoint(self._weights)

    def route(self, request: RouteView, candidates: Candidates, draw: Draw) -> Route:
        """Take one by its weighted scores."""
        workers = candidates.workers
        parts = {
            name: SCORERS[name](request, workers, self._placements.index) for name in self._weights
        }
        sums = [
            self._sum([part[place] for part in parts.values()]) for place in range(len(workers))
        ]
        offers = self._pick(
            request, candidates, ranked(candidates, sums, self._placements.last), draw
        )
        chosen = [one.worker_id for one in workers].index(offers[0].worker_id)
        words = self._words({name: part[chosen] for name, part in parts.items()}, candidates)
        return Route(self._name, tuple(offers[:MOST_OFFERS]), words)

    def placed(self, request: RouteView, worker: Candidate) -> None:
        """Remember whose turn it was, and who has seen the prompt."""
        self._placements.note(request, worker)

    def _sum(self, scores: list[Score]) -> Score:
        """Return the weighted sum of a worker's scores."""
        weights = self._weights.values()
        return Score(
            sum(weight * score.value for weight, score in zip(weights, scores, strict=True)),
            sum(weight * score.per_token for weight, score in zip(weights, scores, strict=True)),
        )

    def _words(self, parts: Mapping[str, Score], candidates: Candidates) -> str:
        how = "least" if parts else "next"
        if self._pick is less_of_two:
            how = "less of two drawn"
        elif self._pick is spread and candidates.rivals:
            how = f"drawn beside {candidates.rivals} other gateways"
        told = f"{how} of {len(candidates.workers)} workers"
        return f"{told}: {' + '.join(self._weighed(parts))}" if parts else told

    def _weighed(self, parts: Mapping[str, Score]) -> Iterator[str]:
        for name, score in parts.items():
            weight = self._weights[name]
            yield f"{name} {score.value:.2f}" + ("" if weight == 1.0 else f" x {weight:g}")


def round_robin() -> Scored:
    """In turn, whatever the load."""
    return Scored("round_robin", {}, least)


def least_loaded() -> Scored:
    """The one with the fewest tokens."""
    return Scored("least_loaded", {"load": 1.0}, least)


def power_of_two() -> Scored:
    """The one with fewer tokens of two that are drawn."""
    return Scored("power_of_two", {"load": 1.0}, less_of_two)


def prefix_affinity() -> Scored:
    """The one that has most of the prompt cached, unless it has too much to do."""
    return Scored("prefix_affinity", {"prefix": 2.0, "load": 1.0}, least)


def weighted(argument: str) -> Scored:
    """Scorers with weights, as `prefix=2,load=1`; a scorer without a weight has 1.

    Raises:
        ValueError: one does not exist, stands twice, or its weight is no number above 0.
    """
    weights: dict[str, float] = {}
    for part in argument.split(","):
        name, _, text = part.strip().partition("=")
        if name not in SCORERS:
            known = ", ".join(sorted(SCORERS))
            raise ValueError(
                f"unknown scorer {name!r}, as in weighted:prefix=2,load=1; known: {known}"
            )
        if name in weights:
            raise ValueError(f"the scorer {name!r} is named twice")
        weights[name] = _weight(name, text or "1")
    return Scored(f"weighted:{argument}", weights)


def _weight(name: str, text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0.0 < weight < float("inf"):
        raise ValueError(f"the weight of {name} must be a number above 0, not {text!r}")
    return weight
