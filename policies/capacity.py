"""The rule that decides whether a worker has capacity for one more request.

A request in the gateway's queue can still go to any worker, and a more urgent request can overtake
it. A request on a worker can do neither. So the gateway dispatches each request as late as keeps
the worker busy. A worker has capacity if it can run one more sequence and has memory for the
prompt. The prompt tokens ahead must also fit into its next steps.
"""

from __future__ import annotations

import math
from typing import Final

from draftgate.policies.types import WorkerLoad
from draftgate.policies.values import immutable, replace

STEPS_AHEAD: Final = 2
"""Prompt tokens that a worker holds, in steps: the running step and the next one. With one step,
some steps would not be full, because the end of a step and the next request take a moment to
arrive."""

SEQUENCES_PER_SPARE: Final = 16
"""Number of sequences per spare sequence. A worker gets one spare sequence for each 16 that it can
run: 4 for 64, and none below 16. A spare sequence waits on the worker and starts in the same
step in which another one ends."""


NO_CAPACITY: Final = -1
"""The longest prompt of a worker without capacity."""


@immutable
class WorkerUsage:
    """The load of a worker, and the requests that this gateway sent to it.

    Attributes:
        load: load that the worker reports.
        sequences: sequences of this gateway that have not ended for their clients.
        started: number of these with a first token, some of which the worker may have finished.
        unstarted_prompt_tokens: prompt tokens of sequences without a first token.
        tpot_s: tightest TPOT target among these requests, in seconds, or None.
        others: minimum number of sequences of other gateways, according to the worker's load.
        gateways: number of gateways that may send requests to the worker, including this gateway.
        arriving_tokens: tokens of sequences whose KV blocks are being copied to the worker. The
            load counts their memory as free.
    """

    load: WorkerLoad
    sequences: int = 0
    started: int = 0
    unstarted_prompt_tokens: int = 0
    tpot_s: float | None = None
    others: int = 0
    gateways: int = 1
    arriving_tokens: int = 0

    @property
    def free_tokens(self) -> int:
        """The tokens of a prompt for which the worker will have KV memory.

        The first sequence in the worker's queue may be a preempted one, and gets its memory first.
        """
        first = max(prompt_tokens_ahead(self), self.load.head_tokens)
        return self.load.kv_free_tokens - self.arriving_tokens - first


@immutable
class CapacityNeed:
    """The capacity that a request takes.

    Attributes:
        sequences: number of choices.
        prompt_tokens: tokens of the prompt, which the choices share.
        most_tokens: maximum number of prompt and output tokens of all choices.
        tpot_s: TPOT target in seconds, or None.
        offer: what only some workers have: the digest of a LoRA adapter, or the name of a model of
            upstreams. Empty if any worker may run the request.
        offline: whether the request takes no capacity from others, because its worker interrupts it
            for them.
    """

    sequences: int
    prompt_tokens: int
    most_tokens: int
    tpot_s: float | None = None
    offer: str = ""
    offline: bool = False


NO_NEED: Final = CapacityNeed(0, 0, 0)
"""The capacity that an offline request takes from others."""


def has_capacity(usage: WorkerUsage, need: CapacityNeed) -> bool:
    """Return whether the gateway should send a request to the worker now."""
    return need.prompt_tokens <= longest_prompt(usage, need.sequences, need.tpot_s)


def longest_prompt(usage: WorkerUsage, sequences: int, tpot_s: float | None = None) -> float:
    """Return the tokens of the longest prompt that the gateway should send to the worker now.

    The result is -1 if the worker has no capacity even for the shortest prompt, and infinite
    without a limit.

    Args:
        sequences: number of choices of the request.
        tpot_s: TPOT target of the request in seconds, or None.
    """
    # A worker without requests of this gateway takes any request, because the request may be larger
    # than the capacity that other gateways ever leave free.
    if not usage.sequences:
        return math.inf
    limit = sequence_limit(usage, tpot_s)
    # Foreign clients of an upstream ignore the load and would take all of its capacity, so they
    # count for at most half. Other gateways count for at most their equal shares. Otherwise a
    # gateway with a queue would take every sequence that ends, and the clients of this gateway
    # would starve.
    gateways = min(usage.others, limit - max(1, limit // usage.gateways))
    others = min(usage.load.others, limit // 2) + gateways
    running = active_sequences(usage) + others
    if running + sequences > limit + limit // SEQUENCES_PER_SPARE:
        return NO_CAPACITY
    ahead = prompt_tokens_ahead(usage)
    if usage.load.step_tokens and ahead and ahead >= STEPS_AHEAD * usage.load.step_tokens:
        return NO_CAPACITY
    if not usage.load.kv_blocks_total:  # unknown
        return math.inf
    return max(usage.free_tokens, NO_CAPACITY)


def missing_tokens(usage: WorkerUsage, need: CapacityNeed) -> int:
    """Return the prompt tokens of a request for which the worker has no free KV memory now."""
    if not usage.load.kv_blocks_total:  # unknown
        return 0
    return max(0, need.prompt_tokens - usage.free_tokens)


def without_request(usage: WorkerUsage, need: CapacityNeed) -> WorkerUsage:
    """Return the usage of a worker after the end of a request without a first token.

    The worker reports later how much KV memory is free then.
    """
    return replace(
        usage,
        sequences=usage.sequences - need.sequences,
        unstarted_prompt_tokens=usage.unstarted_prompt_tokens - need.prompt_tokens,
    )


def with_other_gateways(usage: WorkerUsage, gateways: int) -> WorkerUsage:
    """Return a worker's usage including the sequences of other gateways.

    Args:
        gateways: number of gateways that send requests to the worker, including this gateway.
    """
    others = max(0, usage.load.running + usage.load.waiting - usage.sequences)
    return replace(usage, others=others, gateways=gateways)


def active_sequences(usage: WorkerUsage) -> int:
    """Return the number of this gateway's sequences that run on the worker or wait there.

    The number excludes paused sequences, and complete sequences that clients still read. Otherwise
    a few stopped readers would block every other request.
    """
    on_worker = usage.load.running + usage.load.waiting
    if usage.others:  # The load does not report whose sequences are paused.
        return usage.sequences
    return usage.sequences - usage.started + min(usage.started - usage.load.paused, on_worker)


def prompt_tokens_ahead(usage: WorkerUsage) -> int:
    """Return the prompt tokens that the worker computes before those of a new request."""
    reported = usage.load.prompt_tokens if usage.others else 0
    return max(usage.unstarted_prompt_tokens, reported)


def sequence_limit(usage: WorkerUsage, tpot_s: float | None = None) -> int:
    """Return how many sequences a worker can run while it meets every TPOT target.

    A target that even a lone sequence would miss is ignored. An unknown limit counts as 2^30.

    Args:
        tpot_s: an additional TPOT target in seconds, or None.
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
