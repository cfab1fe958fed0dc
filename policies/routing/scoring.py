"""Routing by weighted scores (`weighted:SCORER=WEIGHT,...`) and baselines that use such scores.

A scorer rates each worker from 0 (best) to 1 (worst). The smallest weighted sum wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from draftgate.policies.free_memory import freeness as freeness_steps
from draftgate.policies.free_memory import headroom_tokens
from draftgate.policies.routing.prediction import predict
from draftgate.policies.routing.selection import Pick, Score, least, less_of_two, rank, spread
from draftgate.policies.routing.types import Candidate, Candidates, Draw, Route, RouteView

Scorer: TypeAlias = Callable[[RouteView, Sequence[Candidate]], Sequence[Score]]
"""A function that returns the score of each candidate without changing any state."""

OVERLOAD: Final = 1.25
"""Multiple of the mean load above which a worker gets no credit for its cache. Consistent hashing
with bounded loads (Mirrokni et al. 2018) balances load and cache hits best near this value."""

_STALE_S: Final = 1.0
"""Age of a load with a staleness of one half, in seconds: the interval between two heartbeats."""

MOST_OFFERS: Final = 64
"""Maximum number of offers in a decision, because a reservation checks each of them."""


def load(request: RouteView, workers: Sequence[Candidate]) -> Sequence[Score]:
    """Return the tokens on each worker, as a share of the largest total with this request."""
    tokens = [_tokens(request, worker) for worker in workers]
    leased = [
        own_tokens + worker.leased_tokens
        for own_tokens, worker in zip(tokens, workers, strict=True)
    ]
    per_token = 1.0 / max(request.most_tokens + max(leased), 1)
    return [Score(own_tokens * per_token, per_token) for own_tokens in tokens]


def _tokens(request: RouteView, worker: Candidate) -> int:
    """Return the tokens on a worker, assuming that uncounted sequences are like the request."""
    uncounted = 0 if worker.load.kv_blocks_total else worker.load.others
    return worker.tokens + uncounted * request.most_tokens // max(request.sequences, 1)


def prefix(request: RouteView, workers: Sequence[Candidate]) -> Sequence[Score]:
    """Return the share of the prompt that is not cached, or 1 for an overloaded worker.

    Tokens that the worker would pull count by the time of the pull, as a share of computing them.
    """
    tokens = [worker.tokens + worker.leased_tokens for worker in workers]
    most = OVERLOAD * (sum(tokens) / len(workers) + request.most_tokens)
    prompt_tokens = max(request.request.prompt_tokens, 1)
    return [
        Score(1.0 if own_tokens > most else 1.0 - _saved_tokens(worker) / prompt_tokens)
        for worker, own_tokens in zip(workers, tokens, strict=True)
    ]


def _saved_tokens(worker: Candidate) -> float:
    """Return the prompt tokens that a worker need not compute, by its cache and a pull."""
    pulled = 0.0 if worker.pull is None else worker.pull.saved_tokens
    return worker.cached_tokens + pulled


def price(_request: RouteView, workers: Sequence[Candidate]) -> Sequence[Score]:
    """Return the price of a draft slot on each worker, where 1 means no drafts."""
    return [Score(min(worker.load.price, 1.0)) for worker in workers]


def staleness(_request: RouteView, workers: Sequence[Candidate]) -> Sequence[Score]:
    """Return a score that grows with the age of each worker's load."""
    return [Score(worker.age_s / (worker.age_s + _STALE_S)) for worker in workers]


def latency(request: RouteView, workers: Sequence[Candidate]) -> Sequence[Score]:
    """Return the cost that `least_cost` predicts, as a share of the highest, or `load`."""
    predictions = predict(request, workers)
    if predictions is None:
        return load(request, workers)
    scores = [prediction.score for prediction in predictions]
    lowest = min(0.0, *(score.value for score in scores))  # Old loads can lead to negative levels.
    span = max(score.value for score in scores) - lowest
    return [Score((score.value - lowest) / span, score.per_token / span) for score in scores]


def freeness(request: RouteView, workers: Sequence[Candidate]) -> Sequence[Score]:
    """Return how much less freeness each worker would have than the freest one, as a share.

    The freeness is that after the request has joined (`free_memory`). Unlike `load`, it does not
    count tokens that requests may generate later, most of which end before. The headroom of urgent
    requests is free for other urgent ones, which therefore share few workers and leave the rest to
    usual requests. If a worker does not report its memory, the result is that of `load`.
    """
    if not all(worker.load.kv_blocks_total for worker in workers):
        return load(request, workers)
    sequences = [worker.sequences + request.sequences for worker in workers]
    urgent = request.request.service.priority < 0
    steps = [
        freeness_steps(
            worker.free_tokens
            - request.request.prompt_tokens
            + worker.cached_tokens
            - (0 if urgent else headroom_tokens(worker.load)),
            count,
        )
        for worker, count in zip(workers, sequences, strict=True)
    ]
    most = max(steps)
    span = max(most - min(steps), 1.0)
    return [
        Score((most - own) / span, 1.0 / (count * span))
        for own, count in zip(steps, sequences, strict=True)
    ]


SCORERS: Final[Mapping[str, Scorer]] = {
    "load": load,
    "freeness": freeness,
    "prefix": prefix,
    "price": price,
    "staleness": staleness,
    "latency": latency,
}

READ_PROMPTS: Final = frozenset({"prefix", "latency", "freeness"})
"""Scorers that read what is cached, for which the gateway needs block hashes."""


class WeightedScores:
    """Chooses the worker with the smallest weighted sum of scores.

    Without scorers, all workers are equal and take turns.

    Attributes:
        last_worker: id of the worker that got the latest request, or "" before the first.
    """

    def __init__(
        self,
        name: str,
        weights: Mapping[str, float],
        pick: Pick = spread,
    ) -> None:
        """Create a policy without placements.

        Args:
            weights: weights of scorers in `SCORERS`, by name.
            pick: chooses one of the ranked workers.
        """
        self._name = name
        self._weights = dict(weights)
        self._pick = pick
        self.last_worker = ""

    @property
    def name(self) -> str:
        return self._name

    @property
    def reads_prompts(self) -> bool:
        return not READ_PROMPTS.isdisjoint(self._weights)

    def route(self, request: RouteView, candidates: Candidates, draw: Draw) -> Route:
        workers = candidates.workers
        parts = {name: SCORERS[name](request, workers) for name in self._weights}
        sums = [
            Score(
                sum(weight * parts[name][place].value for name, weight in self._weights.items()),
                sum(
                    weight * parts[name][place].per_token for name, weight in self._weights.items()
                ),
            )
            for place in range(len(workers))
        ]
        ranking = rank(candidates, sums, self.last_worker)
        offers = self._pick(request, candidates, ranking, draw)
        chosen = [worker.worker_id for worker in workers].index(offers[0].worker_id)
        reason = self._reason({name: part[chosen] for name, part in parts.items()}, candidates)
        return Route(self._name, tuple(offers[:MOST_OFFERS]), reason)

    def placed(self, request: RouteView, worker: Candidate) -> None:
        self.last_worker = worker.worker_id

    def _reason(self, parts: Mapping[str, Score], candidates: Candidates) -> str:
        pick_name = "least" if parts else "next"
        if self._pick is less_of_two:
            pick_name = "less of two drawn"
        elif self._pick is spread and candidates.rivals:
            pick_name = f"drawn, with {candidates.rivals} other gateways,"
        words = f"{pick_name} of {len(candidates.workers)} workers"
        terms = [
            f"{name} {score.value:.2f}" + (f" x {weight:g}" if weight != 1.0 else "")
            for (name, score), weight in zip(parts.items(), self._weights.values(), strict=True)
        ]
        return f"{words}: {' + '.join(terms)}" if terms else words


def round_robin() -> WeightedScores:
    """Return a policy in which workers take turns, whatever their load."""
    return WeightedScores("round_robin", {}, least)


def least_loaded() -> WeightedScores:
    """Return a policy that chooses the worker with the fewest tokens."""
    return WeightedScores("least_loaded", {"load": 1.0}, least)


def freest() -> WeightedScores:
    """Return a policy that chooses the worker with the most free memory per sequence."""
    return WeightedScores("freeness", {"freeness": 1.0})


def power_of_two() -> WeightedScores:
    """Return a policy that draws two random workers and chooses the one with fewer tokens."""
    return WeightedScores("power_of_two", {"load": 1.0}, less_of_two)


def prefix_affinity() -> WeightedScores:
    """Return a policy that chooses the worker with most of the prompt cached, unless overloaded."""
    return WeightedScores("prefix_affinity", {"prefix": 2.0, "load": 1.0}, least)


def weighted(argument: str) -> WeightedScores:
    """Return a policy of weighted scorers such as `prefix=2,load=1`.

    The default weight is 1.

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
