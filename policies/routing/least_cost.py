"""`least_cost`: route each request to the worker on which all requests lose the least time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from draftgate.policies.routing.prediction import RoutePrediction, predict
from draftgate.policies.routing.scoring import MOST_OFFERS, WeightedScores
from draftgate.policies.routing.selection import Ranking, rank, spread
from draftgate.policies.routing.types import (
    Candidate,
    Candidates,
    Draw,
    Route,
    RouteView,
    ScoredWorker,
)
from draftgate.policies.types import ServiceLevel
from draftgate.policies.values import replace

TIE_MARGIN: Final = 0.05
"""Relative cost margin within which a worker equals the best worker. It must also be no busier and
have as much of the prompt cached. Identical idle workers never measure exactly the same speed."""

_TARGET_SHARE: Final = 0.7
"""Share of a target within which a prediction must be for a worker to be in time.

A prediction does not know the prompts that arrive later. An A100 with three A10G met the targets of
97.5% of recorded chats without this rule, and of 98.8, 99.8 and 99.8% with shares of 1.0, 0.7 and
0.5. For an A10G with two L4 it was 97.2, 97.2, 98.8 and 97.5% (400 requests of Azure's conversation
trace at 8 and 1 requests/s, 2 s and 120 ms, simulated, 2026-11-24)."""


class LeastCost:
    """Chooses the worker with the least cost in seconds (`prediction`).

    The cost contains the worker's slot price, so it covers both the choice of a worker and the gain
    of drafts on it. Only workers that are predicted to meet the request's targets are considered,
    if there are any. While speeds are unknown, cached prompts and tokens decide, as in
    `prefix_affinity`.
    """

    reads_prompts = True

    def __init__(self, name: str = "least_cost", *, drafts: bool = True) -> None:
        """Create a policy without placements.

        Args:
            drafts: whether the gain of drafts at a worker's price counts. It does not for
                `:undrafted`.
        """
        self.name = name
        self._drafts = drafts
        self._fallback = WeightedScores(name, {"prefix": 2.0, "load": 1.0})

    def route(self, request: RouteView, candidates: Candidates, draw: Draw) -> Route:
        workers, last_worker = candidates.workers, self._fallback.last_worker
        gateways = candidates.rivals + 1
        predictions = predict(request, workers, gateways=gateways, drafts=self._drafts)
        if predictions is None:
            route = self._fallback.route(request, candidates, draw)
            return replace(route, reason=f"no speed is known yet; {route.reason}")
        timely = _timely(request.request.service, predictions)
        if len(timely) < len(workers):
            workers = tuple(workers[place] for place in timely)
            predictions = [predictions[place] for place in timely]
            candidates = replace(candidates, workers=workers)
        ids = [worker.worker_id for worker in workers]
        by_id = dict(zip(ids, zip(workers, predictions, strict=True), strict=True))
        offers: Ranking = rank(candidates, [p.score for p in predictions], last_worker)
        if candidates.rivals:
            how, offers = "drawn", spread(request, candidates, offers, draw)
        else:
            how, chosen = "best", _next_of_equals(offers, by_id, last_worker)
            offers = [chosen, *(offer for offer in offers if offer is not chosen)]
        _, best = by_id[offers[0].worker_id]
        reason = (
            f"{how} of {len(workers)}: TTFT {best.ttft_s:.3f} s, TPOT {best.tpot_s * 1e3:.1f} ms"
        )
        if best.cached_tokens:
            reason += f", {best.cached_tokens} of {request.request.prompt_tokens} tokens cached"
        if best.pulled_tokens:
            reason += f", {best.pulled_tokens} to pull from another worker"
        return Route(
            self.name,
            tuple(offers[:MOST_OFFERS]),
            reason,
            best.ttft_s,
            best.tpot_s,
            best.cached_tokens,
            best.draft_tokens if self._drafts else None,
        )

    def placed(self, request: RouteView, worker: Candidate) -> None:
        self._fallback.placed(request, worker)


def _timely(service: ServiceLevel, predictions: Sequence[RoutePrediction]) -> Sequence[int]:
    """Return the places of the workers that will meet the targets, or all if there is none."""
    ttft_s = math.inf if service.ttft_s is None else _TARGET_SHARE * service.ttft_s
    tpot_s = math.inf if service.tpot_s is None else _TARGET_SHARE * service.tpot_s
    timely = [
        place
        for place, one in enumerate(predictions)
        if one.ttft_s <= ttft_s and one.tpot_s <= tpot_s
    ]
    return timely or range(len(predictions))


def _next_of_equals(
    offers: Ranking, by_id: dict[str, tuple[Candidate, RoutePrediction]], last_worker: str
) -> ScoredWorker:
    """Return the first worker by precedence and in turn among the best worker and its equals."""
    most = offers[0].level + TIE_MARGIN * abs(offers[0].level)
    best, best_prediction = by_id[offers[0].worker_id]
    equals = []
    for offer in offers:
        worker, prediction = by_id[offer.worker_id]
        if offer.level > most:
            break
        if prediction.cached_tokens >= best_prediction.cached_tokens and _no_busier(worker, best):
            equals.append(offer)
    return min(
        equals,
        key=lambda offer: (
            by_id[offer.worker_id][0].precedence,
            offer.worker_id <= last_worker,
            offer.worker_id,
        ),
    )


def _no_busier(worker: Candidate, other: Candidate) -> bool:
    """Return whether a worker has no more work than another by any count."""
    return (
        worker.tokens + worker.leased_tokens <= other.tokens + other.leased_tokens
        and worker.sequences <= other.sequences
        and worker.prompt_tokens <= other.prompt_tokens
    )
