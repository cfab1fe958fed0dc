"""`least_cost`: each request goes where it costs least, to itself and to all who are there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, TypeAlias

from draftgate.policies.routing.placements import Placements
from draftgate.policies.routing.prediction import Prediction, predict
from draftgate.policies.routing.scored import MOST_OFFERS, Scored
from draftgate.policies.routing.scorers import cached_tokens
from draftgate.policies.routing.selection import Offers, ranked, spread
from draftgate.policies.routing.types import Candidate, Candidates, Draw, Route, RouteView

WITHIN: Final = 0.05
"""A worker that costs at most so much more than the best one, has no more to do and as much of the
prompt is its equal: speeds are measured, and idle workers that are alike never measure quite the
same."""

_There: TypeAlias = Mapping[str, tuple[Candidate, Prediction]]
"""The candidates by id, with what is predicted there."""


class LeastCost:
    """The least cost in seconds wins (`prediction`).

    Where a request runs and how far drafts pay there is one decision, for the worker's price is in
    both. Where no speed is known, cached prompts and tokens decide, as by `prefix_affinity`.
    """

    reads_prompts = True

    def __init__(self, name: str = "least_cost", *, drafts: bool = True) -> None:
        """Remember nothing yet.

        Args:
            drafts: whether the gain of drafting at a worker's price counts; not for `:undrafted`.
        """
        self.name = name
        self._drafts = drafts
        self._placements = Placements()
        self._blind = Scored(name, {"prefix": 2.0, "load": 1.0}, placements=self._placements)

    def route(self, request: RouteView, candidates: Candidates, draw: Draw) -> Route:
        """Take the least cost, or one that rivals leave."""
        workers, memory = candidates.workers, self._placements
        cached = [cached_tokens(request, worker, memory.index) for worker in workers]
        gateways = candidates.rivals + 1
        found = predict(request, workers, cached, gateways=gateways, drafts=self._drafts)
        if found is None:
            route = self._blind.route(request, candidates, draw)
            return replace(route, reason=f"no speed is known yet; {route.reason}")
        there = {one.worker_id: (one, told) for one, told in zip(workers, found, strict=True)}
        offers: Offers = ranked(candidates, [told.score for told in found], memory.last)
        if candidates.rivals:
            offers, how = spread(request, candidates, offers, draw), "drawn"
        else:
            offers, how = _in_turn(offers, there, memory.last), "best"
        _, predicted = there[offers[0].worker_id]
        return Route(
            self.name,
            tuple(offers[:MOST_OFFERS]),
            _reason(request, predicted, f"{how} of {len(workers)}"),
            predicted.ttft_s,
            predicted.tpot_s,
            predicted.cached_tokens,
            predicted.draft_tokens if self._drafts else None,
        )

    def placed(self, request: RouteView, worker: Candidate) -> None:
        """Remember whose turn it was, and who has seen the prompt."""
        self._placements.note(request, worker)


def _in_turn(offers: Offers, there: _There, last: str) -> Offers:
    """Return the offers with the next in turn of the best one's equals first."""
    most = offers[0].level + WITHIN * abs(offers[0].level)
    best, predicted = there[offers[0].worker_id]
    equals = [offers[0]]
    for offer in offers[1:]:
        one, told = there[offer.worker_id]
        if offer.level > most:
            break
        if told.cached_tokens >= predicted.cached_tokens and _no_busier(one, best):
            equals.append(offer)
    chosen = min(equals, key=lambda offer: (offer.worker_id <= last, offer.worker_id))
    return [chosen, *(offer for offer in offers if offer is not chosen)]


def _no_busier(one: Candidate, other: Candidate) -> bool:
    """Return whether a worker has no more to do than another, whatever one looks at."""
    return (
        one.tokens + one.leased_tokens <= other.tokens + other.leased_tokens
        and one.sequences <= other.sequences
        and one.prompt_tokens <= other.prompt_tokens
    )


def _reason(request: RouteView, predicted: Prediction, how: str) -> str:
    """Return in words what is predicted where it goes."""
    words = f"{how}: TTFT {predicted.ttft_s:.3f} s, TPOT {predicted.tpot_s * 1e3:.1f} ms"
    if predicted.cached_tokens:
        words += f", {predicted.cached_tokens} of {request.request.prompt_tokens} tokens cached"
    return words
