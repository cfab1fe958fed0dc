"""Routing, which chooses one of the workers with capacity for a request."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from draftgate.gateway.dispatch.decisions import PhaseDecision
from draftgate.gateway.dispatch.kv_pulls import KvPulls
from draftgate.gateway.fleet import FleetWorker
from draftgate.policies.capacity import CapacityNeed, WorkerUsage
from draftgate.policies.phases.apart import OneWorker
from draftgate.policies.phases.types import Apart, PhasePool, PhaseWorker, Together
from draftgate.policies.protocols import PhasesPolicy, RoutingPolicy
from draftgate.policies.routing.placement_history import PlacementHistory
from draftgate.policies.routing.preferences import NO_SERVERS, Preferences, by_session
from draftgate.policies.routing.promises import Promises
from draftgate.policies.routing.selection import Ranking, draw_some, spread
from draftgate.policies.routing.types import (
    Candidate,
    Candidates,
    Draw,
    PrefixPull,
    Route,
    RouteView,
)
from draftgate.policies.types import Role

View = Callable[[], RouteView]
"""A function that returns the current view of a request, called only for the policy."""

Usable = Sequence[tuple[FleetWorker, WorkerUsage]]
"""Workers with their usage."""


MOST_COMPARED: Final = 64
"""Maximum number of random workers that a decision compares, and of workers that hold the prompt.

A comparison takes about 20 us of CPU time per worker, so 1,000 workers would take 20 ms per
request. Of 64 random workers, at least 8 (`leases.MOST_OFFERS`) are among the best quarter of the
pool in 99% of all draws. (bench/results/scheduling.md, AMD EPYC Zen 3, 2026-11-23.)"""

TOGETHER: Final = OneWorker()

NOTHING_CACHED: Final[Mapping[str, int]] = MappingProxyType({})


class Routed(NamedTuple):
    """The worker of a request.

    Attributes:
        route: the decision, or None with only one worker to choose.
        choices: the workers that may be leased, the chosen worker first.
        begun_s, ended_s: the time of the decision, on the clock of spans.
        cached_blocks: leading blocks of the prompt that workers probably held before the decision,
            by worker id, without workers that hold none.
        phases: the decision of the phases policy, or None without a decision.
        decode: the worker that continues the request after its first token, or None if the request
            stays.
    """

    worker: FleetWorker
    route: Route | None = None
    choices: tuple[FleetWorker, ...] = ()
    begun_s: float = 0.0
    ended_s: float = 0.0
    cached_blocks: Mapping[str, int] = NOTHING_CACHED
    phases: PhaseDecision | None = None
    decode: Routed | None = None

    def reserve(self, request_id: str, need: CapacityNeed) -> None:
        """Count a request on its worker, and on the worker that continues it."""
        self.worker.reserve(request_id, need)
        if self.decode is not None:
            self.decode.worker.reserve(decode_id(request_id), need)
            self.decode.worker.await_blocks(decode_id(request_id))

    @property
    def reserved(self) -> tuple[FleetWorker, ...]:
        """The workers that count the request."""
        return (self.worker,) if self.decode is None else (self.worker, self.decode.worker)

    def release(self, request_id: str) -> None:
        """Stop counting a request that is not sent. The method is idempotent."""
        self.worker.release(request_id)
        if self.decode is not None:
            self.decode.worker.release(decode_id(request_id))


def decode_id(request_id: str) -> str:
    """Return the id with which a request continues after its first token."""
    return f"{request_id}.decode"


class Router:
    """A router that chooses workers by a policy, and informs the policy about sent requests.

    Attributes:
        history: the prompts that each worker may have cached.
        pulls: the links over which workers may pull prefixes.
        separates: whether the phases of requests may run on different workers.
        preferences: the operator's preferences among upstreams, or None without any.
        promises: the announced calls of sessions.
    """

    preferences: Preferences | None = None

    def __init__(
        self,
        policy: RoutingPolicy,
        draw: Draw,
        pulls: KvPulls,
        phases: PhasesPolicy = TOGETHER,
    ) -> None:
        """Use a routing policy exclusively.

        Args:
            draw: the policy's source of randomness.
            pulls: the links over which workers may pull prefixes.
            phases: decides whether prompt and output have different workers.
        """
        self.separates = phases.separates
        self._policy = policy
        self._phases = phases
        self._draw = draw
        self.pulls = pulls
        self.history = PlacementHistory()
        self.promises = Promises()

    def compared(self, view: View, workers: Sequence[FleetWorker]) -> Sequence[FleetWorker]:
        """Return the workers that a decision compares.

        These are all workers of a small pool. Of a large pool, they are random workers and workers
        that probably hold the prompt.
        """
        if len(workers) <= MOST_COMPARED:
            return workers
        some = draw_some(workers, MOST_COMPARED, self._draw)
        request = view()
        ids = [one.worker_id for one in workers]
        held = {*self.history.cached_blocks(ids, request.block_hashes), *(request.cached or ())}
        if held:
            known = {one.worker_id for one in some}
            others = [one for one in workers if one.worker_id in held - known]
            some = [*some, *draw_some(others, MOST_COMPARED, self._draw)]
        return some

    def choose(
        self,
        view: View,
        usable: Usable,
        workers: Sequence[FleetWorker],
        *,
        rivals: int = 0,
        has_blocks: bool = False,
    ) -> Routed:
        """Choose a worker for a request.

        Args:
            usable: the workers with capacity, and their usage. At least one is required.
            workers: the compared workers, also those without capacity, because they may hold a
                prefix. The policy is not needed for a single worker.
            rivals: number of other gateways whose requests to these workers are unknown.
            has_blocks: whether the request arrives with its KV blocks, so that it only decodes.
        """
        begun_s = time.monotonic()
        if len(workers) == 1:
            return Routed(usable[0][0], begun_s=begun_s, ended_s=time.monotonic())
        if self.preferences is not None:
            spares = self.preferences.spares
            usable = [pair for pair in usable if pair[0].worker_id not in spares] or usable
        if has_blocks and self.separates:
            usable = [pair for pair in usable if pair[0].role is not Role.PREFILL] or usable
        routed = self._choose(view, usable, workers, rivals)
        return routed._replace(begun_s=begun_s, ended_s=time.monotonic())

    def choose_phases(
        self,
        view: View,
        usable: Usable,
        full: Sequence[FleetWorker],
        workers: Sequence[FleetWorker],
        *,
        rivals: int = 0,
    ) -> Routed | None:
        """Choose the workers of a request's prompt and output, if `separates`.

        Args:
            usable, workers, rivals: as for `choose`.
            full: those of `workers` that accept requests, but have no capacity now.

        Returns:
            None if the request waits for capacity of a worker in `full`.
        """
        begun_s = time.monotonic()
        if len(workers) == 1:
            return self.choose(view, usable, workers)
        routed = self._choose_phases(view, usable, full, workers, rivals)
        return routed and routed._replace(begun_s=begun_s, ended_s=time.monotonic())

    def moved(self, view: View, worker: FleetWorker) -> None:
        """Report to the policy that a worker other than the chosen worker got the request."""
        self._placed(view(), worker.candidate(worker.usage))

    def _choose(
        self,
        view: View,
        usable: Usable,
        workers: Sequence[FleetWorker],
        rivals: int,
    ) -> Routed:
        """Choose a worker by the policy."""
        request = view()
        candidates, blocks = self._candidates(request, usable, workers)
        if len(usable) == 1:
            self._placed(request, candidates[0])
            return Routed(usable[0][0], cached_blocks=blocks)
        places = {one.worker_id: place for place, one in enumerate(candidates)}
        if self.promises:
            candidates = self.promises.add_to(candidates, self.pulls.now_s())
        allowed, servers = candidates, NO_SERVERS
        if request.session and not request.session_worker:
            servers = {worker.worker_id: worker.server or "" for worker, _ in usable}
        if self.preferences is not None:
            allowed = self.preferences.preferred(request, candidates, servers)
        elif servers:
            allowed = by_session(request, candidates, servers)
        route = self._policy.route(request, Candidates(allowed, rivals), self._draw)
        chosen = [places[offer.worker_id] for offer in route.offers]
        self._placed(request, candidates[chosen[0]])
        choices = tuple(usable[place][0] for place in chosen)
        return Routed(choices[0], route, choices, cached_blocks=blocks)

    def _choose_phases(
        self,
        view: View,
        usable: Usable,
        full: Sequence[FleetWorker],
        workers: Sequence[FleetWorker],
        rivals: int,
    ) -> Routed | None:
        """Choose the workers of prompt and output by the phases policy."""
        request, known = view(), {worker.worker_id: worker for worker in workers}
        everyone = [*usable, *((worker, worker.usage) for worker in full)]
        candidates, blocks = self._candidates(request, everyone, workers)
        states = [
            _phase_worker(known[one.worker_id], one, has_capacity=place < len(usable))
            for place, one in enumerate(candidates)
        ]

        def link(source: str, sink: str) -> float:
            return self.pulls.bytes_per_s(known[source], known[sink])

        choice = self._phases.choose(request, PhasePool(tuple(states), link, rivals))
        if choice is None:
            return None
        if isinstance(choice, Together):
            chosen = set(choice.worker_ids)
            allowed = [pair for pair in usable if pair[0].worker_id in chosen]
            routed = self._choose(view, allowed, workers, rivals)
            return routed._replace(phases=PhaseDecision(self._phases.name, choice.reason))
        everywhere = Candidates(candidates, rivals)
        prefill, decode = (
            self._offered(spread(request, everywhere, offers, self._draw), known, choice)
            for offers in (choice.prefill, choice.decode)
        )
        by_id = {one.worker_id: one for one in candidates}
        self._placed(request, by_id[prefill.worker.worker_id])
        self._record(request, by_id[decode.worker.worker_id])
        decided = PhaseDecision(
            self._phases.name,
            choice.reason,
            decode.worker.worker_id,
            choice.gain_s,
            choice.threshold_s,
        )
        return prefill._replace(cached_blocks=blocks, phases=decided, decode=decode)

    def _offered(
        self, offers: Ranking, workers: Mapping[str, FleetWorker], choice: Apart
    ) -> Routed:
        """Return the worker of a phase with its alternatives."""
        chosen = tuple(workers[one.worker_id] for one in offers)
        return Routed(chosen[0], Route(self._phases.name, tuple(offers), choice.reason), chosen)

    def _candidates(
        self, request: RouteView, usable: Usable, workers: Sequence[FleetWorker]
    ) -> tuple[tuple[Candidate, ...], Mapping[str, int]]:
        """Return the policy's view of workers, and the blocks that all workers probably hold."""
        ids = [worker.worker_id for worker in workers]
        blocks = self.history.cached_blocks(ids, request.block_hashes)
        if not (blocks or request.cached):
            return tuple([worker.candidate(at) for worker, at in usable]), blocks
        pulls = {}
        if blocks and self.pulls.measured:
            pulls = self._pulls(request, usable, workers, blocks)
        return _holding(request, usable, blocks, pulls), blocks

    def _pulls(
        self,
        request: RouteView,
        usable: Usable,
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
        if self.preferences is not None:
            self.preferences.placed(request, worker.worker_id)
        self._record(request, worker)

    def _record(self, request: RouteView, worker: Candidate) -> None:
        load = worker.load
        blocks = load.kv_total_tokens // request.block_tokens if request.block_hashes else 0
        self.history.record(worker.worker_id, request.block_hashes, blocks)


def _phase_worker(worker: FleetWorker, view: Candidate, *, has_capacity: bool) -> PhaseWorker:
    form = worker.kv_format
    token_bytes = 0 if form is None else form.token_bytes
    return PhaseWorker(view, worker.role, form, token_bytes, has_capacity)


def _holding(
    request: RouteView,
    usable: Usable,
    blocks: Mapping[str, int],
    pulls: Mapping[str, PrefixPull],
) -> tuple[Candidate, ...]:
    """Return the candidates with the parts of the prompt that they have cached or would pull."""
    size, most = request.block_tokens, request.request.prompt_tokens - 1
    found = []
    for worker, at in usable:
        held = blocks.get(worker.worker_id, 0)
        tokens = min(held * size, most) if held else 0
        known = None if request.cached is None else request.cached.get(worker.worker_id)
        if known is not None:
            tokens = known.tokens if known.is_exact else max(tokens, known.tokens)
        found.append(worker.candidate(at, tokens, pulls.get(worker.worker_id)))
    return tuple(found)
