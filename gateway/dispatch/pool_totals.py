"""The loads of all workers as one pool, for forecasts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from draftgate.gateway.fleet import Fleet, FleetWorker
from draftgate.policies.admission.types import PoolView
from draftgate.policies.admission.wait_forecast import pool_of
from draftgate.policies.types import WorkerLoad

SMALL_POOL: Final = 64
"""Number of workers up to which each forecast uses the present loads."""

WORKER_PAUSE_S: Final = 2.5e-4
"""Time for which the loads of a large pool are used again, for each of its workers.

To read the loads takes about 5 us of CPU time per worker, and so at most 2% of a core, whatever the
size of the pool. 1,000 workers are read every 0.25 s, in which few of their requests end. (CPU time
on an AMD EPYC Zen 3, 2026-11-23.)"""

_STEPS: Final = 4
"""Sizes of sequences per factor of 2 that a large pool distinguishes. The error is at most 9%."""


class PoolTotals:
    """The loads of serving workers, read at one time.

    Attributes:
        max_sequences: number of sequences that all workers can run.
    """

    def __init__(self, fleet: Fleet) -> None:
        """Read the loads of a fleet."""
        self._loads: list[WorkerLoad] = []
        self.max_sequences = own = others = 0
        for worker in fleet.workers:
            if worker.backend.failure is not None:
                continue
            load = worker.backend.load()
            self._loads.append(load)
            self.max_sequences += load.max_sequences
            if not worker.own:
                usage = worker.usage
                own += usage.sequences
                others += usage.others
        own = max(1, own)
        self._share = own / (own + others)
        self._views: dict[int, PoolView] = {}  # by size of the sequences, in steps

    def view(self, sequence_tokens: float) -> PoolView:
        """Return the pool for sequences of an expected size, with this gateway's share of it."""
        if len(self._loads) <= SMALL_POOL:
            return pool_of(self._loads, sequence_tokens, self._share)
        step = round(_STEPS * math.log2(max(sequence_tokens, 1.0)))
        if step not in self._views:
            self._views[step] = pool_of(self._loads, 2.0 ** (step / _STEPS), self._share)
        return self._views[step]


class PoolReader:
    """A reader of a fleet's loads. Use the object only on the thread of the event loop."""

    def __init__(self, fleet: Fleet, now_s: Callable[[], float]) -> None:
        """Read a fleet, which may start later."""
        self._fleet = fleet
        self._now_s = now_s
        self._last: tuple[PoolTotals, tuple[FleetWorker, ...], float] | None = None

    def read(self) -> PoolTotals:
        """Return the present totals, or those of a large pool that were read shortly before."""
        workers = self._fleet.workers
        if len(workers) <= SMALL_POOL:
            return PoolTotals(self._fleet)
        now_s = self._now_s()
        if self._last is not None:
            totals, read, until_s = self._last
            if read is workers and now_s < until_s:
                return totals
        totals = PoolTotals(self._fleet)
        self._last = totals, workers, now_s + WORKER_PAUSE_S * len(workers)
        return totals
