"""Routing, which chooses one of the workers with capacity for a request."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from draftgate.gateway.dispatch.kv.pulls import KvPulls
from draftgate.gateway.fleet import FleetWorker
from draftgate.policies.capacity import WorkerUsage
from draftgate.policies.protocols import RoutingPolicy
from draftgate.policies.routing.placement_history import PlacementHistory
from draftgate.policies.routing.selection import draw_some
from draftgate.policies.routing.types import (
    Candidate,
    Candidates,
    Draw,
    PrefixPull,
    Route,
    RouteView,
)

View = Callable[[], RouteView]
"""A function that returns the current view of a request, called only for the policy."""


MOST_COMPARED: Final = 64
"""Maximum number of random workers that a decision compares, and of workers that hold the prompt.

A comparison takes about 20 us of CPU time per worker, so 1,000 workers would take 20 ms per
request. Of 64 random workers, at least 8 (`leases.MOST_OFFERS`) are among the best quarter of the
pool in 99% of all draws. (`draftgate bench scale`, AMD EPYC Zen 3, 2026-11-23.)"""

NOTHING_CACHED: Final[Mapping[str, int]] = MappingProxyType({})


class Routed(NamedTuple):
    """The worker of a request.

    Attributes:
        route: the decision, or None with only one worker to choose.
        choices: the workers that may be leased, the chosen worker first.
        begun_s, ended_s: the time of the decision, on the clock of spans.
        cached_blocks: leading blocks of the prompt that workers probably held before the decision,
            by worker id, without workers that hold none.
    """

    worker: FleetWorker
    route: Route | None = None
    choices: tuple[FleetWorker, ...] = ()
    begun_s: float = 0.0
    ended_s: float = 0.0
    cached_blocks: Mapping[str, int] = NOTHING_CACHED


class Router:
    """A router that chooses workers by a policy, and informs the policy about sent requests.

    Attributes:
        history: the prompts that each worker may have cached.
        pulls: the links over which workers may pull prefixes.
    """

    def __init__(self, policy: RoutingPolicy, draw: Draw, pulls: KvPulls) -> None:
        """Use a policy exclusively.

        Args:
            draw: the policy's source of randomness.
            pulls: the links over which workers may pull prefixes.
        """
        self._policy = policy
        self._draw = draw
        self.pulls = pulls
        self.history = PlacementHistory()

    def compared(self, view: View, workers: Sequence[FleetWorker]) -> Sequence[FleetWorker]:
        """Return the workers that a decision compares.

        These are all workers of a small pool. Of a large pool, they are random workers and workers
        that probably hold the prompt.
        """
        if len(workers) <= MOST_COMPARED:
            return workers
        some = draw_some(workers, MOST_COMPARED, self._draw)
        hashes = view().block_hashes
        held = self.history.cached_blocks([one.worker_id for one in workers], hashes)
        if held:
            known = {one.worker_id for one in some}
            others = [one for one in workers if one.worker_id in held.keys() - known]
            some = [*some, *draw_some(others, MOST_COMPARED, self._draw)]
        return some

    def choose(
        self,
        view: View,
        usable: Sequence[tuple[FleetWorker, WorkerUsage]],
        workers: Sequence[FleetWorker],
        *,
        rivals: int = 0,
    ) -> Routed:
        """Choose a worker for a request.

        Args:
            usable: the workers with capacity, and their usage. At least one is required.
            workers: the compared workers, also those without capacity, because they may hold a
                prefix. The policy is not needed for a single worker.
            rivals: number of other gateways whose requests to these workers are unknown.
        """
        begun_s = time.monotonic()
        if len(workers) == 1:
            return Routed(usable[0][0], begun_s=begun_s, ended_s=time.monotonic())
        routed = self._choose(view, usable, workers, rivals)
        return routed._replace(begun_s=begun_s, ended_s=time.monotonic())

    def moved(self, view: View, worker: FleetWorker) -> None:
        """Report to the policy that a worker other than the chosen worker got the request."""
        self._placed(view(), worker.candidate(worker.usage))

    def _choose(
        self,
        view: View,
        usable: Sequence[tuple[FleetWorker, WorkerUsage]],
        workers: Sequence[FleetWorker],
        rivals: int,
    ) -> Routed:
        """Choose a worker by the policy."""
        request = view()
        ids = [worker.worker_id for worker in workers]
        blocks = self.history.cached_blocks(ids, request.block_hashes)
        if blocks:
            pulls = self._pulls(request, usable, workers, blocks) if self.pulls.measured else {}
            candidates = _holding(request, usable, blocks, pulls)
        else:
            candidates = tuple([worker.candidate(at) for worker, at in usable])
        if len(usable) == 1:
            self._placed(request, candidates[0])
            return Routed(usable[0][0], cached_blocks=blocks)
        route = self._policy.route(request, Candidates(candidates, rivals), self._draw)
        places = {one.worker_id: place for place, one in enumerate(candidates)}
        chosen = [places[offer.worker_id] for offer in route.offers]
        self._placed(request, candidates[chosen[0]])
        choices = tuple(usable[place][0] for place in chosen)
        return Routed(choices[0], route, choices, cached_blocks=blocks)

    def _pulls(
        self,
        request: RouteView,
        usable: Sequence[tuple[FleetWorker, WorkerUsage]],
        workers: Sequence[FleetWorker],
        blocks: Mapping[str, int],
    ) -> dict[str, PrefixPull]:
        """Return the pulls from the worker that holds most of the prompt, by destination.

        Args:
            blocks: leading blocks that workers probably hold, by worker id.
        """
        most = max(blocks.values())
        holder = next(one for one in workers if blocks.get(one.worker_id) == most)
        most = min(most, (request.request.prompt_tokens - 1) // request.block_tokens)
        found = {}
        for worker, _ in usable:
            known = blocks.get(worker.worker_id, 0)
            offer = self.pulls.offer(holder, worker, known, most) if known < most else None
            if offer is not None:
                found[worker.worker_id] = offer
        return found

    def _placed(self, request: RouteView, worker: Candidate) -> None:
        """Report the worker of a request to the policy, and record what it will have cached."""
        self._policy.placed(request, worker)
        self.history.record(worker.worker_id, request.block_hashes, worker.load.kv_blocks_total)


def _holding(
    request: RouteView,
    usable: Sequence[tuple[FleetWorker, WorkerUsage]],
    blocks: Mapping[str, int],
    pulls: Mapping[str, PrefixPull],
) -> tuple[Candidate, ...]:
    """Return the candidates with the parts of the prompt that they have cached or would pull."""
    size, most = request.block_tokens, request.request.prompt_tokens - 1
    found = []
    for worker, at in usable:
        held = blocks.get(worker.worker_id, 0)
        tokens = min(held * size, most) if held else 0
        found.append(worker.candidate(at, tokens, pulls.get(worker.worker_id)))
    return tuple(found)
