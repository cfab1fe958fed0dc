"""Placing a request: can it run at all, and, once its worker is known, how far may it speculate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from draftgate.backends.core.prefix_cache import extend_chain
from draftgate.backends.errors import BackendFailed, RequestRejected
from draftgate.backends.types import GenerationRequest, SpeculationOutcome, Task
from draftgate.gateway.dispatch.decisions import Decisions
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.routing import Routed
from draftgate.gateway.errors import InvalidRequest
from draftgate.gateway.fleet import Fleet, FleetWorker
from draftgate.gateway.offload import offload
from draftgate.gateway.state.store import Reservation
from draftgate.policies.capacity import CapacityNeed
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.routing.types import RouteView
from draftgate.policies.speculation.acceptance_history import AcceptanceHistory
from draftgate.policies.speculation.cluster_price import MeanNeed, projected
from draftgate.policies.types import (
    PROPOSER_MODES,
    RequestView,
    SpeculationMode,
    SpeculationPlan,
    WorkerLoad,
)

UNDECIDED: Final = SpeculationPlan("", SpeculationMode.OFF, None, 0, "not decided yet")
"""The plan of a request that has no worker yet."""

NOTHING_TO_DRAFT: Final = SpeculationPlan(
    "none", SpeculationMode.OFF, None, 0, "a prompt that is embedded has no output"
)

INLINE_PROMPTS: Final = 64
INLINE_TOKENS: Final = 16 << 10
"""More prompts, and longer ones, are checked in a thread: so many take some 0.5 and 0.4 ms (one
core, Zen 4, 2026-11-21). There the blocks of longer ones are hashed, too: 1.8 us each. Those of all
are where prompts decide where requests go: 1.8 ms for so many tokens."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A request with the decision how far it may speculate, and the worker it goes to.

    Attributes:
        view, load: what the decision was made from.
    """

    request: GenerationRequest
    worker: FleetWorker
    view: RequestView
    load: WorkerLoad


def need_of(request: GenerationRequest) -> CapacityNeed:
    """Return what a request takes of a worker; what its choices have said is computed anew."""
    kept = sum(len(choice.output_ids) for choice in request.resumed)
    prompt_tokens = len(request.prompt_ids) + kept
    return CapacityNeed(
        len(request.choices), prompt_tokens, request.most_tokens, request.service.tpot_s
    )


class Placer:
    """Sizes requests, and decides about their speculation; remembers how drafts fared."""

    def __init__(
        self,
        fleet: Fleet,
        policy: SpeculationPolicy,
        decisions: Decisions,
        *,
        reads_prompts: bool,
    ) -> None:
        """Place requests on the workers of a fleet, which serve the same model.

        Args:
            reads_prompts: whether prompts decide which of several workers a request goes to.
        """
        self._fleet = fleet
        self._policy = policy
        self._decisions = decisions
        self._reads_prompts = reads_prompts
        self._history = AcceptanceHistory()
        self._usual = MeanNeed()

    async def size(self, job: Job) -> tuple[GenerationRequest, ...]:
        """Return a request for each prompt of a job, sized and checked, without a plan.

        Where that takes long it is done in a thread: a grammar is compiled by then, and long
        prompts are looked through and hashed.

        Raises:
            InvalidRequest: the client asked for a proposer the workers do not have, or for more
                tokens at least than at most.
            RequestRejected: the job can never run here.
            BackendFailed: no worker is left.
        """
        workers = self._fleet.serving
        if not workers:
            raise BackendFailed(self._fleet.outage)
        unhashed = 0 if self._reads_prompts and len(self._fleet.workers) > 1 else INLINE_TOKENS
        if job.grammar is not None:
            return await offload(_all_sized, job, workers, unhashed)
        if len(job.prompts) > INLINE_PROMPTS or sum(map(len, job.prompts)) > INLINE_TOKENS:
            return await offload(_all_sized, job, workers[:1], unhashed)
        return _all_sized(job, workers[:1], unhashed)

    def route_view(
        self, job: Job, index: int, request: GenerationRequest, expected_tokens: float
    ) -> RouteView:
        """Return what a routing policy may know of one prompt of a job.

        Args:
            expected_tokens: of output of each of its sequences.
        """
        first = self._fleet.any.backend
        return RouteView(
            self._view(job, index, request, first.card.model_id),
            request.most_tokens,
            expected_tokens,
            request.n,
            job.tenant,
            request.block_hashes,
            first.load().kv_block_tokens,
        )

    def place(
        self,
        job: Job,
        index: int,
        request: GenerationRequest,
        routed: Routed,
        reservation: Reservation,
    ) -> Placement:
        """Decide how far a job's sized request may speculate on its worker, and record it.

        It is decided by the load that the worker will have when what all gateways have leased there
        has arrived. About one that is to be embedded nothing is decided.

        Args:
            reservation: of the worker's capacity.
        """
        worker = routed.worker
        load = projected(worker.backend.load(), reservation.behind_tokens, self._usual.need)
        self._note(request, reservation)
        view = self._view(job, index, request, worker.backend.card.model_id)
        if job.task is Task.EMBED:
            plan = NOTHING_TO_DRAFT
        else:
            plan = self._policy.decide(view, load)
            self._decisions.record(
                *(job.request_id, worker.worker_id, view, load, plan, routed.route),
                load_age_s=worker.load_age_s,
                degraded=reservation.degraded,
            )
        return Placement(request.planned(plan), worker, view, load)

    def learn(self, placed: Placement, outcome: SpeculationOutcome) -> None:
        """Remember how a choice's drafts fared; what a grammar forces tells nothing of others."""
        request = placed.request
        if request.grammar is None:
            self._history.learn(
                request.tenant,
                placed.worker.backend.card.model_id,
                greedy=request.sampling.temperature == 0,
                drafted=outcome.num_drafted_tokens,
                histogram=outcome.acceptance_histogram,
            )

    def _note(self, request: GenerationRequest, reservation: Reservation) -> None:
        """Note what a request takes: others' are told in tokens only."""
        if reservation.lease is not None:
            self._usual.note(replace(need_of(request), most_tokens=reservation.lease.tokens))

    def _view(self, job: Job, index: int, request: GenerationRequest, model: str) -> RequestView:
        """Return what a policy may know of one prompt of a job.

        Of choices that go on, as if what the shortest has said was prompt.
        """
        kept = min(len(choice.output_ids) for choice in request.choices)
        temperature = job.sampling.temperature
        of_tenant, of_model = self._history.of(job.tenant, model, greedy=temperature == 0)
        return RequestView(
            len(request.prompt_ids) + kept,
            request.sampling.max_tokens - kept,
            temperature,
            job.mode,
            job.max_draft_tokens,
            job.service,
            job.repetitions[index] if job.repetitions else None,
            of_tenant,
            of_model,
        )


def _all_sized(
    job: Job, workers: Sequence[FleetWorker], unhashed: int
) -> tuple[GenerationRequest, ...]:
    """Return every prompt's request; all of these workers know its grammar then.

    Args:
        unhashed: prompts of so many tokens or fewer are not hashed.
    """
    for worker in workers[1:]:
        _sized(job, 0, worker)
    first = workers[0]
    sized = (_sized(job, index, first) for index in range(len(job.prompts)))
    return tuple(
        request if len(request.prompt_ids) <= unhashed else _hashed(request, first)
        for request in sized
    )


def _hashed(request: GenerationRequest, worker: FleetWorker) -> GenerationRequest:
    """Return a request with the hashes of its prompt's blocks."""
    hashes: list[bytes] = []
    block_tokens = worker.backend.load().kv_block_tokens
    extend_chain(hashes, request.tenant, request.prompt_ids, block_tokens)
    return replace(request, block_hashes=tuple(hashes))


def _sized(job: Job, index: int, worker: FleetWorker) -> GenerationRequest:
    """Return one prompt's request, checked; without `max_tokens` it gets all that fits."""
    prompt = job.prompts[index]
    if job.max_tokens is not None:
        return _checked(job, index, job.max_tokens, worker)
    room = max(1, worker.backend.card.max_model_len - len(prompt))
    try:
        return _checked(job, index, room, worker)
    except RequestRejected as error:
        limit = error.limit_tokens
        if limit is None or limit <= len(prompt):
            raise
        return _checked(job, index, limit - len(prompt), worker)


def _checked(job: Job, index: int, max_tokens: int, worker: FleetWorker) -> GenerationRequest:
    _check_proposer(job.mode, worker)
    sampling = job.sampling
    if sampling.max_tokens != max_tokens:
        sampling = replace(sampling, max_tokens=max_tokens)
    if sampling.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens: must be at most the {max_tokens} tokens that may be generated, "
            f"not {sampling.min_tokens}",
            "min_tokens",
        )
    request = GenerationRequest(
        f"{job.request_id}-{index}",
        job.prompts[index],
        sampling,
        UNDECIDED,
        job.n,
        job.tenant,
        job.grammar,
        service=job.service,
        traced=job.traced,
        task=job.task,
    )
    worker.generating.check(request)
    return request


def _check_proposer(mode: SpeculationMode, worker: FleetWorker) -> None:
    """Return if a worker can draft as the client wishes.

    Raises:
        InvalidRequest: it cannot; the message says with what it can.
    """
    if mode not in PROPOSER_MODES:
        return
    proposers = worker.backend.load().proposers
    if mode.value not in proposers:
        there = ", ".join(proposers) or "nothing"
        raise InvalidRequest(
            f"this worker cannot draft with {mode.value!r}; it can draft with: {there}",
            "speculation.mode",
        )
