"""The search for workers with capacity for a request.

A request of a large pool compares some of the workers, and all of them only if none of these has
capacity. After a search without success, the next search for such a request compares only workers
that have changed since (`policies/full_workers.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from collections.abc import Set as AbstractSet
from itertools import takewhile
from operator import attrgetter
from typing import Final

from draftgate.gateway.dispatch.routing import MOST_COMPARED, Router, Usable, View
from draftgate.gateway.fleet import Fleet, FleetWorker
from draftgate.policies.capacity import NO_CAPACITY, CapacityNeed, WorkerUsage, longest_prompt
from draftgate.policies.full_workers import FullWorkers

_IS_OWN: Final = attrgetter("own")


class WorkerSearch:
    """The search of a queue. Use the object only on the thread of the event loop."""

    def __init__(self, fleet: Fleet, router: Router, *, binds_early: bool) -> None:
        """Search a fleet, which may start later.

        Args:
            router: chooses the workers of a large pool that a request compares.
            binds_early: whether workers without capacity count as usable.
        """
        self._fleet = fleet
        self._router = router
        self._binds_early = binds_early
        self._full = FullWorkers[FleetWorker]()
        self._searched: Sequence[FleetWorker] = ()  # the workers of the fleet in `_full`

    def mark(self, worker: FleetWorker | None) -> None:
        """Record that a worker may have more capacity than before, or any worker with None."""
        if worker is None:
            self._full.clear()
        else:
            self._full.mark(worker)

    def has_room(self, need: CapacityNeed, taken: AbstractSet[str]) -> bool:
        """Return whether an open worker has capacity that no request has claimed."""
        able = self._fleet.open_among(self._fleet.workers, need.offer)
        return any(self._with_capacity([one], need, taken)[0] for one in able)

    def find(
        self,
        need: CapacityNeed,
        view: View,
        *,
        avoid: AbstractSet[str],
        taken: AbstractSet[str],
    ) -> tuple[Usable, Sequence[FleetWorker]] | None:
        """Return the workers that may run a request, or None if no worker has capacity.

        The first part of the result is the workers with capacity and their usage. The second part
        is the workers that the routing policy compares, also those without capacity.

        Args:
            view: a function that returns the routing policy's view of the request.
            avoid: ids of workers that run the request only if no other worker is open.
            taken: ids of workers that other requests have claimed.
        """
        workers = self._fleet.workers
        compared: Sequence[FleetWorker] = workers
        if self._searched is workers and not self._full:
            candidates = None  # the usual case
        else:
            candidates = self._candidates(_kind(need, avoid, taken), need)
        if candidates is None:
            if len(workers) > MOST_COMPARED:
                compared = self._router.compared(view, workers)
            usable, longest = self._compare(compared, need, avoid, taken)
            if not usable and len(compared) < len(workers):  # most of the pool is full
                compared = workers
                usable, longest = self._compare(workers, need, avoid, taken)
        else:
            usable, longest = self._compare(candidates, need, avoid, taken)
        if not usable:
            kind, searched_all = _kind(need, avoid, taken), candidates is None
            self._full.record(kind, longest, searched_all=searched_all)
            return None
        if candidates is not None:  # the others have no capacity, but may hold the prompt
            compared = self._router.compared(view, workers)
            if len(compared) < len(workers):
                compared = [*compared, *(worker for worker, _ in usable)]
        return usable, compared

    def _candidates(self, kind: Hashable, need: CapacityNeed) -> list[FleetWorker] | None:
        """Return the workers that may have capacity for a request, or None if any may."""
        if self._searched is not self._fleet.workers:
            self._searched = self._fleet.workers
            self._full.clear()
        changed = self._full.candidates(kind, need.prompt_tokens)
        if changed is None:
            return None
        own = takewhile(_IS_OWN, self._fleet.workers)  # their loads change without a report
        return list(dict.fromkeys((*own, *changed)))

    def _compare(
        self,
        workers: Sequence[FleetWorker],
        need: CapacityNeed,
        avoid: AbstractSet[str],
        taken: AbstractSet[str],
    ) -> tuple[list[tuple[FleetWorker, WorkerUsage]], float]:
        """Search some workers, without those that the request avoids if another one is able."""
        able = self._fleet.open_among(workers, need.offer)
        if not avoid:
            return self._with_capacity(able, need, taken)
        others = [worker for worker in able if worker.worker_id not in avoid]
        if able and not others:
            of_fleet = self._fleet.open_among(self._fleet.workers, need.offer)
            avoids_all = all(one.worker_id in avoid for one in of_fleet)
            others = able if avoids_all else []
        return self._with_capacity(others, need, taken)

    def _with_capacity(
        self, workers: Sequence[FleetWorker], need: CapacityNeed, taken: AbstractSet[str]
    ) -> tuple[list[tuple[FleetWorker, WorkerUsage]], float]:
        """Return the workers with capacity that is not claimed, and the longest prompt of others.

        The second value is in tokens, and -1 if the others have no capacity.
        """
        usable, longest = [], float(NO_CAPACITY)
        for worker in workers:
            if worker.worker_id in taken:
                continue
            usage = worker.usage
            most = longest_prompt(usage, need.sequences, need.tpot_s)
            if self._binds_early or need.prompt_tokens <= most:
                usable.append((worker, usage))
            else:
                longest = max(longest, most)
        return usable, longest


def _kind(need: CapacityNeed, avoid: AbstractSet[str], taken: AbstractSet[str]) -> Hashable:
    """Return what a request needs except the memory for its prompt."""
    return need.sequences, need.tpot_s, need.offer, avoid, frozenset(taken)
