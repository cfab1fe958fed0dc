"""The choice of a worker from scores: the least, the lesser of two, or a balancing random draw.

Gateways that decide on the same old loads must not all choose the least loaded worker. Otherwise
all requests would go to that worker until the next report (herding). Mitzenmacher ("How useful is
old information?", 2000) draws two workers and chooses the better. Dahlin ("Interpreting stale load
information", 2000) draws workers with probabilities that balance all requests since the report.
`spread` uses the latter method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias, TypeVar

from draftgate.policies.routing.types import Candidates, Draw, RouteView, ScoredWorker

LEAST_PER_TOKEN: Final = 1e-12
"""Minimum rise of a score per token, so that no worker can absorb unlimited tokens."""

Ranking: TypeAlias = Sequence[ScoredWorker]

T = TypeVar("T")


class Score(NamedTuple):
    """The cost of a request on a worker, and its rise with each leased token."""

    value: float
    per_token: float = 0.0


Pick: TypeAlias = Callable[[RouteView, Candidates, Ranking, Draw], Ranking]
"""Moves the chosen worker of a ranking to the front, and may omit other workers."""


def rank(candidates: Candidates, scores: Sequence[Score], last_worker: str) -> list[ScoredWorker]:
    """Return the candidates in ascending order of level.

    Args:
        scores: score of each candidate, [workers].
        last_worker: id of the last chosen worker. Among equal workers, the next id has precedence,
            so idle workers take turns and a broken worker does not get every request. The
            precedence of candidates comes before the turns.
    """
    ranking = [
        ScoredWorker(w.worker_id, score.value, score.per_token, w.leased_tokens, w.age_s)
        for w, score in zip(candidates.workers, scores, strict=True)
    ]
    places = {worker.worker_id: worker.precedence for worker in candidates.workers}
    ranking.sort(
        key=lambda w: (w.level, places[w.worker_id], w.worker_id <= last_worker, w.worker_id)
    )
    return ranking


def least(_request: RouteView, _candidates: Candidates, ranking: Ranking, _draw: Draw) -> Ranking:
    """Choose the least score, which is best if loads are fresh."""
    return ranking


def less_of_two(
    _request: RouteView, _candidates: Candidates, ranking: Ranking, draw: Draw
) -> Ranking:
    """Draw two workers, choose the lesser score, and omit the other."""
    count = len(ranking)
    if count < 3:
        return ranking
    first, second = int(draw() * count), int(draw() * (count - 1))
    second += second >= first
    return [ranking[min(first, second)], ranking[max(first, second)]]


def spread(request: RouteView, candidates: Candidates, ranking: Ranking, draw: Draw) -> Ranking:
    """Draw a worker by the unfilled part of this gateway's share.

    Without rivals, the least score wins.

    Each rival is assumed to have sent as much since the last reports as this gateway, and to be
    sending the same now. Tokens sent to the lowest level would fill the workers to one common level
    (`fill_levels`). Each gateway owns an equal part of each fill. The draw subtracts the tokens
    that this gateway has already sent. So no worker gets more than its part by more than one
    request.
    """
    if not candidates.rivals or len(ranking) < 2:
        return ranking
    gateways = candidates.rivals + 1
    tokens = sum(worker.leased_tokens for worker in ranking) + max(request.most_tokens, 1)
    reported = sorted(ranking, key=lambda worker: worker.score)
    fills = fill_levels(
        [worker.score for worker in reported],
        [max(worker.score_per_token, LEAST_PER_TOKEN) for worker in reported],
        gateways * tokens,
    )
    missing = [
        max(fill / gateways - worker.leased_tokens, 0.0)
        for worker, fill in zip(reported, fills, strict=True)
    ]
    chosen = reported[_draw_place(missing, draw)]
    return [chosen, *(worker for worker in ranking if worker is not chosen)]


def draw_some(values: Sequence[T], most: int, draw: Draw) -> Sequence[T]:
    """Return `most` random values without repetition, in their order, or all if there are fewer.

    The draw takes O(most log most) time, whatever the number of values (Floyd's algorithm: Bentley,
    "A sample of brilliance", CACM 1987).
    """
    if len(values) <= most:
        return values
    places = set[int]()
    for last in range(len(values) - most, len(values)):
        place = int(draw() * (last + 1))
        places.add(last if place in places else place)
    return [values[place] for place in sorted(places)]


def _draw_place(weights: Sequence[float], draw: Draw) -> int:
    """Return a place with a probability proportional to its weight.

    At least one weight must be positive.
    """
    mark = draw() * sum(weights)
    for place, weight in enumerate(weights):
        mark -= weight
        if mark < 0.0:
            return place
    return max(range(len(weights)), key=weights.__getitem__)  # Rounding may leave a remainder.


def fill_levels(levels: Sequence[float], per_token: Sequence[float], tokens: float) -> list[float]:
    """Return how many tokens go to each place if each token goes to the lowest level.

    Args:
        levels: initial levels in ascending order, [places].
        per_token: rise of each level with a token, more than 0, [places].
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
