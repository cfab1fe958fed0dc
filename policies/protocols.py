"""The contracts of policies. `policies.testing` checks them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from draftgate.policies.admission.types import AdmissionView, Admitted, Refused
from draftgate.policies.costs.step_cost import StepCost
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
    """What all policies have in common."""

    @property
    def name(self) -> str:
        """The name that users give and that responses and metrics report, e.g. `fixed:4`."""


@runtime_checkable
class SpeculationPolicy(NamedPolicy, Protocol):
    """Decides whether and how far to speculate: for each request, then for each step.

    No decision changes the output, only its cost: verification is sampling. No method mutates.
    """

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        """Decide for one request, at the gateway.

        Must honour `request.mode` (`off`, or a proposer of `load.proposers`) and never exceed
        `request.max_draft_tokens`.
        """

    def least_survival(self, step: StepView, cost: StepCost) -> float | None:
        """Return the weight x survival that the best slot must exceed, or no slot is taken.

        Called before the step has candidates. Drafts that cannot reach the value are not computed,
        and sequences that are unlikely to reach it are drafted for only now and then. A policy that
        will take no drafts therefore costs no time. None asks for all drafts.
        """

    def draft_lengths(self, step: StepView, cost: StepCost) -> Sequence[int]:
        """Return how many draft tokens each of `step.candidates` may verify in this step.

        Each length is between 0 and the candidate's `max_draft_tokens`; their sum is at most
        `step.slot_budget`.

        If drafts have to be computed (`DraftCandidate.depth_s`), the policy is asked again when
        they are there. Then drafting costs nothing more, survivals are those of the actual drafts,
        and each candidate may keep at most its earlier length.
        """


@runtime_checkable
class BatchingPolicy(NamedPolicy, Protocol):
    """Decides how many prompt tokens join a step. Does not mutate."""

    @property
    def stalls_decodes(self) -> bool:
        """Whether decodes wait while prompts wait to be computed."""

    def prefill_tokens(self, batch: BatchView, cost: StepCost) -> int:
        """Return how many prompt tokens join the step, 0 to `batch.most_prefill_tokens`.

        More than 0 if nothing decodes and a prompt waits.
        """


@runtime_checkable
class OrderingPolicy(NamedPolicy, Protocol):
    """Decides which waiting request is next. It holds the queue, so each queue has its own.

    `now_s` never goes back. Operations take O(log n) besides moving pointers, or O(tenants that
    wait).
    """

    @property
    def work_s(self) -> float:
        """Seconds of the pool that all waiting requests take."""

    def __len__(self) -> int:
        """Return how many requests wait."""

    def push(self, ticket: Ticket) -> None:
        """Add a request.

        Raises:
            ValueError: a ticket with its key waits already.
        """

    def remove(self, key: int) -> Ticket | None:
        """Remove a request that waits no longer, e.g. as its client left; None if it is unknown."""

    def choose(self, now_s: float) -> Ticket | None:
        """Return the next request; None if none waits. Does not mutate."""

    def take(self, now_s: float) -> Ticket | None:
        """Remove and return the next request, which is started now."""

    def ahead_s(self, ticket: Ticket, now_s: float) -> float:
        """Return the work of all requests that would start before this one if it were pushed now.

        0 to `work_s`; never less if more requests wait. Does not mutate.
        """

    def class_ahead_s(self, ticket: Ticket) -> float:
        """Return the part of `ahead_s` in the ticket's own class; all of it without classes."""

    def queued_of(self, tenant: str) -> int:
        """Return how many requests of a tenant wait."""


@runtime_checkable
class AdmissionPolicy(NamedPolicy, Protocol):
    """Decides which requests may wait. It may remember refusals and predictions."""

    def decide(self, view: AdmissionView, now_s: float) -> Admitted | Refused:
        """Decide once for each attempt of a request, before it waits.

        The queue never grows past `view.queue.capacity`, except under a policy that says so.
        """

    def learn(self, admitted: Admitted, ttft_s: float) -> None:
        """Learn the time to the first token of a request that was admitted."""


@runtime_checkable
class RoutingPolicy(NamedPolicy, Protocol):
    """Decides which worker a request goes to. It may remember earlier placements."""

    @property
    def reads_prompts(self) -> bool:
        """Whether it reads the hashes of prompts; otherwise they are not computed for it."""

    def route(self, request: RouteView, candidates: Candidates, draw: Draw) -> Route:
        """Choose one of the candidates, and offer others as alternatives, each once.

        Does not mutate: the same draws give the same answer. Takes no more than a few microseconds
        per candidate, besides reading the hashes.

        Args:
            draw: the only source of randomness.
        """

    def placed(self, request: RouteView, worker: Candidate) -> None:
        """Learn where a request went: the chosen worker, an alternative, or the only candidate."""
