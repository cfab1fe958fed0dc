"""How long a request would wait, and how much of the pool it takes.

    residence = prompt tokens x prompt_token_s + sequences x output tokens x tpot_s    in seats
    work      = residence / seats                                                in the whole pool
    wait      = what is ahead and one's work until a seat is free, less what free seats take at once
                or what the prompts ahead take to compute, if that is longer
    TTFT      = error x wait + own prompt tokens x prompt_token_s

Seats of servers that are all busy become free like a Poisson process, whatever the times of
service are (Palm, Khintchine: many independent renewals), so a wait W for requests of w each has
a variance of about W x w, and is longer than W + z sqrt(W w) with the chance that z has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from policies.admission.types import AdmissionView, PoolView
from policies.types import WorkerLoad, WorkerSpeed

Z_LATE: Final = 1.645
"""One in twenty waits is longer: the 95th percentile of a normal error. Admission promises a
deadline to who meets it with this chance."""

_LEARNING: Final = 0.05
_MOST_SURPRISE: Final = 1.0
"""A wait moves the forecasts' error by a twentieth of how far it was off, in logarithms, of which a
factor of e counts at most: a run of fifty is followed, a stall or two are not. (Chosen.)"""

_LEAST_WAIT_S: Final = 0.02
"""Added to both sides where waits are compared: below it, timers and the network tell more."""

_MOST_ERROR: Final = 20.0
"""Forecasts are corrected by this factor at most, either way."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is foreseen of a request.

    Attributes:
        wait_s: until it starts, or until the prompts before its own are computed.
        prompt_s: of its own prompt.
        work_s: of the whole pool that it takes; 0 where nobody knows.
        grain_s: work of a typical request that waits, by which waits are uncertain.
    """

    wait_s: float
    prompt_s: float
    work_s: float
    grain_s: float

    @property
    def ttft_s(self) -> float:
        """Seconds to its first token."""
        return self.wait_s + self.prompt_s

    def sure_wait_s(self, allowed_s: float) -> float:
        """Return the foreseen wait that is almost surely (`Z_LATE`) within what is allowed.

        The W for which `W + z sqrt(W x grain) = allowed`.
        """
        spread = Z_LATE * math.sqrt(self.grain_s)
        root = (math.sqrt(spread * spread + 4.0 * max(allowed_s, 0.0)) - spread) / 2.0
        return root * root


class WaitError:
    """How much longer waits are than foreseen: a running factor, as a mean of clipped logs."""

    def __init__(self) -> None:
        """Believe forecasts."""
        self._log = 0.0

    @property
    def factor(self) -> float:
        """By what a forecast has to be multiplied."""
        return math.exp(self._log)

    def learn(self, foreseen_s: float, waited_s: float) -> None:
        """Learn how long somebody waited for whom a wait was foreseen, this factor included.

        Nothing is learned of those who were to start at once: they say nothing about the queue.
        """
        if foreseen_s <= 0.0:
            return
        off = math.log((max(waited_s, 0.0) + _LEAST_WAIT_S) / (foreseen_s + _LEAST_WAIT_S))
        moved = self._log + _LEARNING * min(max(off, -_MOST_SURPRISE), _MOST_SURPRISE)
        self._log = min(max(moved, -math.log(_MOST_ERROR)), math.log(_MOST_ERROR))


def pool_of(loads: Iterable[WorkerLoad], sequence_tokens: float = 0.0) -> PoolView:
    """Return several workers as one pool; means are of those that have run something.

    Args:
        sequence_tokens: prompt and output of a typical sequence: KV memory may hold fewer of them
            than there are seats; 0 leaves it out.
    """
    workers = list(loads)
    seats = [_seats(load, sequence_tokens) for load in workers]
    speeds = [load.speed for load in workers if load.speed.tpot_s > 0]
    return PoolView(
        workers=len(workers),
        seats=sum(seats) if all(seats) else 0.0,
        running=sum(load.running + load.waiting for load in workers),
        prompt_tokens=sum(load.prompt_tokens for load in workers),
        speed=WorkerSpeed(
            _mean([speed.tpot_s for speed in speeds]),
            _mean([speed.prompt_token_s for speed in speeds if speed.prompt_token_s > 0]),
            _mean([speed.sequence_s for speed in speeds]),
        ),
    )


def forecast(view: AdmissionView, error: float = 1.0) -> Forecast:
    """Return what is foreseen of a request; its wait is 0 where nobody knows seats or speed.

    Args:
        error: `WaitError.factor`.
    """
    pool, queue = view.pool, view.queue
    prompt_s = view.prompt_tokens * pool.speed.prompt_token_s
    residence_s = prompt_s + view.sequences * view.output_tokens * pool.speed.tpot_s
    known = pool.seats > 0 and pool.speed.tpot_s > 0
    work_s = residence_s / pool.seats if known else 0.0
    grain_s = queue.work_s / queue.length if queue.length and known else work_s / view.sequences
    seats_free = max(pool.seats - pool.running, 0.0)
    wait_s = max(queue.ahead_s + grain_s - seats_free * grain_s, 0.0) if known else 0.0
    share_ahead = queue.ahead_s / queue.work_s if queue.work_s > 0 else 0.0
    prompts = pool.prompt_tokens + queue.prompt_tokens * share_ahead
    prompts_s = prompts * pool.speed.prompt_token_s / max(pool.workers, 1)
    return Forecast(error * max(wait_s, prompts_s), prompt_s, work_s, grain_s)


def _seats(load: WorkerLoad, sequence_tokens: float) -> float:
    if not sequence_tokens:
        return float(load.seats)
    in_memory = load.kv_blocks_total * load.kv_block_tokens / sequence_tokens
    return min(float(load.seats), max(in_memory, 1.0))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
