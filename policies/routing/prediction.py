"""Predicted latency of a request on each worker, and the time that other requests lose.

    TTFT   = (prompt tokens ahead + own tokens to compute) x step_token_s + a step
             + own pull + wait for a free sequence + wait for memory
    TPOT   = step / tokens,    step = step_s + others in the batch x step_sequence_s
    tokens = 1 + sum over slots of (survival - price)
    others = weight of the others in the batch x (own tokens to compute x step_token_s
             + output / tokens x step_sequence_s) + wait of a preempted sequence
    wait for memory = missing tokens / tokens released per second (`free_memory`)
    cost   = weight x (TTFT + output x TPOT) + others

The weights are those of priority classes (`speculation.weights`).
A worker lacks memory if its prompts ahead and the request do not fit. If their output does not fit
either, before the first sequence ends, a sequence will be preempted, and waits for the rest.

The own tokens to compute are those that the worker neither has cached nor pulls from another
worker. It pulls them if that is faster (`policies.kv_transfer`). A pull delays no other request.

`tokens` is the number of tokens per step, less the cost of its drafts to other requests. `others`
is the total time that other requests lose (a congestion charge, Pigou 1920). Without this term,
every request would go to the fastest worker until it is no faster than the slowest worker.

Speeds are the step costs of each worker (`WorkerSpeed`), not measurements of its last steps. With
measurements, an idle worker would seem as slow as it was when busy, and would get no requests that
could correct this. For the same reason, workers of one numerics class use the mean speed of the
class, and all workers the mean acceptance.

At the decision, a worker has already processed part of the prompts in an old load, and part of the
later leases. Leases are added to a score later, one by one, so their processing time is subtracted
in advance. The subtracted time is all of the time since the report, if workers have enough work on
average. A worker with an empty load can therefore have a negative score. Subtracting at most the
work in the load is worse if workers have pauses, and no better otherwise. With reports 0 to 1 s old
and leases, the mean work ahead falls from 32 to 11 ms at a load of 0.1. It falls from 147 to 71 at
0.3 and from 756 to 707 at 0.7. Without leases it changes from 3.5 to 2.9, from 75 to 41, and from
747 to 755 (bench/results/herd.json, ten bursts, 2026-11-22).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final, NamedTuple

from msgspec import structs

from draftgate.policies.free_memory import release_rate
from draftgate.policies.routing.selection import Score
from draftgate.policies.routing.types import Candidate, RouteView
from draftgate.policies.speculation.draft_forecast import forecast_drafts
from draftgate.policies.speculation.planning import MAX_DRAFT_TOKENS, capped, choose_proposer_or_any
from draftgate.policies.speculation.weights import PRIORITY_FACTOR, weight
from draftgate.policies.types import RequestView, WorkerLoad, WorkerSpeed


@dataclass(frozen=True, slots=True)
class RoutePrediction:
    """The predicted course of a request on a worker, without leases outside the worker's load.

    Attributes:
        score: cost in seconds, and its rise with each leased token.
        draft_tokens: slots per step that are worth their price.
        pulled_tokens: further tokens that the worker will pull.
    """

    score: Score
    ttft_s: float
    tpot_s: float
    cached_tokens: int
    draft_tokens: int
    pulled_tokens: int = 0


def predict(
    request: RouteView,
    workers: Sequence[Candidate],
    *,
    gateways: int = 1,
    drafts: bool = True,
) -> list[RoutePrediction] | None:
    """Return a prediction for each worker, or None if no speed is known.

    Args:
        gateways: number of gateways with as many leases as this gateway, including this gateway.
        drafts: whether the gain and the cost of drafts count.
    """
    speeds = _speeds(workers)
    if speeds is None:
        return None
    acceptance = fmean(worker.load.acceptance for worker in workers)
    by_proposers = {worker.load.proposers: worker.load for worker in workers}
    chances = {
        proposers: acceptance_chance(request.request, structs.replace(load, acceptance=acceptance))
        if drafts
        else 0.0
        for proposers, load in by_proposers.items()
    }
    ahead_s = _prompts_ahead_s(request, workers, speeds, gateways)
    return [
        _predict_on(request, *each, chances[each[0].load.proposers])
        for each in zip(workers, speeds, ahead_s, strict=True)
    ]


def _prompts_ahead_s(
    request: RouteView, workers: Sequence[Candidate], speeds: Sequence[WorkerSpeed], gateways: int
) -> list[float]:
    """Return the seconds of prompts ahead on each worker, less the elapsed time.

    A result is negative by the part of the leases that the worker will have processed. All leases
    are assumed to be of requests like this one.
    """
    prompt_share = request.request.prompt_tokens / max(request.most_tokens, 1)
    reported_s, leased_s = [], 0.0
    for worker, speed in zip(workers, speeds, strict=True):
        reported_s.append(worker.prompt_tokens * speed.step_token_s)
        leased_s += worker.leased_tokens * prompt_share * speed.step_token_s
    busy_s = (sum(reported_s) + gateways * leased_s) / len(workers)
    return [
        ahead_s - min(worker.age_s, max(ahead_s, busy_s))
        for worker, ahead_s in zip(workers, reported_s, strict=True)
    ]


def _predict_on(
    request: RouteView,
    worker: Candidate,
    speed: WorkerSpeed,
    ahead_s: float,
    chance: float,
) -> RoutePrediction:
    slots, tokens = draft_gain(request.request, worker.load.price, chance)
    limit, own, on_worker = worker.load.max_sequences, request.sequences, worker.sequences
    batch = min(on_worker + own, limit or on_worker + own)
    step_s = speed.step_s + (batch - 1) * speed.step_sequence_s
    steps = request.output_tokens / tokens
    pulled, pull_s = _pulled(worker, speed)
    own_tokens = request.request.prompt_tokens - worker.cached_tokens - pulled
    own_s = own_tokens * speed.step_token_s
    ttft_s = max(ahead_s, 0.0) + own_s + pull_s + step_s
    if limit:
        ttft_s += max(on_worker + own - limit, 0) * (own_s + steps * step_s) / limit
    memory = _memory_waits(request, worker, step_s / tokens)
    ttft_s += memory.own_s
    slower_s = own * steps * speed.step_sequence_s
    others = batch - own + min(worker.load.urgent, batch - own) * (PRIORITY_FACTOR - 1.0)
    others_s = others * (own_s + slower_s) + memory.preempted_s
    alone_s = weight(None, request.request.service) * (ttft_s + steps * step_s)
    per_token_s = (own_s + 2.0 * slower_s) / max(request.most_tokens, 1) + memory.per_token_s
    score = Score(min(ahead_s, 0.0) + alone_s + others_s, per_token_s)
    return RoutePrediction(score, ttft_s, step_s / tokens, worker.cached_tokens, slots, pulled)


class _MemoryWaits(NamedTuple):
    """The waits for the KV memory of a worker in seconds, and their rise with each leased token."""

    own_s: float = 0.0
    preempted_s: float = 0.0
    per_token_s: float = 0.0


_NO_WAITS: Final = _MemoryWaits()


def _memory_waits(request: RouteView, worker: Candidate, tpot_s: float) -> _MemoryWaits:
    """Return the waits of a request and of the sequence that it preempts, if memory is short."""
    load = worker.load
    own_tokens = request.request.prompt_tokens - worker.cached_tokens
    left_tokens = worker.free_tokens - own_tokens
    if left_tokens >= request.output_tokens or not load.kv_blocks_total:
        return _NO_WAITS  # the usual case
    used_tokens = load.kv_total_tokens - load.kv_free_tokens
    rate = release_rate(used_tokens, request.output_tokens, tpot_s)
    if not rate:  # all of the memory is free
        return _NO_WAITS
    own_s = max(-left_tokens, 0) / rate
    return _MemoryWaits(own_s, (request.output_tokens - left_tokens) / rate - own_s, 1.0 / rate)


def _pulled(worker: Candidate, speed: WorkerSpeed) -> tuple[int, float]:
    """Return the tokens that a worker pulls, and the seconds of the pull."""
    pull = worker.pull
    if pull is None or pull.pull_s >= pull.tokens * speed.step_token_s:
        return 0, 0.0
    return pull.tokens, pull.pull_s


def draft_gain(request: RequestView, price: float, chance: float) -> tuple[int, float]:
    """Return the slots worth their price, and the tokens of a step less the cost to others."""
    slots, tokens, survival = 0, 1.0, chance
    most = capped(MAX_DRAFT_TOKENS, request)
    while slots < most and survival > price:
        slots += 1
        tokens += survival - price
        survival *= chance
    return slots, tokens


def acceptance_chance(request: RequestView, load: WorkerLoad) -> float:
    """Return the probability of a draft token given all tokens before it, or 0 without drafts."""
    proposer = choose_proposer_or_any(request, load)
    return 0.0 if proposer is None else forecast_drafts(request, load, proposer).acceptance


def _speeds(workers: Sequence[Candidate]) -> list[WorkerSpeed] | None:
    """Return a speed for each worker, or None if no speed is known.

    A worker without a known speed gets the mean of all workers.
    """
    by_kind: dict[str, list[WorkerSpeed]] = {}
    for worker in workers:
        if worker.load.speed.step_s > 0.0:
            by_kind.setdefault(_kind(worker), []).append(worker.load.speed)
    if not by_kind:
        return None
    means = {kind: _mean(speeds) for kind, speeds in by_kind.items()}
    overall = _mean([speed for speeds in by_kind.values() for speed in speeds])
    found = []
    for worker in workers:
        mean, own = means.get(_kind(worker), overall), worker.load.speed
        # The cost of an additional sequence depends on the contexts on that worker.
        if own.step_s > 0.0:
            mean = replace(mean, step_sequence_s=own.step_sequence_s)
        found.append(mean)
    return found


def _kind(worker: Candidate) -> str:
    """Return the numerics class of a worker, or a unique name without a class."""
    return worker.numerics_class or f"only {worker.worker_id}"


def _mean(speeds: Sequence[WorkerSpeed]) -> WorkerSpeed:
    return WorkerSpeed(
        step_s=fmean(speed.step_s for speed in speeds),
        step_sequence_s=fmean(speed.step_sequence_s for speed in speeds),
        step_token_s=fmean(speed.step_token_s for speed in speeds),
    )
