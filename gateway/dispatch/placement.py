"""Placement, which checks that a request can run and decides how far it may speculate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from draftgate.backends.core.prefix_cache import extend_chain
from draftgate.backends.errors import AdapterFailed, BackendFailed, RequestRejected
from draftgate.backends.types import GenerationRequest, SpeculationOutcome
from draftgate.gateway.dispatch.decisions import Decision, Decisions, MoveRecord
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.routing import Routed
from draftgate.gateway.errors import InvalidRequest
from draftgate.gateway.fleet import NO_ADAPTER, Fleet, FleetWorker
from draftgate.gateway.offload import offload
from draftgate.gateway.state.values import Reservation
from draftgate.gateway.tracing import Span
from draftgate.policies.capacity import CapacityNeed
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.routing.types import RouteView
from draftgate.policies.speculation.acceptance_history import AcceptanceHistory
from draftgate.policies.speculation.cluster_price import MeanNeed, project_load
from draftgate.policies.types import (
    PROPOSER_MODES,
    RequestView,
    SpeculationMode,
    SpeculationPlan,
)
from draftgate.policies.values import replace

UNDECIDED: Final = SpeculationPlan("", SpeculationMode.OFF, None, 0, "not decided yet")
"""The plan of a request without a worker."""

NOTHING_TO_DRAFT: Final = SpeculationPlan(
    "none", SpeculationMode.OFF, None, 0, "the request has no output to draft"
)

INLINE_PROMPTS: Final = 64
INLINE_TOKENS: Final = 16 << 10
"""Jobs with more prompts or tokens are checked in a thread.

The check takes 0.5 and 0.4 ms at these limits. The thread also hashes the blocks of longer prompts,
which takes 1.8 us per block. Shorter prompts are hashed only if the routing policy reads them (one
core, AMD Zen 4, 2026-11-21)."""


def need_of(request: GenerationRequest) -> CapacityNeed:
    """Return the capacity that a request needs.

    Resumed output counts as prompt.
    """
    resumed, prompt_tokens = request.resumed, len(request.prompt_ids)
    if resumed:
        prompt_tokens += sum([len(choice.output_ids) for choice in resumed])
    return CapacityNeed(
        len(resumed) or request.n,
        prompt_tokens,
        request.most_tokens,
        request.service.tpot_s,
        request.adapter,
        offline=request.service.is_offline,
    )


class Placer:
    """A placer that sizes requests, makes their speculation plans, and records acceptance."""

    def __init__(
        self,
        fleet: Fleet,
        policy: SpeculationPolicy,
        decisions: Decisions,
        history: AcceptanceHistory,
        *,
        reads_prompts: bool,
    ) -> None:
        """Place requests on the workers of a fleet, which serve the same model.

        Args:
            history: the acceptance of earlier requests, which the placer extends.
            reads_prompts: whether the routing policy reads prompts.
        """
        self._fleet = fleet
        self._policy = policy
        self._decisions = decisions
        self._reads_prompts = reads_prompts
        self._history = history
        self._usual = MeanNeed()

    def size(self, job: Job) -> tuple[GenerationRequest, ...] | None:
        """Return a sized and checked request for each prompt of a job, without a plan.

        The result is None if the job needs `size_in_thread`.

        Raises:
            InvalidRequest: the workers do not have the requested proposer, or `min_tokens` exceeds
                the output limit.
            RequestRejected: the job can never run on this node.
            BackendFailed: no worker is left, or none has the adapter (`AdapterFailed`).
        """
        workers = self._able(job)
        if job.grammar is not None or len(job.prompts) > INLINE_PROMPTS:
            return None
        if sum(map(len, job.prompts)) > INLINE_TOKENS:
            return None
        return _all_sized(job, workers[:1], self._unhashed)

    async def size_in_thread(self, job: Job, span: Span) -> tuple[GenerationRequest, ...]:
        """Return the requests as `size` does, from a thread.

        The thread compiles grammars, and checks and hashes long prompts. The compilation of a
        grammar has a span of its own, below `span`.
        """
        workers, unhashed = self._able(job), self._unhashed
        if job.grammar is None:
            return await offload(_all_sized, job, workers[:1], unhashed)
        with span.child("grammar", {"draftgate.grammar.kind": job.grammar.kind.value}):
            return await offload(_all_sized, job, workers, unhashed)

    def _able(self, job: Job) -> list[FleetWorker]:
        """Return the workers that can serve a job.

        Raises:
            BackendFailed: no worker is left, or none has the adapter (`AdapterFailed`).
        """
        workers = self._fleet.serving
        if not workers:
            raise BackendFailed(self._fleet.outage)
        if job.adapter:
            workers = self._fleet.serving_with(job.adapter)
            if not workers:
                raise AdapterFailed(NO_ADAPTER)
        return workers

    @property
    def _unhashed(self) -> int:
        """Number of tokens up to which prompts are not hashed."""
        return 0 if self._reads_prompts and len(self._fleet.workers) > 1 else INLINE_TOKENS

    def route_view(
        self, job: Job, index: int, request: GenerationRequest, expected_tokens: float
    ) -> RouteView:
        """Return the routing policy's view of one prompt of a job.

        Args:
            expected_tokens: expected output tokens of each sequence.
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

    def decide(
        self,
        job: Job,
        index: int,
        request: GenerationRequest,
        routed: Routed,
        reservation: Reservation,
    ) -> Decision:
        """Decide how far a sized request may speculate on its worker, and record the decision.

        The decision uses the load that the worker will have when the leased requests of all
        gateways have arrived. The decision about a request without output is not recorded.

        Args:
            reservation: the reservation of the worker's capacity.
        """
        worker = routed.worker
        load = worker.backend.load()
        if reservation.behind_tokens:
            load = project_load(load, reservation.behind_tokens, self._usual.need)
        if reservation.lease is not None:  # to estimate requests that other gateways have leased
            need = replace(need_of(request), most_tokens=reservation.lease.tokens)
            self._usual.add_request(need)
        view = self._view(job, index, request, worker.backend.card.model_id)
        if not request.sampling.max_tokens:
            plan = NOTHING_TO_DRAFT
            return Decision(job.request_id, 0.0, worker.worker_id, view, load, plan)
        plan = self._policy.decide(view, load)
        if routed.decode is not None:
            plan = _for_prompt(plan)
        return self._decisions.record(
            job.request_id,
            worker.worker_id,
            view,
            load,
            plan,
            routed.route,
            tenant=job.tenant,
            load_age_s=worker.load_age_s,
            degraded=reservation.degraded,
            phases=routed.phases,
            fallback=job.fallback,
        )

    def record_outcome(
        self,
        request: GenerationRequest,
        worker: FleetWorker,
        decision: Decision,
        outcome: SpeculationOutcome,
    ) -> None:
        """Record the outcome of a choice, and its acceptance unless a grammar forced its drafts."""
        if request.sampling.max_tokens:
            self._decisions.add_outcome(decision, outcome)
        if request.grammar is None:
            self._history.add_choice(
                request.tenant,
                with_adapter(worker.backend.card.model_id, request.adapter),
                greedy=request.sampling.temperature == 0,
                drafted=outcome.num_drafted_tokens,
                histogram=outcome.acceptance_histogram,
            )

    def record_unfinished(self, decision: Decision, outcome: SpeculationOutcome) -> None:
        """Record what a worker drafted for choices that it did not finish."""
        if outcome.num_spec_steps:
            self._decisions.add_outcome(decision, outcome, choices=0)

    def record_move(self, job: Job, index: int, source: Decision, move: MoveRecord) -> None:
        """Record that a prompt has moved from the worker of a decision, or could not move."""
        self._decisions.add_move(job.request_id, index, job.tenant, source, move)

    def _view(self, job: Job, index: int, request: GenerationRequest, model: str) -> RequestView:
        """Return the speculation policy's view of one prompt of a job.

        The output of the shortest choice counts as prompt if the request was resumed.
        """
        resumed = request.resumed
        kept = min([len(choice.output_ids) for choice in resumed]) if resumed else 0
        temperature = job.sampling.temperature
        # Drafts of the model alone may suit an adapter less, so each adapter has its own record.
        model = with_adapter(model, job.adapter)
        of_tenant, of_model = self._history.counts(job.tenant, model, greedy=temperature == 0)
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


def with_adapter(name: str, adapter: str) -> str:
    """Return the name of a model or numerics class with the digest of an adapter, if not empty."""
    return f"{name}/lora-{adapter}" if adapter else name


def _for_prompt(plan: SpeculationPlan) -> SpeculationPlan:
    """Return the plan of a request whose output another worker computes.

    If that fails, the worker may revise the plan.
    """
    return SpeculationPlan(
        plan.policy,
        plan.mode,
        None,
        0,
        "another worker computes the output",
        later_proposer=plan.proposer or plan.later_proposer,
        later_draft_tokens=plan.max_draft_tokens or plan.later_draft_tokens,
    )


def _all_sized(
    job: Job, workers: Sequence[FleetWorker], unhashed: int
) -> tuple[GenerationRequest, ...]:
    """Return a request for each prompt, after all workers have compiled its grammar.

    Args:
        unhashed: prompts with at most this number of tokens are not hashed.
    """
    for worker in workers[1:]:
        _sized(job, 0, worker)
    first = workers[0]
    found = []
    for index in range(len(job.prompts)):
        request = _sized(job, index, first)
        found.append(request if len(request.prompt_ids) <= unhashed else _hashed(request, first))
    return tuple(found)


def _hashed(request: GenerationRequest, worker: FleetWorker) -> GenerationRequest:
    """Return a request with the hashes of its prompt's blocks."""
    hashes: list[bytes] = []
    block_tokens = worker.backend.load().kv_block_tokens
    extend_chain(hashes, request.cache_owner, request.prompt_ids, block_tokens)
    return replace(request, block_hashes=tuple(hashes))


def _sized(job: Job, index: int, worker: FleetWorker) -> GenerationRequest:
    """Return the checked request of one prompt.

    The output may fill the context if the job limits it in neither way.
    """
    prompt = job.prompts[index]
    if job.max_tokens is not None:
        return _checked(job, index, job.max_tokens, worker)
    limit = max(1, worker.backend.card.max_model_len - len(prompt))
    if job.usual_max_tokens is not None:
        limit = min(limit, job.usual_max_tokens)
    try:
        return _checked(job, index, limit, worker)
    except RequestRejected as error:
        context = error.limit_tokens
        if context is None or context <= len(prompt):
            raise
        return _checked(job, index, context - len(prompt), worker)


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
        prediction_ids=job.prediction_ids,
        second_segment=job.second_segments[index] if job.second_segments else 0,
        cache_salt=job.cache_salt,
        adapter=job.adapter,
        corpus=job.corpus,
    )
    worker.generating.check(request)
    return request


def _check_proposer(mode: SpeculationMode, worker: FleetWorker) -> None:
    """Check that a worker has the proposer that the client requests.

    Raises:
        InvalidRequest: the worker lacks the proposer. The message lists its proposers.
    """
    if mode not in PROPOSER_MODES:
        return
    proposers = worker.backend.load().proposers
    if mode.value not in proposers:
        available = ", ".join(proposers) or "nothing"
        raise InvalidRequest(
            f"this worker cannot draft with {mode.value!r}; it can draft with: {available}",
            "speculation.mode",
        )
