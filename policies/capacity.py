"""Whether a worker can take one more request now.

A request in the gateway's queue can still go to any worker, and a more urgent one can overtake it.
On a worker it can do neither. So a request is dispatched as late as keeps the worker busy: when the
worker can run one more sequence, has memory for the prompt, and has no more prompt tokens ahead
than its next steps take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from draftgate.policies.types import WorkerLoad

STEPS_AHEAD: Final = 2
"""Steps' worth of prompt tokens that a worker holds: the running step and the next one. With one, a
step would sometimes not be full, because news of its end and the next request need a moment."""

SEQUENCES_PER_SPARE: Final = 16
"""Beyond its capacity a worker gets one more sequence for each 16 that it can run. The spare one
waits on the worker and starts in the very step in which another ends: 4 for 64, none below 16."""


@dataclass(frozen=True, slots=True)
class WorkerUsage:
    """The load of a worker, and the requests that this gateway sent there.

    Attributes:
        load: what the worker reports.
        sequences: sequences sent there that have not ended for their clients.
        started: of these, sequences with a first token; the worker may have finished them already.
        unstarted_prompt_tokens: prompt tokens of sequences without a first token.
        tpot_s: the tightest TPOT target among these requests; None without a target.
        others: sequences of other gateways on the worker, at least, according to its load.
        gateways: number of gateways that may send requests there, this one included.
    """

    load: WorkerLoad
    sequences: int = 0
    started: int = 0
    unstarted_prompt_tokens: int = 0
    tpot_s: float | None = None
    others: int = 0
    gateways: int = 1


@dataclass(frozen=True, slots=True)
class CapacityNeed:
    """The capacity that a request takes.

    Attributes:
        sequences: its choices.
        prompt_tokens: tokens of the prompt, which the choices share.
        most_tokens: prompt and output tokens of all choices.
        tpot_s: its TPOT target; None without one.
    """

    sequences: int
    prompt_tokens: int
    most_tokens: int
    tpot_s: float | None = None


def has_capacity(usage: WorkerUsage, need: CapacityNeed) -> bool:
    """Return whether a request should go to a worker now."""
    # Without requests of this gateway a worker takes anything: the request may be larger than
    # what other gateways ever leave free.
    if not usage.sequences:
        return True
    limit = sequence_limit(usage, need.tpot_s)
    # Foreign clients of an upstream count for at most half of its capacity: they do not look at
    # the load, and would take all of it. Other gateways count for at most their equal shares: one
    # with a queue would take every sequence that ends, and this gateway's clients would starve.
    gateways = min(usage.others, limit - max(1, limit // usage.gateways))
    others = min(usage.load.others, limit // 2) + gateways
    running = active_sequences(usage) + others
    if running + need.sequences > limit + limit // SEQUENCES_PER_SPARE:
        return False
    ahead = prompt_tokens_ahead(usage)
    if usage.load.step_tokens and ahead and ahead >= STEPS_AHEAD * usage.load.step_tokens:
        return False
    if not usage.load.kv_blocks_total:  # unknown
        return True
    free_tokens = usage.load.kv_blocks_free * usage.load.kv_block_tokens
    return ahead + need.prompt_tokens <= free_tokens


def with_other_gateways(usage: WorkerUsage, gateways: int) -> WorkerUsage:
    """Return a worker's usage with the sequences of other gateways included.

    Args:
        gateways: number of gateways that send requests there, this one included.
    """
    others = max(0, usage.load.running + usage.load.waiting - usage.sequences)
    return replace(usage, others=others, gateways=gateways)


def active_sequences(usage: WorkerUsage) -> int:
    """Return how many of this gateway's sequences run on the worker or are about to.

    Sequences that are paused for a slow reader do not count, nor those that are complete and only
    being read: otherwise a few stopped readers would keep every other request out.
    """
    on_worker = usage.load.running + usage.load.waiting
    if usage.others:  # the load does not say whose sequences are paused
        return usage.sequences
    return usage.sequences - usage.started + min(usage.started - usage.load.paused, on_worker)


def prompt_tokens_ahead(usage: WorkerUsage) -> int:
    """Return the prompt tokens that the worker computes before those of a new request."""
    reported = usage.load.prompt_tokens if usage.others else 0
    return max(usage.unstarted_prompt_tokens, reported)


def sequence_limit(usage: WorkerUsage, tpot_s: float | None = None) -> int:
    """Return how many sequences a worker can run with every TPOT target kept.

    A target that even a lone sequence would miss is ignored. An unknown limit is no limit.

    Args:
        tpot_s: a target to keep beside those of the running requests.
    """
    load, speed = usage.load, usage.load.speed
    limit = load.max_sequences or _UNLIMITED
    targets = [target for target in (usage.tpot_s, tpot_s) if target is not None]
    if not targets or speed.sequence_s <= 0.0:
        return limit
    tightest_s = min(targets)
    alone_s = speed.tpot_s - speed.sequence_s * max(load.running - 1, 0)
    if alone_s > tightest_s:
        return limit
    more = math.floor(min((tightest_s - speed.tpot_s) / speed.sequence_s, limit))
    return max(1, min(limit, load.running + more))


_UNLIMITED: Final = 1 << 30
