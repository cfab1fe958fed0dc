"""The loads of all workers as one pool, for forecasts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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


class PoolReader:
    """A reader of the loads of a fleet, as one pool.

    Use the object only on the thread of the event loop.

    Attributes:
        max_sequences: number of sequences that all workers can run, as of the last `view`.
    """

    def __init__(self, fleet: Fleet, now_s: Callable[[], float]) -> None:
        """Read a fleet, which may start later."""
        self._fleet = fleet
        self._now_s = now_s
        self.max_sequences = 0
        self._loads: list[WorkerLoad] = []
        self._share = 1.0
        # Of a large pool, the workers whose loads are used again, and until when.
        self._workers: tuple[FleetWorker, ...] = ()
        self._until_s = 0.0
        self._views: dict[int, PoolView] = {}  # by size of the sequences, in steps

    def view(self, sequence_tokens: float) -> PoolView:
        """Return the pool for sequences of an expected size, with this gateway's share of it.

        The loads of a small pool are always the present ones.
        """
        workers = self._fleet.workers
        if len(workers) <= SMALL_POOL:
            self._read(workers)
        else:
            now_s = self._now_s()
            if workers is not self._workers or now_s >= self._until_s:
                self._read(workers)
                self._workers, self._until_s = workers, now_s + WORKER_PAUSE_S * len(workers)
                self._views = {}
        if len(self._loads) <= SMALL_POOL:
            return pool_of(self._loads, sequence_tokens, self._share)
        step = round(_STEPS * math.log2(max(sequence_tokens, 1.0)))
        if step not in self._views:
            self._views[step] = pool_of(self._loads, 2.0 ** (step / _STEPS), self._share)
        return self._views[step]

    def _read(self, workers: Sequence[FleetWorker]) -> None:
        """Read the loads of the workers that serve."""
        self._loads = loads = []
        most = own = others = 0
        for worker in workers:
            if worker.backend.failure is not None:
                continue
            load = worker.backend.load()
            loads.append(load)
            most += load.max_sequences
            if not worker.own:
                usage = worker.usage
                own += usage.sequences
                others += usage.others
        own = max(1, own)
        self.max_sequences, self._share = most, own / (own + others)
