"""The effect of a move on the steps of both workers, and on the gateway's event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Final

from bench.gateway.moved_streams import BEGUN_TOKENS, Observed, job_of, run_job, until
from draftgate.gateway.assembly import loop_time_s
from draftgate.gateway.dispatch.dispatcher import Dispatcher
from draftgate.gateway.fleet import Fleet
from draftgate.loadgen.measuring.metrics import percentile
from draftgate.policies.moves import MoveReason
from draftgate.policies.rescheduling.types import ChosenMove, PoolState, StreamsOf

OTHER_TOKENS = 500
"""Context of the stream that stays on the destination."""

CONTEXT_TOKENS = 8000
"""Context at which a stream would end, which fits into a worker."""

ENOUGH_S = 0.5
"""Time of each round with both streams and without a move."""


class MovesOnRequest:
    """A rescheduling policy that moves a stream when it is told to.

    Attributes:
        source: id of the worker whose first stream moves next, or None.
    """

    name = "on_request"
    reschedules = True
    source: str | None = None

    def choose(self, pool: PoolState, streams_of: StreamsOf) -> Sequence[ChosenMove]:
        """Move the first stream of `source` to another worker."""
        if self.source is None:
            return []
        sink = next(one.worker_id for one in pool.workers if one.worker_id != self.source)
        return [
            ChosenMove(stream.stream_id, self.source, sink, MoveReason.BALANCE, 1.0, 0.0, "")
            for stream in streams_of(self.source)[:1]
        ]


async def measure_effects(
    dispatcher: Dispatcher,
    fleet: Fleet,
    tokens: int,
    rounds: int,
    policy: MovesOnRequest | None = None,
) -> dict[str, Any]:
    """Move streams to a worker that runs another stream.

    A pause between two deltas is a step of their worker. The steps of the source and of the
    destination are those before a move and during the copy. Afterwards the destination runs one
    more sequence. The deltas of the other stream are those before and during the whole move.

    Args:
        policy: policy of the dispatcher that moves the streams, or None to drain their worker.
    """
    names = ("source", "source_copies", "sink", "sink_copies", "other_moves")
    found: dict[str, list[float]] = {name: [] for name in names}
    turns, cpu_s, moved_s = [], [], []
    for number in range(rounds):
        other, moving = Observed(), Observed()
        jobs = [
            job_of(length, 55_000_000 + 2 * number + index, CONTEXT_TOKENS - length)
            for index, length in enumerate((OTHER_TOKENS, tokens))
        ]
        tasks = []
        for job, observed in zip(jobs, (other, moving), strict=True):
            tasks.append(asyncio.create_task(run_job(dispatcher, job, observed)))
            await until(partial(_has_begun, observed), tasks)
        since_s = loop_time_s()
        await asyncio.sleep(ENOUGH_S)
        source = moving.worker
        assert source is not None
        assert source is not other.worker  # the router prefers the idle worker
        began_s, began_cpu_s = loop_time_s(), time.process_time()
        with longest_turn() as turn:
            if policy is None:
                source.drained = True
            else:
                policy.source = source.worker_id
            await until(partial(_has_moved, moving), tasks)
        ended_s = loop_time_s()
        cpu_s.append(time.process_time() - began_cpu_s)
        if policy is not None:
            policy.source = None
        turns.append(turn)
        moved_s.append(ended_s - began_s)
        found["source"] += moving.gaps_s(since_s, began_s)
        found["source_copies"] += moving.gaps_s(began_s, moving.copied_s)
        found["sink"] += other.gaps_s(since_s, began_s)
        found["sink_copies"] += other.gaps_s(began_s, moving.copied_s)
        found["other_moves"] += other.gaps_s(began_s, ended_s)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        source.drained = False
        await until(lambda: not any(one.backend.load().running for one in fleet.workers))
    return {
        "tokens": tokens,
        "delta_s": {name: _quantiles(gaps) for name, gaps in found.items()},
        "deltas": {name: len(gaps) for name, gaps in found.items()},
        "source_step_ratio": _ratio(found["source_copies"], found["source"]),
        "sink_step_ratio": _ratio(found["sink_copies"], found["sink"]),
        "move_s": round(median(moved_s), 4),
        "gateway_cpu_s": round(median(cpu_s), 4),
        "longest_turn_s": max(turn.seconds for turn in turns),
        "longest_turn_cpu_s": max(turn.cpu_s for turn in turns),
    }


def _quantiles(gaps: Sequence[float]) -> dict[str, float]:
    ordered = sorted(gaps)
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: percentile(ordered, share) for name, share in shares.items()}


def _has_begun(observed: Observed) -> bool:
    return len(observed.times_s) >= BEGUN_TOKENS


def _has_moved(observed: Observed) -> bool:
    return bool(observed.resumes)


def _ratio(moving: Sequence[float], usual: Sequence[float]) -> float:
    return round(median(moving) / median(usual), 4)


# --- The longest callbacks of an asyncio event loop -----------------------------------------------


_RUN: Final = "_run"


@dataclass
class LongestTurn:
    """The longest callback so far.

    Attributes:
        seconds: its duration, including pauses of the thread by the system.
        cpu_s: the longest CPU time of a callback.
    """

    seconds: float = 0.0
    cpu_s: float = 0.0


@contextmanager
def longest_turn() -> Iterator[LongestTurn]:
    """Measure the callbacks of asyncio's own event loop while the context lasts.

    uvloop runs the same callbacks, but in C, where they cannot be timed.
    """
    found, run = LongestTurn(), getattr(asyncio.Handle, _RUN)

    def timed(handle: asyncio.Handle) -> None:
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        run(handle)
        found.cpu_s = max(found.cpu_s, time.thread_time() - began_cpu_s)
        found.seconds = max(found.seconds, time.perf_counter() - began_s)

    setattr(asyncio.Handle, _RUN, timed)
    try:
        yield found
    finally:
        setattr(asyncio.Handle, _RUN, run)
