"""Routing by weighted scores: `weighted:SCORER=WEIGHT,...`, and the baselines made of it.

A scorer says what speaks against each worker, from 0 (nothing) to 1. The least weighted sum wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from draftgate.policies.routing.placement_history import PlacementHistory
from draftgate.policies.routing.prediction import predict
from draftgate.policies.routing.selection import Pick, Score, least, less_of_two, rank, spread
from draftgate.policies.routing.types import Candidate, Candidates, Draw, Route, RouteView

Scorer: TypeAlias = Callable[[RouteView, Sequence[Candidate], PlacementHistory], Sequence[Score]]
"""Returns the score of each candidate. Changes nothing."""

OVERLOAD: Final = 1.25
"""A worker with more than this multiple of the mean load gets no credit for its cache: consistent
hashing with bounded loads (Mirrokni et al. 2018) balances the two best near this value."""

STALE_S: Final = 1.0
"""The age that scores one half: the second between two heartbeats."""

MOST_OFFERS: Final = 64
"""Most workers that a decision offers to a reservation, which looks at each."""


def load(
    request: RouteView, workers: Sequence[Candidate], _history: PlacementHistory
) -> Sequence[Score]:
    """Tokens on the worker, as a share of the most that any worker would have."""
    tokens = [_tokens(request, one) for one in workers]
    leased = [mine + one.leased_tokens for mine, one in zip(tokens, workers, strict=True)]
    per_token = 1.0 / max(request.most_tokens + max(leased), 1)
    return [Score(mine * per_token, per_token) for mine in tokens]


def _tokens(request: RouteView, worker: Candidate) -> int:
    """Return the tokens on a worker; uncounted sequences of others are taken to be like it."""
    uncounted = 0 if worker.load.kv_blocks_total else worker.load.others
    return worker.tokens + uncounted * request.most_tokens // max(request.sequences, 1)


def prefix(
    request: RouteView, workers: Sequence[Candidate], history: PlacementHistory
) -> Sequence[Score]:
    """The share of the prompt that is not cached; 1 on an overloaded worker."""
    tokens = [one.tokens + one.leased_tokens for one in workers]
    most = OVERLOAD * (sum(tokens) / len(workers) + request.most_tokens)
    prompt_tokens = max(request.request.prompt_tokens, 1)
    return [
        Score(1.0 if mine > most else 1.0 - history.cached_tokens(request, one) / prompt_tokens)
        for one, mine in zip(workers, tokens, strict=True)
    ]


def price(
    _request: RouteView, workers: Sequence[Candidate], _history: PlacementHistory
) -> Sequence[Score]:
    """The price of a draft slot; at 1 nothing is drafted."""
    return [Score(min(one.load.price, 1.0)) for one in workers]


def staleness(
    _request: RouteView, workers: Sequence[Candidate], _history: PlacementHistory
) -> Sequence[Score]:
    """How old the load is."""
    return [Score(one.age_s / (one.age_s + STALE_S)) for one in workers]


def latency(
    request: RouteView, workers: Sequence[Candidate], history: PlacementHistory
) -> Sequence[Score]:
    """The cost that `least_cost` predicts, as a share of the most anywhere; else `load`."""
    cached = [history.cached_tokens(request, one) for one in workers]
    predictions = predict(request, workers, cached)
    if predictions is None:
        return load(request, workers, history)
    scores = [one.score for one in predictions]
    lowest = min(0.0, *(score.value for score in scores))  # old loads can lead below 0
    span = max(score.value for score in scores) - lowest
    return [Score((score.value - lowest) / span, score.per_token / span) for score in scores]


SCORERS: Final[Mapping[str, Scorer]] = {
    "load": load,
    "prefix": prefix,
    "price": price,
    "staleness": staleness,
    "latency": latency,
}

READ_PROMPTS: Final = frozenset({"prefix", "latency"})
"""Scorers that read block hashes."""


class WeightedScores:
    """The least weighted sum of scores wins. Without scorers all are equal and take turns."""

    def __init__(
        self,
        name: str,
        weights: Mapping[str, float],
        pick: Pick = spread,
        history: PlacementHistory | None = None,
    ) -> None:
        """Create a policy that has placed nothing.

        Args:
            weights: of scorers in `SCORERS`.
            pick: takes one of the ranked workers.
            history: shared with another policy, which also gets every `placed`.
        """
        self._name = name
        self._weights = dict(weights)
        self._pick = pick
        # Not `or`: an empty history is false, and has to be shared all the same.
        self._history = PlacementHistory() if history is None else history

    @property
    def name(self) -> str:
        return self._name

    @property
    def reads_prompts(self) -> bool:
        return not READ_PROMPTS.isdisjoint(self._weights)

    def route(self, request: RouteView, candidates: Candidates, draw: Draw) -> Route:
        workers = candidates.workers
        parts = {name: SCORERS[name](request, workers, self._history) for name in self._weights}
        sums = [
            Score(
                sum(weight * parts[name][place].value for name, weight in self._weights.items()),
                sum(
                    weight * parts[name][place].per_token for name, weight in self._weights.items()
                ),
            )
            for place in range(len(workers))
        ]
        ranking = rank(candidates, sums, self._history.last_worker)
        offers = self._pick(request, candidates, ranking, draw)
        chosen = [one.worker_id for one in workers].index(offers[0].worker_id)
        reason = self._reason({name: part[chosen] for name, part in parts.items()}, candidates)
        return Route(self._name, tuple(offers[:MOST_OFFERS]), reason)

    def placed(self, request: RouteView, worker: Candidate) -> None:
        self._history.record(worker.worker_id, request.block_hashes, worker.load.kv_blocks_total)

    def _reason(self, parts: Mapping[str, Score], candidates: Candidates) -> str:
        how = "least" if parts else "next"
        if self._pick is less_of_two:
            how = "less of two drawn"
        elif self._pick is spread and candidates.rivals:
            how = f"drawn, with {candidates.rivals} other gateways,"
        words = f"{how} of {len(candidates.workers)} workers"
        terms = [
            f"{name} {score.value:.2f}" + (f" x {weight:g}" if weight != 1.0 else "")
            for (name, score), weight in zip(parts.items(), self._weights.values(), strict=True)
        ]
        return f"{words}: {' + '.join(terms)}" if terms else words


def round_robin() -> WeightedScores:
    """Workers take turns, whatever their load."""
    return WeightedScores("round_robin", {}, least)


def least_loaded() -> WeightedScores:
    """The worker with the fewest tokens."""
    return WeightedScores("least_loaded", {"load": 1.0}, least)


def power_of_two() -> WeightedScores:
    """Of two random workers the one with fewer tokens."""
    return WeightedScores("power_of_two", {"load": 1.0}, less_of_two)


def prefix_affinity() -> WeightedScores:
    """The worker with most of the prompt cached, unless it is overloaded."""
    return WeightedScores("prefix_affinity", {"prefix": 2.0, "load": 1.0}, least)


def weighted(argument: str) -> WeightedScores:
    """Scorers with weights, e.g. `prefix=2,load=1`; the default weight is 1.

    Raises:
        ValueError: a scorer is unknown or repeated, or its weight is not a number above 0.
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
    return WeightedScores(f"weighted:{argument}", weights)


def _weight(name: str, text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0.0 < weight < float("inf"):
        raise ValueError(f"the weight of {name} must be a number above 0, not {text!r}")
    return weight
