"""The contracts that policies satisfy. `policies.testing` checks them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from draftgate.policies.admission.types import AdmissionView, Admitted, Refused
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.ordering.ticket import Ticket
from draftgate.policies.routing.types import Candidate, Candidates, Draw, Route, RouteView
from draftgate.policies.types import BatchView, RequestView, SpeculationPlan, StepView, WorkerLoad


@runtime_checkable
class SpeculationPolicy(Protocol):
    """Decides whether and how far to speculate: for each request, then for each step.

    No decision can change the output, only its cost: verification is sampling (design, section 1).
    """

    @property
    def name(self) -> str:
        """The name under which responses and metrics report it, e.g. `fixed:4`."""
        ...

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        """Decide for one request, at the gateway.

        Must honour `request.mode` (`off`, or a proposer of `load.proposers`) and never exceed
        `request.max_draft_tokens`. Does not mutate.
        """
        ...

    def least_survival(self, step: StepView, cost: StepCost) -> float | None:
        """Return which weight x survival the best slot must exceed, or none is taken.

        Asked before there are candidates: sequences that are not likely to reach it are asked for
        drafts now and then only, and nobody for drafts that cannot be worth the time of drafting,
        so a policy that will take none costs no time. None asks for all, whatever they are worth.
        Does not mutate.
        """
        ...

    def draft_lengths(self, step: StepView, cost: StepCost) -> Sequence[int]:
        """Return how many draft tokens each of `step.candidates` may verify in this step.

        Each is between 0 and the candidate's `max_draft_tokens`; their sum is at most
        `step.slot_budget`. No candidates: an empty sequence. Does not mutate.

        Where something has to be computed to draft (`DraftCandidate.depth_s`), the policy is asked
        again when it is: by then drafting costs nothing more, survivals are those of the drafts
        that are there, and each candidate may keep as much as it was given, or less.
        """
        ...


@runtime_checkable
class BatchingPolicy(Protocol):
    """Decides how many prompt tokens join a step."""

    @property
    def name(self) -> str:
        """The name under which it is chosen, e.g. `fixed:512`."""
        ...

    @property
    def stalls_decodes(self) -> bool:
        """Whether decodes wait while there are prompts to be fed."""
        ...

    def prefill_tokens(self, batch: BatchView, cost: StepCost) -> int:
        """Return how many prompt tokens join the step, 0 to `batch.most_prefill_tokens`.

        More than 0 where nobody decodes and something waits. Does not mutate.
        """
        ...


@runtime_checkable
class OrderingPolicy(Protocol):
    """Decides who of those that wait is next. It holds the queue, so each queue has one.

    Time is an argument; it never goes back. Nothing takes longer than sorting in would: operations
    are O(log n), but for moving pointers, or O(tenants that wait).
    """

    @property
    def name(self) -> str:
        """The name under which it is chosen, e.g. `fair`."""
        ...

    @property
    def work_s(self) -> float:
        """Seconds of the pool that all who wait take."""
        ...

    def __len__(self) -> int:
        """Return how many wait."""
        ...

    def push(self, ticket: Ticket) -> None:
        """Let a request wait.

        Raises:
            ValueError: one with its key waits already.
        """
        ...

    def remove(self, key: int) -> Ticket | None:
        """Take out one that waits no longer, as its client has gone; None if it is not here."""
        ...

    def choose(self, now_s: float) -> Ticket | None:
        """Return who is next; None if nobody waits. Changes nothing."""
        ...

    def take(self, now_s: float) -> Ticket | None:
        """Take out who is next, to be started now."""
        ...

    def ahead_s(self, ticket: Ticket, now_s: float) -> float:
        """Return `work_s` of those who would start before this ticket if it was pushed now.

        0 to `work_s`; never less when more wait. Changes nothing.
        """
        ...

    def class_ahead_s(self, ticket: Ticket) -> float:
        """Return what of `ahead_s` is of the ticket's own class; all where classes do not count."""
        ...

    def queued_of(self, tenant: str) -> int:
        """Return how many requests of a tenant wait."""
        ...


@runtime_checkable
class AdmissionPolicy(Protocol):
    """Decides who may wait. It may remember whom it refused and what it foresaw."""

    @property
    def name(self) -> str:
        """The name under which it is chosen, e.g. `deadline`."""
        ...

    def decide(self, view: AdmissionView, now_s: float) -> Admitted | Refused:
        """Decide for a request, once for each time that it asks, before it waits.

        The queue never grows past `view.queue.capacity`, but for a policy that says so.
        """
        ...

    def learn(self, admitted: Admitted, ttft_s: float) -> None:
        """Learn after how many seconds the first token of an admitted request came."""
        ...


@runtime_checkable
class RoutingPolicy(Protocol):
    """Decides which worker a request goes to. It may remember where earlier ones went."""

    @property
    def name(self) -> str:
        """The name under which it is chosen, e.g. `least_cost`."""
        ...

    @property
    def reads_prompts(self) -> bool:
        """Whether it looks at the hashes of prompts: else nobody computes them for it."""
        ...

    def route(self, request: RouteView, candidates: Candidates, draw: Draw) -> Route:
        """Choose one of the candidates; others may be offered behind it, each once.

        Asked as often as somebody wants to know: changes nothing, so the same draws give the same
        answer. Costs no more than a few microseconds a candidate, beside reading the hashes.

        Args:
            draw: the only source of randomness.
        """
        ...

    def placed(self, request: RouteView, worker: Candidate) -> None:
        """Learn where a request goes.

        Where it was routed, or another that was offered, or the only one with room, about which
        nobody was asked.
        """
        ...
