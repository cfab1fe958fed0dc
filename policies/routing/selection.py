"""From scores to a choice: the least of all, of two, or one of those that others leave.

Who decides by loads that are old, beside others who do the same, must not take the least: all take
it until the next report (the herd). Mitzenmacher ("How useful is old information?", 2000) drew two
and took the better one; Dahlin ("Interpreting stale load information", 2000) drew each with the
chance that evens out what all have sent meanwhile. The latter is what `spread` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from draftgate.policies.routing.types import Candidates, Draw, RouteView, ScoredWorker

LEAST_PER_TOKEN: Final = 1e-12
"""Scores are taken to rise by so much at least, so that no worker takes endless tokens."""

Offers: TypeAlias = Sequence[ScoredWorker]


class Score(NamedTuple):
    """What a request costs on a worker, and how that rises with each token leased there."""

    value: float
    per_token: float = 0.0


Pick: TypeAlias = Callable[[RouteView, Candidates, Offers, Draw], Offers]
"""Puts the offer that is taken before the others; may leave offers out, but one.

Args: the request, the candidates, their offers by level, and the source of randomness.
"""


def ranked(candidates: Candidates, scores: Sequence[Score], last: str) -> list[ScoredWorker]:
    """Return an offer for each candidate, the lowest level first, and equals in turn.

    Args:
        scores: of each candidate.
        last: id of the worker that was chosen last: of equals the next one by id comes first, so
            that idle ones share what comes, and what goes wrong on one does not meet all.
    """
    offers = [
        ScoredWorker(one.worker_id, score.value, score.per_token, one.leased_tokens, one.age_s)
        for one, score in zip(candidates.workers, scores, strict=True)
    ]
    offers.sort(key=lambda offer: (offer.level, offer.worker_id <= last, offer.worker_id))
    return offers


def least(_request: RouteView, _candidates: Candidates, offers: Offers, _draw: Draw) -> Offers:
    """Take the least: best where scores are fresh."""
    return offers


def less_of_two(_request: RouteView, _candidates: Candidates, offers: Offers, draw: Draw) -> Offers:
    """Take the less of two that are drawn; the others are not offered at all."""
    count = len(offers)
    if count < 3:
        return offers
    one, other = int(draw() * count), int(draw() * (count - 1))
    other += other >= one
    return [offers[min(one, other)], offers[max(one, other)]]


def spread(request: RouteView, candidates: Candidates, offers: Offers, draw: Draw) -> Offers:
    """Draw one by what is missing there of this gateway's share; without rivals, take the least.

    Each rival is taken to have sent since the last reports as much as this gateway has, and to be
    sending what it is sending now. All of that together, were it to go where the level is lowest by
    then, fills the workers up to one level; each gateway's share of it is the same everywhere. So
    what a gateway sends is drawn, but evened out: no worker gets more of it than its share, but for
    the last request.
    """
    if not candidates.rivals or len(offers) < 2:
        return offers
    gateways = candidates.rivals + 1
    tokens = sum(offer.leased_tokens for offer in offers) + max(request.most_tokens, 1)
    reported = sorted(offers, key=lambda offer: offer.score)
    fills = filled(
        [offer.score for offer in reported],
        [max(offer.score_per_token, LEAST_PER_TOKEN) for offer in reported],
        gateways * tokens,
    )
    missing = [
        max(fill / gateways - offer.leased_tokens, 0.0)
        for offer, fill in zip(reported, fills, strict=True)
    ]
    chosen = reported[_drawn(missing, draw)]
    return [chosen, *(offer for offer in offers if offer is not chosen)]


def _drawn(weights: Sequence[float], draw: Draw) -> int:
    """Return a place, each with the chance that its weight has; one of them is more than 0."""
    mark, place = draw() * sum(weights), 0
    for place, weight in enumerate(weights):
        mark -= weight
        if mark < 0.0:
            return place
    return max(range(len(weights)), key=weights.__getitem__)


def filled(levels: Sequence[float], per_token: Sequence[float], tokens: float) -> list[float]:
    """Return how many of so many tokens go where, if each goes where the level is lowest by then.

    Args:
        levels: ascending.
        per_token: by which each level rises with a token, more than 0.
    """
    width = weighted = 0.0
    surface = levels[0]
    for place, (level, rise) in enumerate(zip(levels, per_token, strict=True)):
        width += 1.0 / rise
        weighted += level / rise
        surface = (tokens + weighted) / width
        if place + 1 < len(levels) and surface <= levels[place + 1]:
            break
    return [max(surface - level, 0.0) / rise for level, rise in zip(levels, per_token, strict=True)]


def settled(offers: Offers, leased_tokens: Mapping[str, int]) -> ScoredWorker:
    """Return the offer that a reservation takes which knows all leases: the least score with them.

    Of equals the first. What a state store does in one round trip.

    Args:
        leased_tokens: by worker, of all that its load does not include; a missing one has none.
    """
    return min(
        offers,
        key=lambda offer: (
            offer.score + offer.score_per_token * leased_tokens.get(offer.worker_id, 0)
        ),
    )
