"""Scorers: what speaks against a worker, each from 0 (nothing) to 1.

`weighted:prefix=2,load=1` adds them up; the least sum wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from draftgate.policies.routing.prediction import predict
from draftgate.policies.routing.prefix_index import PrefixIndex
from draftgate.policies.routing.selection import Score
from draftgate.policies.routing.types import Candidate, RouteView

Scorer: TypeAlias = Callable[[RouteView, Sequence[Candidate], PrefixIndex], Sequence[Score]]
"""Returns the score of each candidate. Changes nothing."""

OVERLOAD: Final = 1.25
"""Beyond so many times the mean of all, what a worker has cached counts for nothing: consistent
hashing with bounded loads (Mirrokni et al. 2018) has its best balance of the two near there."""

STALE_S: Final = 1.0
"""The age at which a load is worth half: the second between two heartbeats."""


def load(request: RouteView, workers: Sequence[Candidate], _index: PrefixIndex) -> Sequence[Score]:
    """Tokens there, as a share of the most that would be anywhere."""
    there = [_tokens(request, one) for one in workers]
    leased = [tokens + one.leased_tokens for tokens, one in zip(there, workers, strict=True)]
    per_token = 1.0 / max(request.most_tokens + max(leased), 1)
    return [Score(tokens * per_token, per_token) for tokens in there]


def _tokens(request: RouteView, worker: Candidate) -> int:
    """Return the tokens on a worker; others' sequences that nobody counted are as this request."""
    uncounted = 0 if worker.load.kv_blocks_total else worker.load.others
    return worker.tokens + uncounted * request.most_tokens // max(request.sequences, 1)


def prefix(request: RouteView, workers: Sequence[Candidate], index: PrefixIndex) -> Sequence[Score]:
    """The share of the prompt that is not in the cache; all of it where there is too much to do."""
    mean = sum(one.tokens + one.leased_tokens for one in workers) / len(workers)
    most = OVERLOAD * (mean + request.most_tokens)
    prompt_tokens = max(request.request.prompt_tokens, 1)
    return [
        Score(
            1.0
            if one.tokens + one.leased_tokens > most
            else 1.0 - cached_tokens(request, one, index) / prompt_tokens
        )
        for one in workers
    ]


def price(
    _request: RouteView, workers: Sequence[Candidate], _index: PrefixIndex
) -> Sequence[Score]:
    """The tokens that a draft slot must promise there: at 1 nobody drafts."""
    return [Score(min(one.load.price, 1.0)) for one in workers]


def staleness(
    _request: RouteView, workers: Sequence[Candidate], _index: PrefixIndex
) -> Sequence[Score]:
    """How little the load tells, by its age."""
    return [Score(one.age_s / (one.age_s + STALE_S)) for one in workers]


def latency(
    request: RouteView, workers: Sequence[Candidate], index: PrefixIndex
) -> Sequence[Score]:
    """The seconds that `least_cost` predicts, as a share of the most anywhere; `load` if unknown.

    Whose load is old may be below nothing (`prediction`): the least is 0 then.
    """
    found = predict(request, workers, [cached_tokens(request, one, index) for one in workers])
    if found is None:
        return load(request, workers, index)
    scores = [one.score for one in found]
    least = min(0.0, *(score.value for score in scores))
    span = max(score.value for score in scores) - least
    return [Score((score.value - least) / span, score.per_token / span) for score in scores]


SCORERS: Final[Mapping[str, Scorer]] = {
    "load": load,
    "prefix": prefix,
    "price": price,
    "staleness": staleness,
    "latency": latency,
}

READ_PROMPTS: Final = frozenset({"prefix", "latency"})
"""Those that look at block hashes."""


def cached_tokens(request: RouteView, worker: Candidate, index: PrefixIndex) -> int:
    """Return how many of a prompt's tokens a worker may have cached; the last one is computed."""
    blocks = index.cached_blocks(worker.worker_id, request.block_hashes)
    return max(min(blocks * request.block_tokens, request.request.prompt_tokens - 1), 0)
