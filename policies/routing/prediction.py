"""What a request would find on each worker, and what it would take from those that are there.

    TTFT   = (prompt tokens ahead + own ones that are not cached) x fed_token_s + TPOT
             + wait for a seat
    TPOT   = (alone_s + others in the batch x sequence_s) / drafts
    others = those in the batch x (own tokens to compute x fed_token_s + output x sequence_s)
    cost   = TTFT + output x TPOT + others

Speeds are those that workers learn of their steps (`WorkerSpeed`), but for the means of what they
did last: an idle worker would be taken for as slow as it was when it was busy, and get no chance to
say otherwise. What is ahead by an old load has been worked on since. `drafts` is by how much the
request's own drafts would speed it up there, against those of the worker's mean request, at the
worker's price: slots that promise less are not verified. `others` is what everybody there loses by
it, all together (a congestion charge; Pigou 1920): without it everybody goes to the fastest worker
until that is no better than the slowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from policies.request_forecast import forecast
from policies.room import seated
from policies.routing.choosing import Score
from policies.routing.types import Candidate, RouteView
from policies.speculation.planning import MAX_DRAFT_TOKENS, capped, choose_proposer
from policies.types import ANY_PROPOSER, SpeculationMode, WorkerLoad, WorkerSpeed


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is foreseen of a request on a worker, leases behind its load left out.

    Attributes:
        score: the cost in seconds, and what each token leased there adds to it.
        draft_tokens: slots of a step that would pay.
    """

    score: Score
    ttft_s: float
    tpot_s: float
    cached_tokens: int
    draft_tokens: int


def predicted(
    request: RouteView,
    workers: Sequence[Candidate],
    cached_tokens: Sequence[int],
    *,
    drafts: bool = True,
) -> list[Prediction] | None:
    """Return what is foreseen on each worker; None where no one's speed is known.

    Args:
        cached_tokens: of the prompt, by worker.
        drafts: whether what drafting brings and costs counts.
    """
    speeds = _speeds([one.load.speed for one in workers])
    if speeds is None:
        return None
    return [
        _on(request, worker, speed, cached, drafts=drafts)
        for worker, speed, cached in zip(workers, speeds, cached_tokens, strict=True)
    ]


def _on(
    request: RouteView, worker: Candidate, speed: WorkerSpeed, cached: int, *, drafts: bool
) -> Prediction:
    load, mine, output = worker.load, request.sequences, request.output_tokens
    there = max(seated(worker.at), load.running + load.waiting)
    batch = min(there + mine, load.seats or there + mine)
    slots, gain = _drafts(request, load) if drafts else (0, 1.0)
    tpot_s = (speed.alone_s + (batch - 1) * speed.sequence_s) / gain
    own_s = (request.request.prompt_tokens - cached) * speed.fed_token_s
    ahead = max(load.prompt_tokens, worker.at.unstarted_prompt_tokens)
    ahead_s = max(ahead * speed.fed_token_s - worker.age_s, 0.0)
    ttft_s = ahead_s + own_s + tpot_s
    if load.seats:
        ttft_s += max(there + mine - load.seats, 0) * (own_s + output * tpot_s) / load.seats
    slower_s = mine * output * speed.sequence_s
    others_s = (batch - mine) * (own_s + slower_s)
    per_token_s = (own_s + 2.0 * slower_s) / max(request.most_tokens, 1)
    score = Score(ttft_s + output * tpot_s + others_s, per_token_s)
    return Prediction(score, ttft_s, tpot_s, cached, slots)


def _drafts(request: RouteView, load: WorkerLoad) -> tuple[int, float]:
    """Return the slots that pay for a request, and its tokens per step as multiples of the mean's.

    The mean request of a worker drafts as far as its running acceptance pays.
    """
    most = MAX_DRAFT_TOKENS if load.proposers else 0
    usual = 1.0 + _accepted(load.acceptance, load.price, most)[1]
    proposer, _ = choose_proposer(request.request, load)
    if proposer is None:
        return 0, 1.0 / usual
    if request.request.mode is SpeculationMode.AUTO and len(load.proposers) > 1:
        proposer = ANY_PROPOSER
    chance = forecast(request.request, load, proposer).acceptance
    slots, accepted = _accepted(chance, load.price, capped(MAX_DRAFT_TOKENS, request.request))
    return slots, (1.0 + accepted) / usual


def _accepted(chance: float, price: float, most: int) -> tuple[int, float]:
    """Return how many slots are worth more than the price, and the tokens that they bring."""
    slots, survival, tokens = 0, chance, 0.0
    while slots < most and survival > price:
        slots += 1
        tokens += survival
        survival *= chance
    return slots, tokens


def _speeds(told: Sequence[WorkerSpeed]) -> list[WorkerSpeed] | None:
    """Return every worker's speed, the mean where it is not known; None if none is."""
    known = [speed for speed in told if speed.alone_s > 0.0]
    if not known:
        return None
    if len(known) == len(told):
        return list(told)
    mean = WorkerSpeed(
        sequence_s=fmean(speed.sequence_s for speed in known),
        alone_s=fmean(speed.alone_s for speed in known),
        fed_token_s=fmean(speed.fed_token_s for speed in known),
    )
    return [speed if speed.alone_s > 0.0 else mean for speed in told]
