"""`auto`: separate the phases of a request if this is predicted to save time for all requests.

    together = least cost of a worker, as in `routing.least_cost`
    apart    = cost of the prompt on one worker + cost of the output on another worker
    handover = visible transfer + a step + half a block x step_token_s
    apart if  together - apart > 2 x handover

The costs are those of `routing.prediction`. They contain the time that other requests lose, so a
prompt goes where it delays few outputs. Later prompts will delay the output in turn:

    delay = output x TPOT x share / (1 - share)

`share` is the share of time for prompts. If requests stay together, this is the mean of all
workers. If they do not, workers for prompts have all of it. The loads alone would not show this
difference: where all requests stay together, no single request gains much from leaving.

The transfer is visible as far as it does not overlap with the computation of later chunks
(`kv_transfer.visible_s`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from draftgate.policies.kv_transfer import PRIOR_LATENCY_S, visible_s
from draftgate.policies.phases.types import (
    Apart,
    PhaseChoice,
    PhasePool,
    PhaseWorker,
    Together,
    of_role,
    suppliers,
)
from draftgate.policies.rescheduling.room import COST_FACTOR
from draftgate.policies.rescheduling.types import LinkBandwidth
from draftgate.policies.routing.prediction import RoutePrediction, predict
from draftgate.policies.routing.selection import Score, rank
from draftgate.policies.routing.types import Candidate, Candidates, RouteView, ScoredWorker
from draftgate.policies.types import Role
from draftgate.policies.values import replace

MOST_SHARE: Final = 0.9
"""Largest share of time for prompts, because the delay has no bound near 1. (Chosen, not tuned,
2026-11-24.)"""


class Cheaper:
    """Chooses between one worker and two workers by their predicted costs."""

    name = "auto"
    separates = True

    def choose(self, request: RouteView, pool: PhasePool) -> PhaseChoice:
        usable = pool.usable
        everywhere = tuple(one.worker_id for one in usable)
        if request.request.max_tokens <= 1:
            return Together(everywhere, "the request has no further tokens")
        prompts = sum(one.candidate.load.speed.prompt_share for one in pool.workers)
        together = _leg(request, usable, pool.rivals, share=prompts / len(pool.workers))
        if together is None:
            return Together(everywhere, "no speed is known yet")
        pair = _best_pair(request, usable, pool, prompts)
        if pair is None:
            return Together(everywhere, "no two workers with known speeds exchange KV blocks")
        gain_s = together.best.level - pair.prefill.best.level - pair.decode.best.level
        threshold_s = COST_FACTOR * pair.handover_s
        one = together.words
        two = f"{pair.prefill.words} and {pair.decode.words}"
        if gain_s <= threshold_s:
            saves = f"two workers would save {gain_s:.3f} s of {threshold_s:.3f} s"
            return Together(everywhere, f"together on {one}; {saves}")
        words = f"apart on {two} instead of {one}: saves {gain_s:.3f} s, {threshold_s:.3f} s needed"
        offers = pair.prefill.ranking, pair.decode.ranking
        return Apart(*offers, words, gain_s, threshold_s)


class _Leg(NamedTuple):
    """The predicted costs of a phase, or of a request, on several workers.

    Attributes:
        ranking: the workers, that with the least cost first.
        prediction: the prediction for the first of them.
        share: share of time in which later prompts delay its output.
    """

    ranking: tuple[ScoredWorker, ...]
    prediction: RoutePrediction
    share: float

    @property
    def best(self) -> ScoredWorker:
        return self.ranking[0]

    @property
    def words(self) -> str:
        tpot_ms = 1e3 * self.prediction.tpot_s / (1.0 - self.share)
        times = f"TTFT {self.prediction.ttft_s:.3f} s, TPOT {tpot_ms:.1f} ms"
        return f"{self.best.worker_id} ({times})"


class _Pair(NamedTuple):
    prefill: _Leg
    decode: _Leg
    handover_s: float


def _leg(
    request: RouteView,
    workers: Sequence[PhaseWorker],
    rivals: int,
    *,
    share: float = 0.0,
    drafts: bool = True,
) -> _Leg | None:
    """Return the ranking of workers by predicted cost, or None if no speed is known."""
    candidates = tuple(worker.candidate for worker in workers)
    predictions = predict(request, candidates, gateways=rivals + 1, drafts=drafts)
    if predictions is None:
        return None
    share = min(share, MOST_SHARE)
    delays = share / (1.0 - share) * request.output_tokens
    scores = [
        Score(one.score.value + delays * one.tpot_s, one.score.per_token) for one in predictions
    ]
    ranking = tuple(rank(Candidates(candidates), scores, ""))
    ids = [one.worker_id for one in candidates]
    return _Leg(ranking, predictions[ids.index(ranking[0].worker_id)], share)


def _best_pair(
    request: RouteView, usable: Sequence[PhaseWorker], pool: PhasePool, prompts: float
) -> _Pair | None:
    """Return the best worker for the prompt, and the best other worker for the output.

    Args:
        prompts: sum of the workers' shares of time for prompts.
    """
    decode = of_role(usable, Role.DECODE)
    sources = list(suppliers(of_role(usable, Role.PREFILL), decode))
    # A worker of the prompt does not draft.
    prefill = _leg(_prompt_of(request), sources, pool.rivals, drafts=False) if sources else None
    if prefill is None:
        return None
    source = next(one for one in sources if one.worker_id == prefill.best.worker_id)
    sinks = [one for one in decode if source.can_supply(one)]
    pure = [one for one in sinks if one.role is Role.DECODE]
    share = 0.0 if pure else prompts / len(of_role(pool.workers, Role.PREFILL))
    uncached = [_uncached(one) for one in pure or sinks]
    output = _leg(_output_of(request), uncached, pool.rivals, share=share)
    if output is None:
        return None
    sink = next(one for one in sinks if one.worker_id == output.best.worker_id)
    able = {one.worker_id for one in sources if one.can_supply(sink)}
    ranking = tuple(one for one in prefill.ranking if one.worker_id in able)
    handover_s = _handover_s(request, source.candidate, sink, output.prediction, pool.link)
    return _Pair(prefill._replace(ranking=ranking), output, handover_s)


def _prompt_of(request: RouteView) -> RouteView:
    """Return a request that ends with its first token."""
    return replace(request, output_tokens=1.0)


def _output_of(request: RouteView) -> RouteView:
    """Return a request whose prompt has been computed."""
    return replace(request, request=replace(request.request, prompt_tokens=0))


def _uncached(worker: PhaseWorker) -> PhaseWorker:
    return replace(worker, candidate=replace(worker.candidate, cached_tokens=0, pull=None))


def _handover_s(
    request: RouteView,
    source: Candidate,
    sink: PhaseWorker,
    output: RoutePrediction,
    link: LinkBandwidth,
) -> float:
    """Return the predicted pause of the client between the two workers, in seconds.

    Args:
        output: the prediction for the destination.
    """
    prompt, speed = request.request.prompt_tokens, source.load.speed
    computed = prompt - source.cached_tokens
    chunks = math.ceil(computed / source.load.step_tokens) if source.load.step_tokens else 1
    num_bytes = (prompt - sink.candidate.cached_tokens) * sink.token_bytes
    transfer_s = num_bytes / link(source.worker_id, sink.worker_id)
    visible = visible_s(transfer_s, computed * speed.step_token_s, max(chunks, 1))
    last_s = sink.candidate.load.kv_block_tokens / 2 * sink.candidate.load.speed.step_token_s
    return PRIOR_LATENCY_S + visible + output.tpot_s + last_s
