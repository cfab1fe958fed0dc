"""The interfaces of policies, which `policies.testing` checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from draftgate.policies.admission.appointments import Appointments
from draftgate.policies.admission.types import AdmissionView, Admitted, Refused
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.phases.types import PhaseChoice, PhasePool
from draftgate.policies.rescheduling.types import ChosenMove, PoolState, StreamsOf
from draftgate.policies.routing.types import Candidate, Candidates, Draw, Route, RouteView
from draftgate.policies.types import (
    BatchView,
    RequestView,
    SpeculationPlan,
    StepView,
    Ticket,
    WorkerLoad,
)


class NamedPolicy(Protocol):
    """The interface that all policies share."""

    @property
    def name(self) -> str:
        """The name in settings, responses and metrics, for example `fixed:4`."""


@runtime_checkable
class SpeculationPolicy(NamedPolicy, Protocol):
    """Decides whether and how far to speculate, for each request and then for each step.

    Verification is sampling, so a decision changes the cost but never the output. No method mutates
    the policy.
    """

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        """Return the plan of a request at the gateway.

        The plan must honour `request.mode` (`off`, or a proposer in `load.proposers`). Its cap must
        not exceed `request.max_draft_tokens`.
        """

    def least_survival(self, step: StepView, cost: StepCost) -> float | None:
        """Return the weight x survival that the best slot must exceed, or None for all drafts.

        The worker calls this method before the step has candidates. The worker does not compute
        drafts that cannot reach the value. If a sequence is unlikely to reach the value, the worker
        drafts for it only occasionally. A policy that takes no drafts therefore costs no time.
        """

    def draft_lengths(self, step: StepView, cost: StepCost) -> Sequence[int]:
        """Return how many draft tokens each of `step.candidates` may verify in this step.

        Each length is from 0 to the candidate's `max_draft_tokens`. The sum of the lengths is at
        most `step.slot_budget`.

        If drafts must be computed first (`DraftCandidate.depth_s`), the worker calls the policy
        again with the computed drafts. The second call has no further drafting cost and the
        survivals of the actual drafts. Each candidate keeps at most its earlier length.
        """


@runtime_checkable
class BatchingPolicy(NamedPolicy, Protocol):
    """Decides how many prompt tokens join a step, without mutating the policy."""

    @property
    def stalls_decodes(self) -> bool:
        """Whether decodes stop while prompts wait for computation."""

    def prefill_tokens(self, batch: BatchView, cost: StepCost) -> int:
        """Return how many prompt tokens join the step, 0 to `batch.most_prefill_tokens`.

        The result is more than 0 if a prompt waits and no sequence decodes.
        """


@runtime_checkable
class OrderingPolicy(NamedPolicy, Protocol):
    """Decides which waiting request is next.

    The policy holds the queue, so each queue needs its own policy. `now_s` never decreases.
    Operations take O(log n), plus the time to move pointers, or O(waiting tenants).
    """

    @property
    def work_s(self) -> float:
        """Work of all waiting requests, in seconds of the pool."""

    def __len__(self) -> int:
        """Return how many requests wait."""

    def push(self, ticket: Ticket) -> None:
        """Add a request.

        Raises:
            ValueError: a ticket with the same key is waiting already.
        """

    def remove(self, key: int) -> Ticket | None:
        """Remove and return a request that no longer waits. Return None for an unknown one."""

    def choose(self, now_s: float) -> Ticket | None:
        """Return the next request without removing it, or None if the queue is empty."""

    def take(self, now_s: float) -> Ticket | None:
        """Remove and return the next request, which starts now."""

    def ahead_s(self, ticket: Ticket, now_s: float) -> float:
        """Return the work of all requests that would start before this ticket if pushed now.

        The result is from 0 to `work_s`, and never falls as requests join the queue. The method
        does not mutate the queue.
        """

    def class_ahead_s(self, ticket: Ticket) -> float:
        """Return the part of `ahead_s` in the ticket's own class.

        The result is `ahead_s` if the policy ignores classes.
        """

    def queued_of(self, tenant: str) -> int:
        """Return how many requests of a tenant wait."""


@runtime_checkable
class AdmissionPolicy(NamedPolicy, Protocol):
    """Decides which requests may wait.

    A policy may remember its refusals and predictions.
    """

    def decide(self, view: AdmissionView, now_s: float) -> Admitted | Refused:
        """Decide whether a request may wait, once for each attempt.

        The queue never exceeds `view.queue.capacity`, except with policies that document otherwise.
        """

    def reconsider(self, view: AdmissionView, waited_s: float, now_s: float) -> Refused | None:
        """Decide again about an admitted request that still waits, or keep it with None.

        Args:
            view: the request at its place in the queue.
            waited_s: seconds since its admission. At `view.max_wait_s`, the request is refused.
        """

    def learn(self, admitted: Admitted, ttft_s: float) -> None:
        """Learn the time to first token of an admitted request."""


@runtime_checkable
class SharesAppointments(Protocol):
    """An admission policy whose appointments other gateways honour."""

    @property
    def appointments(self) -> Appointments:
        """The bookings of refused requests."""


@runtime_checkable
class RoutingPolicy(NamedPolicy, Protocol):
    """Decides which worker receives a request.

    A policy may remember earlier placements.
    """

    @property
    def reads_prompts(self) -> bool:
        """Whether the policy reads prompt hashes or `Candidate.cached_tokens` and `pull`.

        The gateway computes them only in this case.
        """

    def route(self, request: RouteView, candidates: Candidates, draw: Draw) -> Route:
        """Choose one of the candidates, and offer others as alternatives without repetition.

        The method does not mutate the policy, and equal draws give equal routes. It takes at most a
        few microseconds per candidate, plus the time to read the hashes.

        Args:
            draw: the only source of randomness.
        """

    def placed(self, request: RouteView, worker: Candidate) -> None:
        """Learn which worker received a request.

        The worker is the chosen one, an alternative or the only candidate.
        """


@runtime_checkable
class ReschedulingPolicy(NamedPolicy, Protocol):
    """Decides which running streams move between workers, without mutating the policy."""

    @property
    def reschedules(self) -> bool:
        """Whether the policy ever chooses a move.

        Otherwise the gateway does not call it.
        """

    def choose(self, pool: PoolState, streams_of: StreamsOf) -> Sequence[ChosenMove]:
        """Return the next moves, most important first.

        A worker takes part in at most one of the moves, and in none if it is `moving` already. A
        stream moves only if it fits on its destination (`rescheduling.types.fits`), and if the
        predicted gain exceeds the threshold. The policy reads only streams of workers that streams
        should leave.
        """


@runtime_checkable
class PhasesPolicy(NamedPolicy, Protocol):
    """Decides whether the output of a request is computed on another worker than its prompt.

    The policy is not mutated.
    """

    @property
    def separates(self) -> bool:
        """Whether the policy ever separates the two phases, or lets a request wait.

        Otherwise the gateway does not call it.
        """

    def choose(self, request: RouteView, pool: PhasePool) -> PhaseChoice:
        """Return the choice for a request.

        It names only workers with capacity. The first workers for prompt and output are different
        and exchange KV blocks. A request without further tokens than the first stays together. A
        request waits only while some worker without capacity could take it.
        """
