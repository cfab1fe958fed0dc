"""What a request would find on each worker, and what it would take from those that are there.

    TTFT   = (prompt tokens ahead + own ones that are not cached) x step_token_s + a step
             + wait for a seat
    TPOT   = step / tokens,    step = step_s + others in the batch x step_sequence_s
    tokens = 1 + sum over slots of what each survives with, less the worker's price
    others = those in the batch x (own tokens to compute x step_token_s
             + output / tokens x step_sequence_s)
    cost   = TTFT + output x TPOT + others

Speeds are those of the worker's step costs (`WorkerSpeed`), not the means of what it did last: an
idle worker would be taken for as slow as it was when it was busy, and get no chance to say
otherwise. For the same reason workers of one numerics class, which are alike, have the means of
their class, and all have the same acceptance. `tokens` is what drafts bring for what they cost all
others there. `others` is what everybody there loses by the request, all together (a congestion
charge; Pigou 1920): without it everybody goes to the fastest worker until that is no better than
the slowest.

What is ahead by an old load has been worked on since, and so has what was leased meanwhile, as far
as there was so much. Leases come on top of a score one by one, so the time in which they are worked
on is taken off before they are known: all that has passed where workers have on average as much to
do, so that one whose load was empty is below nothing. Against taking off no more than was ahead,
requests find less work before them where workers have pauses, and no more where they have none: by
heartbeats (ages of 0 to 1 s) a mean of 11 ms in place of 32 at a load of 0.1, 71 for 147 at 0.3 and
707 for 756 at 0.7 with leases, of 2.9 for 3.5, 41 for 75 and 755 for 747 without (the model of
`draftgate bench herd --utilisation`, a seed of ten bursts, 2026-11-22).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from msgspec import structs

from draftgate.policies.routing.selection import Score
from draftgate.policies.routing.types import Candidate, RouteView
from draftgate.policies.speculation.draft_forecast import forecast
from draftgate.policies.speculation.planning import MAX_DRAFT_TOKENS, capped, choose_proposer
from draftgate.policies.types import ANY_PROPOSER, SpeculationMode, WorkerLoad, WorkerSpeed


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is predicted of a request on a worker, leases behind its load left out.

    Attributes:
        score: the cost in seconds, and what each token leased there adds to it.
        draft_tokens: slots of a step that would pay.
    """

    score: Score
    ttft_s: float
    tpot_s: float
    cached_tokens: int
    draft_tokens: int


def predict(
    request: RouteView,
    workers: Sequence[Candidate],
    cached_tokens: Sequence[int],
    *,
    gateways: int = 1,
    drafts: bool = True,
) -> list[Prediction] | None:
    """Return what is predicted on each worker; None where no one's speed is known.

    Args:
        cached_tokens: of the prompt, by worker.
        gateways: that are taken to have leased as much as is known here, this one included.
        drafts: whether what drafting brings and costs counts.
    """
    speeds = _speeds(workers)
    if speeds is None:
        return None
    chances = _Chances(request, fmean(worker.load.acceptance for worker in workers))
    found = []
    ahead_s = _ahead_s(request, workers, speeds, gateways)
    for there in zip(workers, speeds, ahead_s, cached_tokens, strict=True):
        slots, tokens = chances.drafted(there[0].load) if drafts else (0, 1.0)
        found.append(_on(request, *there, slots, tokens))
    return found


def _ahead_s(
    request: RouteView, workers: Sequence[Candidate], speeds: Sequence[WorkerSpeed], gateways: int
) -> list[float]:
    """Return the seconds of prompts ahead by each load, less what was worked on since then.

    Below 0 by what will have been worked on of the leases behind it, which come on top. They are
    taken to be of requests like this one.
    """
    prompt_share = request.request.prompt_tokens / max(request.most_tokens, 1)
    told_s, leased_s = [], 0.0
    for worker, speed in zip(workers, speeds, strict=True):
        told_s.append(worker.prompt_tokens * speed.step_token_s)
        leased_s += worker.leased_tokens * prompt_share * speed.step_token_s
    busy_s = (sum(told_s) + gateways * leased_s) / len(workers)
    return [
        ahead_s - min(worker.age_s, max(ahead_s, busy_s))
        for worker, ahead_s in zip(workers, told_s, strict=True)
    ]


def _on(
    request: RouteView,
    worker: Candidate,
    speed: WorkerSpeed,
    ahead_s: float,
    cached: int,
    slots: int,
    tokens: float,
) -> Prediction:
    """Return what is predicted on a worker where each step brings so many tokens."""
    limit, mine, there = worker.load.max_sequences, request.sequences, worker.sequences
    batch = min(there + mine, limit or there + mine)
    step_s = speed.step_s + (batch - 1) * speed.step_sequence_s
    steps = request.output_tokens / tokens
    own_s = (request.request.prompt_tokens - cached) * speed.step_token_s
    ttft_s = max(ahead_s, 0.0) + own_s + step_s
    if limit:
        ttft_s += max(there + mine - limit, 0) * (own_s + steps * step_s) / limit
    slower_s = mine * steps * speed.step_sequence_s
    others_s = (batch - mine) * (own_s + slower_s)
    per_token_s = (own_s + 2.0 * slower_s) / max(request.most_tokens, 1)
    score = Score(min(ahead_s, 0.0) + ttft_s + steps * step_s + others_s, per_token_s)
    return Prediction(score, ttft_s, step_s / tokens, cached, slots)


class _Chances:
    """How a request's drafts would fare, by what a worker can draft with."""

    def __init__(self, request: RouteView, usual: float) -> None:
        """Look at a request; `usual` is the acceptance of those of which nothing is known."""
        self._request = request.request
        self._usual = usual
        self._most = capped(MAX_DRAFT_TOKENS, self._request)
        self._by_proposers: dict[tuple[str, ...], float] = {}

    def drafted(self, load: WorkerLoad) -> tuple[int, float]:
        """Return the slots that pay, and the tokens of a step less what the slots cost others."""
        if load.proposers not in self._by_proposers:
            self._by_proposers[load.proposers] = self._chance(load)
        chance = survival = self._by_proposers[load.proposers]
        slots, tokens = 0, 1.0
        while slots < self._most and survival > load.price:
            slots += 1
            tokens += survival - load.price
            survival *= chance
        return slots, tokens

    def _chance(self, load: WorkerLoad) -> float:
        """Return the chance of a drafted token, all before it being right; 0 without drafts."""
        proposer, _ = choose_proposer(self._request, load)
        if proposer is None:
            return 0.0
        if self._request.mode is SpeculationMode.AUTO and len(load.proposers) > 1:
            proposer = ANY_PROPOSER
        return forecast(
            self._request, structs.replace(load, acceptance=self._usual), proposer
        ).acceptance


def _speeds(workers: Sequence[Candidate]) -> list[WorkerSpeed] | None:
    """Return the speed of each worker, the mean of all where it is not known; None if none is."""
    known: dict[str, list[WorkerSpeed]] = {}
    for worker in workers:
        if worker.load.speed.step_s > 0.0:
            known.setdefault(_kind(worker), []).append(worker.load.speed)
    if not known:
        return None
    means = {kind: _mean(speeds) for kind, speeds in known.items()}
    unknown = _mean([speed for speeds in known.values() for speed in speeds])
    found = []
    for worker in workers:
        mean, own = means.get(_kind(worker), unknown), worker.load.speed
        # What one more costs depends on the contexts of those that are there.
        found.append(
            replace(mean, step_sequence_s=own.step_sequence_s) if own.step_s > 0.0 else mean
        )
    return found


def _kind(worker: Candidate) -> str:
    """Return what workers that are alike have in common; only its id where nothing is promised."""
    return worker.numerics_class or f"only {worker.worker_id}"


def _mean(speeds: Sequence[WorkerSpeed]) -> WorkerSpeed:
    return WorkerSpeed(
        step_s=fmean(speed.step_s for speed in speeds),
        step_sequence_s=fmean(speed.step_sequence_s for speed in speeds),
        step_token_s=fmean(speed.step_token_s for speed in speeds),
    )
