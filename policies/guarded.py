"""Policies of other packages, whose errors and wrong results end no server.

A guarded policy that raises, or returns what its protocol forbids, is reported, and the call has
the result of a built-in policy. Draft lengths that are too long are limited.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import index
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar

from draftgate.policies.admission.bounded import Bounded
from draftgate.policies.admission.types import AdmissionView, Admitted, Refused
from draftgate.policies.batching import Slack
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.ordering.fair import Fair
from draftgate.policies.phases.apart import OneWorker
from draftgate.policies.phases.types import Apart, PhaseChoice, PhasePool, Together
from draftgate.policies.protocols import SharesAppointments
from draftgate.policies.rescheduling.types import ChosenMove, PoolState, StreamsOf
from draftgate.policies.routing.scoring import least_loaded
from draftgate.policies.routing.types import Candidate, Candidates, Draw, Route, RouteView
from draftgate.policies.speculation.baselines import MOST_FIXED
from draftgate.policies.speculation.plan_reason import PlanCause, PlanFigures
from draftgate.policies.speculation.planning import capped, no_speculation, within_budget
from draftgate.policies.types import (
    BatchView,
    RequestView,
    SpeculationPlan,
    StepView,
    Ticket,
    WorkerLoad,
)

T = TypeVar("T")

_ROUNDING_S: Final = 1e-6
"""Tolerance of a sum of the work of many requests."""

Failure: TypeAlias = Exception | SystemExit
"""What code of other packages may raise: anything but the user's interruption."""

Report = Callable[[str, Failure], None]
"""Receives the method of a policy that failed, and why."""


class WrongResult(ValueError):
    """A result that the protocol of a policy forbids."""


class Guard:
    """A policy whose failures are reported and counted.

    Attributes:
        calls: number of calls by method, of those that may fail.
        failed: number of calls that raised or had a forbidden result, by method.
        errors: the first failure of each method.
    """

    def __init__(self, policy: Any, report: Report) -> None:
        self._policy, self._given_report = policy, report
        self.name: str = policy.name
        self.calls, self.failed = Counter[str](), Counter[str]()
        self.errors: dict[str, Failure] = {}
        for guards in _WATCHED:
            guards.append(self)

    def _report(self, method: str, error: Failure) -> None:
        self.errors.setdefault(method, error)
        self._given_report(method, error)

    def _call(
        self,
        method: str,
        *arguments: Any,
        otherwise: Callable[[], T],
        check: Callable[[Any], T] = lambda result: result,
    ) -> T:
        """Return the checked result of a method, or of `otherwise` if one of them raises."""
        self.calls[method] += 1
        try:
            return check(getattr(self._policy, method)(*arguments))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it may raise anything
            self.failed[method] += 1
            self._report(method, error)
            return otherwise()

    def _flag(self, name: str) -> bool:
        self.calls[name] += 1
        try:
            return bool(getattr(self._policy, name))
        except (Exception, SystemExit) as error:  # noqa: BLE001
            self.failed[name] += 1
            self._report(name, error)
            return False


_WATCHED: Final[list[list[Guard]]] = []


@contextmanager
def watched_guards() -> Iterator[list[Guard]]:
    """Yield a list of the guarded policies that are built until the context ends."""
    guards: list[Guard] = []
    _WATCHED.append(guards)
    try:
        yield guards
    finally:
        _WATCHED.remove(guards)


class GuardedSpeculation(Guard):
    """A speculation policy that drafts nothing where it fails."""

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        def without() -> SpeculationPlan:
            figures = PlanFigures(words="the policy failed, so the request does not draft")
            return no_speculation(self.name, request, PlanCause.OTHER, figures)

        def check(plan: Any) -> SpeculationPlan:
            if not isinstance(plan, SpeculationPlan):
                raise WrongResult(f"expected a SpeculationPlan, not {type(plan).__name__}")
            most = capped(MOST_FIXED, request)
            if plan.max_draft_tokens <= most and plan.later_draft_tokens <= most:
                return plan
            self._report("decide", WrongResult(f"a plan of more than {most} draft tokens"))
            return replace(
                plan,
                max_draft_tokens=min(plan.max_draft_tokens, most),
                later_draft_tokens=min(plan.later_draft_tokens, most),
            )

        return self._call("decide", request, load, otherwise=without, check=check)

    def least_survival(self, step: StepView, cost: StepCost) -> float | None:
        def check(least: Any) -> float | None:
            if least is not None and not least >= 0.0:  # also NaN
                raise WrongResult(f"a least survival of {least}")
            return None if least is None else float(least)

        return self._call("least_survival", step, cost, otherwise=lambda: float("inf"), check=check)

    def draft_lengths(self, step: StepView, cost: StepCost) -> Sequence[int]:
        def check(lengths: Any) -> Sequence[int]:
            given = list(map(index, lengths))
            if len(given) != len(step.candidates):
                raise WrongResult(f"{len(given)} lengths for {len(step.candidates)} candidates")
            pairs = zip(given, step.candidates, strict=True)
            fitting = [min(max(length, 0), one.max_draft_tokens) for length, one in pairs]
            allowed = within_budget(fitting, step.slot_budget)
            if allowed != given:
                words = f"lengths from {min(given)} to {max(given)} do not fit the step"
                self._report("draft_lengths", WrongResult(words))
            return allowed

        return self._call(
            "draft_lengths", step, cost, otherwise=lambda: [0] * len(step.candidates), check=check
        )


class GuardedBatching(Guard):
    """A batching policy in whose place `slack` decides where it fails."""

    @property
    def stalls_decodes(self) -> bool:
        """Whether decodes stop while prompts wait for computation."""
        return self._flag("stalls_decodes")

    def prefill_tokens(self, batch: BatchView, cost: StepCost) -> int:
        def check(result: Any) -> int:
            tokens, most = index(result), batch.most_prefill_tokens
            if not 0 <= tokens <= most or (most and not tokens and not batch.sequences):
                raise WrongResult(f"{tokens} of at most {most} prompt tokens")
            return tokens

        def usual() -> int:
            return Slack().prefill_tokens(batch, cost)

        return self._call("prefill_tokens", batch, cost, otherwise=usual, check=check)


class GuardedRouting(Guard):
    """A routing policy in whose place `least_loaded` decides where it fails."""

    def __init__(self, policy: Any, report: Report) -> None:
        super().__init__(policy, report)
        self._usual = least_loaded()

    @property
    def reads_prompts(self) -> bool:
        """Whether the policy reads prompt hashes or `Candidate.cached_tokens` and `pull`."""
        return self._flag("reads_prompts")

    def route(self, request: RouteView, candidates: Candidates, draw: Draw) -> Route:
        def check(route: Any) -> Route:
            known = {worker.worker_id for worker in candidates.workers}
            chosen = [offer.worker_id for offer in route.offers]
            if not chosen or len(set(chosen)) < len(chosen) or not known.issuperset(chosen):
                raise WrongResult(f"offers {chosen} of the candidates {sorted(known)}")
            checked: Route = route
            return checked

        def usual() -> Route:
            found = self._usual.route(request, candidates, draw)
            return replace(found, policy=self.name, reason=f"the policy failed; {found.reason}")

        return self._call("route", request, candidates, draw, otherwise=usual, check=check)

    def placed(self, request: RouteView, worker: Candidate) -> None:
        self._call("placed", request, worker, otherwise=lambda: None)


class GuardedRescheduling(Guard):
    """A rescheduling policy that moves nothing where it fails."""

    @property
    def reschedules(self) -> bool:
        """Whether the policy ever chooses a move."""
        return self._flag("reschedules")

    def choose(self, pool: PoolState, streams_of: StreamsOf) -> Sequence[ChosenMove]:
        offered = set[str]()

        def offering(worker_id: str) -> Any:
            streams = streams_of(worker_id)
            offered.update(stream.stream_id for stream in streams)
            return streams

        def check(moves: Any) -> Sequence[ChosenMove]:
            chosen, ids = list(moves), {worker.worker_id for worker in pool.workers}
            for move in chosen:
                if move.stream_id not in offered or not ids.issuperset({move.source, move.sink}):
                    raise WrongResult(f"a move of {move.stream_id!r} to {move.sink!r}")
            return chosen

        return self._call("choose", pool, offering, otherwise=tuple, check=check)


class GuardedPhases(Guard):
    """A phases policy that keeps requests on one worker where it fails."""

    @property
    def separates(self) -> bool:
        """Whether the policy ever separates the two phases, or lets a request wait."""
        return self._flag("separates")

    def choose(self, request: RouteView, pool: PhasePool) -> PhaseChoice:
        def check(choice: Any) -> PhaseChoice:
            usable = {worker.worker_id for worker in pool.usable}
            if isinstance(choice, Together):
                chosen = list(choice.worker_ids)
            elif isinstance(choice, Apart):
                chosen = [one.worker_id for one in (*choice.prefill, *choice.decode)]
            elif choice is None:
                return None
            else:
                raise WrongResult(f"expected Together, Apart or None, not {choice!r}")
            if not chosen or not usable.issuperset(chosen):
                raise WrongResult(f"workers {chosen} of those with capacity, {sorted(usable)}")
            checked: PhaseChoice = choice
            return checked

        def usual() -> PhaseChoice:
            return OneWorker().choose(request, pool)

        return self._call("choose", request, pool, otherwise=usual, check=check)


class GuardedAdmission(Guard):
    """An admission policy in whose place `bounded` decides where it fails."""

    def __init__(self, policy: Any, report: Report) -> None:
        super().__init__(policy, report)
        self._usual = Bounded()
        if isinstance(policy, SharesAppointments):
            self.appointments = policy.appointments

    def decide(self, view: AdmissionView, now_s: float) -> Admitted | Refused:
        def check(decision: Any) -> Admitted | Refused:
            if isinstance(decision, Admitted | Refused):
                return decision
            raise WrongResult(f"expected Admitted or Refused, not {decision!r}")

        def usual() -> Admitted | Refused:
            return self._usual.decide(view, now_s)

        return self._call("decide", view, now_s, otherwise=usual, check=check)

    def reconsider(self, view: AdmissionView, waited_s: float, now_s: float) -> Refused | None:
        def check(decision: Any) -> Refused | None:
            if isinstance(decision, Refused) or (decision is None and waited_s < view.max_wait_s):
                return decision
            raise WrongResult(f"{decision!r} after {waited_s} of {view.max_wait_s} s")

        def usual() -> Refused | None:
            return self._usual.reconsider(view, waited_s, now_s)

        return self._call("reconsider", view, waited_s, now_s, otherwise=usual, check=check)

    def learn(self, admitted: Admitted, ttft_s: float) -> None:
        self._call("learn", admitted, ttft_s, otherwise=lambda: None)


class GuardedOrdering(Guard):
    """An ordering policy whose waiting requests move to `fair` for good when it fails.

    The guard keeps the waiting requests itself, because the state of a queue that has failed is
    unknown.
    """

    def __init__(self, policy: Any, report: Report) -> None:
        super().__init__(policy, report)
        self._waiting: dict[int, Ticket] = {}
        self._of_tenants = Counter[str]()
        self._work_s = 0.0

    def _in_order(self, method: str, *arguments: Any, check: Callable[[Any], T]) -> T:
        """Call a method of the queue, or of `fair` with the same requests from its failure on."""
        usual = isinstance(self._policy, Fair)
        self.calls[method] += 1
        try:
            return check(getattr(self._policy, method)(*arguments))
        except (Exception, SystemExit) as error:
            if usual:
                raise
            self.failed[method] += 1
            self._report(method, error)
        self._policy = Fair()
        for ticket in self._waiting.values():
            self._policy.push(ticket)
        return check(getattr(self._policy, method)(*arguments))

    @property
    def work_s(self) -> float:
        """Work of all waiting requests, in seconds of the pool."""
        return max(self._work_s, 0.0)

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self._waiting)

    def push(self, ticket: Ticket) -> None:
        if ticket.key in self._waiting:
            raise ValueError(f"ticket {ticket.key} is waiting already")
        self._in_order("push", ticket, check=lambda _: None)
        self._waiting[ticket.key] = ticket
        self._of_tenants[ticket.tenant] += 1
        self._work_s += ticket.work_s

    def remove(self, key: int) -> Ticket | None:
        if key not in self._waiting:
            return None
        self._in_order("remove", key, check=self._expect(self._waiting[key]))
        return self._forget(key)

    def choose(self, now_s: float) -> Ticket | None:
        return self._in_order("choose", now_s, check=self._one_of_waiting)

    def take(self, now_s: float) -> Ticket | None:
        taken: Ticket | None = self._in_order("take", now_s, check=self._one_of_waiting)
        if taken is not None:
            self._forget(taken.key)
        return taken

    def ahead_s(self, ticket: Ticket, now_s: float) -> float:
        return self._in_order("ahead_s", ticket, now_s, check=self._part_of_work)

    def class_ahead_s(self, ticket: Ticket) -> float:
        return self._in_order("class_ahead_s", ticket, check=self._part_of_work)

    def queued_of(self, tenant: str) -> int:
        return self._of_tenants[tenant]

    def _forget(self, key: int) -> Ticket:
        ticket = self._waiting.pop(key)
        self._of_tenants[ticket.tenant] -= 1
        self._work_s = self._work_s - ticket.work_s if self._waiting else 0.0
        return ticket

    def _part_of_work(self, work_s: Any) -> float:
        if not -_ROUNDING_S <= work_s <= self._work_s + _ROUNDING_S:
            raise WrongResult(f"{work_s!r} s of {self._work_s} s of work")
        return float(work_s)

    def _one_of_waiting(self, ticket: Any) -> Ticket | None:
        known: Ticket | None = self._waiting.get(getattr(ticket, "key", -1))
        if ticket is not known or (known is None and self._waiting):
            raise WrongResult(f"{ticket!r} is none of the {len(self._waiting)} waiting requests")
        return None if known is None else self._waiting[known.key]

    def _expect(self, wanted: Ticket) -> Callable[[Any], None]:
        def check(removed: Any) -> None:
            if removed is not wanted:
                raise WrongResult(f"removed {removed!r} in place of request {wanted.key}")

        return check


GUARDS: Final[Mapping[str, Callable[[Any, Report], Any]]] = MappingProxyType(
    {
        "speculation": GuardedSpeculation,
        "batching": GuardedBatching,
        "routing": GuardedRouting,
        "rescheduling": GuardedRescheduling,
        "phases": GuardedPhases,
        "admission": GuardedAdmission,
        "ordering": GuardedOrdering,
    }
)
"""The guards by the kind of policy."""
