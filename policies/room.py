"""Whether a worker has room for one more request: what binds late, and to whom.

A request that waits in the gateway can still go to any worker, and be overtaken by one that is
more urgent; on a worker it can do neither. So it is bound as late as keeps the worker busy: when
there is a seat, memory for its prompt, and no more prompt tokens ahead than the next steps take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from draftgate.policies.types import WorkerLoad

STEPS_AHEAD: Final = 2
"""Steps' worth of prompt tokens that a worker has before it: the one that runs and the next one.
With one, a step would now and then find less than it could take, as news of its end needs a moment
to the gateway and back."""

SPARE_SEATS: Final = 16
"""One request more than there are seats for so many of them waits on the worker itself, to take a
seat in the very step in which it becomes free: 4 of 64, none below 16."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What a worker has on its hands.

    Attributes:
        load: what it says.
        sequences: those sent to it that have not ended for their clients.
        started: of these, the ones with a first token; the worker may be done with them.
        unstarted_prompt_tokens: prompt tokens of those without a first token.
        tpot_s: the tightest time per token promised to one of them; None without one.
        others: sequences that other gateways have there, at least, by its load.
        gateways: that may send there, this one included.
    """

    load: WorkerLoad
    sequences: int = 0
    started: int = 0
    unstarted_prompt_tokens: int = 0
    tpot_s: float | None = None
    others: int = 0
    gateways: int = 1


@dataclass(frozen=True, slots=True)
class Need:
    """What a request takes of a worker.

    Attributes:
        sequences: its choices.
        prompt_tokens: of its prompt, which they share.
        most_tokens: of prompt and output of all of them.
        tpot_s: the time per token that it was promised; None without one.
    """

    sequences: int
    prompt_tokens: int
    most_tokens: int
    tpot_s: float | None = None


def has_room(at: Occupancy, need: Need) -> bool:
    """Return whether a request should go to a worker now.

    A worker that has nothing of this gateway's takes anything: it may be larger than what others
    ever leave. What others have sent to an upstream leaves at least half of its seats to this
    gateway: whoever sends without looking would get them all else, and of gateways that look, the
    first to come. What other gateways have sent to a worker leaves each its share: else who has a
    queue would take each seat that becomes free, and the next one's clients would wait for ever.
    """
    if not at.sequences:
        return True
    seats = usable_seats(at, need.tpot_s)
    theirs = min(at.others, seats - max(1, seats // at.gateways))
    others = min(at.load.others, seats // 2) + theirs
    if seated(at) + others + need.sequences > seats + seats // SPARE_SEATS:
        return False
    ahead = prompt_tokens_ahead(at)
    if at.load.step_tokens and ahead and ahead >= STEPS_AHEAD * at.load.step_tokens:
        return False
    if not at.load.kv_blocks_total:  # nobody knows
        return True
    free_tokens = at.load.kv_blocks_free * at.load.kv_block_tokens
    return ahead + need.prompt_tokens <= free_tokens


def shared(at: Occupancy, gateways: int) -> Occupancy:
    """Return what a worker that so many gateways send to has on its hands, others' included."""
    others = max(0, at.load.running + at.load.waiting - at.sequences)
    return replace(at, others=others, gateways=gateways)


def seated(at: Occupancy) -> int:
    """Return how many of those that this gateway sent have a seat, or are about to take one.

    Who is paused for a slow reader has none, nor who has all its tokens and only reads them: else
    some that stopped would keep all others out.
    """
    on_worker = at.load.running + at.load.waiting
    if at.others:  # whose paused ones are not told from ours
        return at.sequences
    return at.sequences - at.started + min(at.started - at.load.paused, on_worker)


def prompt_tokens_ahead(at: Occupancy) -> int:
    """Return prompt tokens ahead of a newcomer: those sent, or all that the worker tells of."""
    told = at.load.prompt_tokens if at.others else 0
    return max(at.unstarted_prompt_tokens, told)


def usable_seats(at: Occupancy, tpot_s: float | None = None) -> int:
    """Return how many sequences a worker can run with every promised time per token kept.

    A target that not even a lone sequence could have binds nobody. Unknown seats are unlimited.

    Args:
        tpot_s: a target to be kept beside those of the running.
    """
    seats = at.load.seats or _UNLIMITED
    targets = [target for target in (at.tpot_s, tpot_s) if target is not None]
    speed = at.load.speed
    if not targets or speed.sequence_s <= 0.0:
        return seats
    tightest = min(targets)
    alone_s = speed.tpot_s - speed.sequence_s * max(at.load.running - 1, 0)
    if alone_s > tightest:
        return seats
    more = math.floor(min((tightest - speed.tpot_s) / speed.sequence_s, seats))
    return max(1, min(seats, at.load.running + more))


_UNLIMITED: Final = 1 << 30
