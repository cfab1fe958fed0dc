"""Conformance checks for the policies of this project and of third parties."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle, product

from draftgate.policies.admission.types import AdmissionView, Admitted, PoolView, QueueView, Refused
from draftgate.policies.capacity import WorkerUsage
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.protocols import (
    AdmissionPolicy,
    BatchingPolicy,
    OrderingPolicy,
    RoutingPolicy,
    SpeculationPolicy,
)
from draftgate.policies.routing.types import Candidate, Candidates, Route, RouteView
from draftgate.policies.speculation.plan_reason import PlanCause, render_reason
from draftgate.policies.types import (
    ANY_PROPOSER,
    PROPOSER_MODES,
    BatchView,
    DraftCandidate,
    DraftCounts,
    RequestView,
    ServiceLevel,
    SpeculationMode,
    StepView,
    Ticket,
    WorkerLoad,
    WorkerSpeed,
)

_KNOWN = DraftCounts(300.0, 100.0)
_SERVICE = ServiceLevel(0.5, 0.01, -1)


def check_decision(policy: SpeculationPolicy, request: RequestView, load: WorkerLoad) -> None:
    """Check that a plan respects the client's request and the worker's proposers.

    Raises:
        AssertionError: the policy breaks the contract of `SpeculationPolicy.decide`.
    """
    plan = policy.decide(request, load)
    assert plan == policy.decide(request, load), "the same inputs must give the same plan"
    assert plan.mode is request.mode, "the plan must repeat the requested mode"
    assert plan.reason, "the plan needs a reason for the client"
    if plan.cause is not PlanCause.OTHER:
        rendered = render_reason(plan.cause, plan.figures, plan.max_draft_tokens)
        assert plan.reason == rendered, "the reason must state the cause and its figures"
    assert (plan.proposer is None) == (plan.max_draft_tokens == 0), (
        "a plan without a proposer must have no drafts"
    )
    allowed: set[str | None] = {None, *load.proposers}
    if request.mode is SpeculationMode.AUTO and load.proposers:
        allowed.add(ANY_PROPOSER)
    assert plan.proposer in allowed, "the plan must use a proposer of the worker"
    if request.mode in PROPOSER_MODES:
        assert plan.proposer in {None, request.mode.value}, "the plan must use the named proposer"
    if request.max_draft_tokens is not None:
        assert plan.max_draft_tokens <= request.max_draft_tokens, "the client's cap must hold"
        assert plan.later_draft_tokens <= request.max_draft_tokens, "the client's cap must hold"
    assert (plan.later_proposer is None) == (plan.later_draft_tokens == 0), (
        "a later proposer needs a cap"
    )
    if plan.later_proposer is not None:
        assert plan.proposer is None, "only a plan that is off may have a later proposer"
        assert request.mode is SpeculationMode.AUTO, "only mode auto may be revised"
    if request.mode is SpeculationMode.OFF:
        assert plan.proposer is None, "mode off must disable drafts"


def check_draft_lengths(policy: SpeculationPolicy, step: StepView, cost: StepCost) -> None:
    """Check that the lengths of a step fit its candidates and its budget.

    Raises:
        AssertionError: the policy breaks the contract of `SpeculationPolicy`.
    """
    least = policy.least_survival(replace(step, candidates=()), cost)
    assert least is None or least >= 0.0, "least_survival must not be negative"
    lengths = list(policy.draft_lengths(step, cost))
    assert len(lengths) == len(step.candidates), "every candidate needs a length"
    for length, candidate in zip(lengths, step.candidates, strict=True):
        assert 0 <= length <= candidate.max_draft_tokens, (
            "a length must not exceed its candidate's limit"
        )
    assert sum(lengths) <= step.slot_budget, "the lengths must not exceed the slot budget"
    best = max((c.weight * max(c.survivals, default=0.0) for c in step.candidates), default=0.0)
    assert not any(lengths) or not least or best > least, "no slot exceeds least_survival"


def check_speculation(policy: SpeculationPolicy) -> None:
    """Check a speculation policy on many requests, loads and steps.

    Raises:
        AssertionError: the policy breaks the contract of `SpeculationPolicy`.
    """
    proposers: tuple[tuple[str, ...], ...] = ((), ("ngram",), ("ngram", "draft_model"))
    for offered, price, mode, cap in product(
        proposers, (0.0, 0.2, 2.0), SpeculationMode, (None, 0, 1, 100)
    ):
        load = WorkerLoad(3, 1, 5, 10, price, 0.6, offered)
        check_decision(policy, RequestView(10, 20, 0.0, mode, cap), load)
        known = RequestView(10, 20, 0.8, mode, cap, _SERVICE, 0.9, _KNOWN, _KNOWN)
        check_decision(policy, known, load)
    cost = StepCost((16, 32, 64), (1e-3, 1.5e-3, 2.5e-3))
    for count in (0, 1, 5, 40):
        candidates = tuple(
            DraftCandidate(
                tuple((i % 10 / 10) ** n for n in range(1, i % 9)),
                i % 3 * 1e-4,
                1.0 + i % 2,
                call_s=i % 3 * 2e-4,
            )
            for i in range(count)
        )
        weight = sum(candidate.weight for candidate in candidates)
        for budget, tokens, verify_s in product((0, 3, 1000), (count, 64, 400), (0.0, 1e-4)):
            fields = tokens, 100, count, budget, candidates, weight
            check_draft_lengths(policy, StepView(*fields, verify_s=verify_s), cost)


def check_batching(policy: BatchingPolicy) -> None:
    """Check a batching policy on many steps.

    Raises:
        AssertionError: the policy breaks the contract of `BatchingPolicy`.
    """
    cost = StepCost((16, 64, 256), (1e-3, 2e-3, 6e-3), 1e-7, 1e-5, 1e-8)
    for sequences, most, within_s, cached in product(
        (0, 1, 40, 400), (0, 1, 100, 5000), (None, 0.0, 3e-3, 10.0), (0, 3000)
    ):
        tpot_s = None if within_s is None else 2e-3
        batch = BatchView(2 * sequences, 100 * sequences, sequences, most, cached, within_s, tpot_s)
        tokens = policy.prefill_tokens(batch, cost)
        assert tokens == policy.prefill_tokens(batch, cost), (
            "the same inputs must give the same result"
        )
        assert 0 <= tokens <= most, "prompt tokens must not exceed the waiting tokens"
        assert tokens or not most or sequences, (
            "a step without decodes must take waiting prompt tokens"
        )


def check_ordering(build: Callable[[], OrderingPolicy]) -> None:
    """Check an ordering policy on a queue that fills, loses some requests, and empties.

    Args:
        build: creates an empty queue.

    Raises:
        AssertionError: the policy breaks the contract of `OrderingPolicy`.
    """
    queue, waiting = build(), dict[int, Ticket]()
    assert queue.choose(0.0) is None, "an empty queue has no next request"
    assert queue.take(0.0) is None, "an empty queue has no next request"
    for key in range(200):
        now_s = key * 0.5
        ticket = _ticket(key, now_s)
        _check_ahead(queue, _ticket(10_000 + key, now_s), now_s)
        queue.push(ticket)
        waiting[key] = ticket
        if key % 7 == 3:
            assert queue.remove(key - 2) == waiting.pop(key - 2, None), (
                "remove must return the ticket"
            )
            assert queue.remove(key - 2) is None, "remove must return None for a removed ticket"
        if key % 3 == 2:
            _check_taking(queue, waiting, now_s)
        _check_counts(queue, waiting)
    while waiting:
        _check_taking(queue, waiting, 1000.0)
        _check_counts(queue, waiting)
    assert queue.take(1000.0) is None, "every request is taken once"


def _ticket(key: int, now_s: float) -> Ticket:
    share, work_s = 1.0 + key % 5 % 2, key % 4 * 0.1
    deadline_s = now_s + key * 7 % 5
    return Ticket(key, now_s, deadline_s, key % 3 - 1, f"tenant {key % 5}", share, work_s)


def _check_ahead(queue: OrderingPolicy, ticket: Ticket, now_s: float) -> None:
    ahead_s = queue.ahead_s(ticket, now_s)
    assert ahead_s == queue.ahead_s(ticket, now_s), "ahead_s must not mutate"
    assert -1e-9 <= ahead_s <= queue.work_s + 1e-9, "ahead_s must not exceed the waiting work"
    assert queue.class_ahead_s(ticket) <= ahead_s + 1e-9, (
        "a class must not have more work than all classes"
    )


def _check_taking(queue: OrderingPolicy, waiting: dict[int, Ticket], now_s: float) -> None:
    chosen = queue.choose(now_s)
    assert chosen is not None, "a queue with requests must have a next request"
    assert queue.choose(now_s) == chosen, "choose must not mutate"
    assert queue.take(now_s) == chosen, "take must return the request that choose returned"
    assert waiting.pop(chosen.key) == chosen, "a taken request was waiting"


def _check_counts(queue: OrderingPolicy, waiting: dict[int, Ticket]) -> None:
    assert len(queue) == len(waiting), "the length must be the number of waiting requests"
    work_s = math.fsum(ticket.work_s for ticket in waiting.values())
    assert abs(queue.work_s - work_s) < 1e-6, "work_s must be the sum of the waiting work"
    for tenant in ("tenant 0", "tenant 1", "unknown"):
        tenant_count = sum(ticket.tenant == tenant for ticket in waiting.values())
        assert queue.queued_of(tenant) == tenant_count, "queued_of must count the tenant's requests"


def check_admission(build: Callable[[], AdmissionPolicy], *, bounded: bool = True) -> None:
    """Check an admission policy on many requests, pools and queues.

    Args:
        build: creates a policy without a history.
        bounded: whether the policy respects the queue's bound.

    Raises:
        AssertionError: the policy breaks the contract of `AdmissionPolicy`.
    """
    policy = build()
    for number, view in enumerate(_admission_views()):
        now_s = 0.1 * number
        fresh = build().decide(view, now_s)
        assert fresh == build().decide(view, now_s), "the same history must give the same decision"
        answer = policy.decide(replace(view, fingerprint=number), now_s)
        for decision in (fresh, answer):
            assert decision.reason, "a decision needs a reason for the client"
            if isinstance(decision, Admitted):
                assert 0.0 <= decision.wait_s <= decision.ttft_s < math.inf, (
                    "the wait must be finite"
                )
                assert 0.0 <= decision.work_s < math.inf, "the work must be finite"
            else:
                assert 0.0 < decision.retry_after_s < math.inf, "a client must be able to return"
        if isinstance(answer, Admitted):
            policy.learn(answer, answer.ttft_s * 1.5)
            _check_reconsidered(policy, view, now_s)
        if bounded and view.queue.length >= view.queue.capacity:
            assert isinstance(fresh, Refused), "the queue is full"
        if not view.queue.length and not view.pool.running:
            assert isinstance(fresh, Admitted), "an idle pool must not refuse"


def _check_reconsidered(policy: AdmissionPolicy, view: AdmissionView, now_s: float) -> None:
    """Check the second decision about a request that waits."""
    for waited_s in (0.1 * view.max_wait_s, view.max_wait_s):
        refused = policy.reconsider(view, waited_s, now_s)
        assert refused is None or (refused.reason and 0.0 < refused.retry_after_s < math.inf), (
            "a client must be able to return"
        )
    assert refused is not None, "no request may wait longer than `max_wait_s`"


def _admission_views() -> Iterator[AdmissionView]:
    """Yield requests of several kinds, with much or nothing known about them."""
    speeds = (WorkerSpeed(), WorkerSpeed(0.02, 1e-4, 1e-4), WorkerSpeed(0.05, 1e-3, 1e-3))
    queues = ((0, 0), (8, 0), (16, 3), (16, 40), (16, 64))  # running, waiting
    services = (ServiceLevel(), ServiceLevel(0.5), ServiceLevel(2.0, 0.03, -1))
    for speed, (running, length), service, sheddable, n in product(
        speeds, queues, services, (False, True), (1, 4)
    ):
        work_s = 0.1 * length
        queue = QueueView(length, 64, length // 2, work_s, work_s / 2, work_s, 100 * length)
        pool = PoolView(2, 16, running, 50 * running, speed)
        yield AdmissionView(
            1, 500, 100.0, 10.0, n, service, sheddable=sheddable, pool=pool, queue=queue
        )


def check_routing(build: Callable[[], RoutingPolicy]) -> None:
    """Check a routing policy on many requests, workers and rivals.

    Args:
        build: creates a policy without placements.

    Raises:
        AssertionError: the policy breaks the contract of `RoutingPolicy`.
    """
    policy = build()
    for candidates in _candidates():
        for request in _route_views():
            _check_route(build(), request, candidates)
            route = _check_route(policy, request, candidates)
            by_id = {worker.worker_id: worker for worker in candidates.workers}
            policy.placed(request, by_id[route.offers[-1].worker_id])
    assert policy.name == build().name, "the name must not change"


def _check_route(policy: RoutingPolicy, request: RouteView, candidates: Candidates) -> Route:
    def route_again() -> Route:
        draws = cycle((0.0, 0.999, 0.3, 0.6))
        return policy.route(request, candidates, lambda: next(draws))

    route = route_again()
    assert route == route_again(), "the same draws must give the same route"
    assert route.policy == policy.name, "a route names its policy"
    assert route.reason, "a route needs a reason for the operator"
    offered = [offer.worker_id for offer in route.offers]
    assert offered, "a route needs a worker"
    assert len(set(offered)) == len(offered), "a worker must be offered only once"
    assert {worker.worker_id for worker in candidates.workers} >= set(offered), (
        "every offer must be a candidate"
    )
    for offer in route.offers:
        assert math.isfinite(offer.score), "a score must be finite"
        assert 0.0 <= offer.score_per_token < math.inf, "a lease must not make a worker better"
    for predicted_s in (route.ttft_s, route.tpot_s):
        assert predicted_s is None or 0.0 <= predicted_s < math.inf, "a time must not be negative"
    assert 0 <= route.cached_tokens <= request.request.prompt_tokens, (
        "cached_tokens must not exceed the prompt"
    )
    return route


def _route_views() -> list[RouteView]:
    """Return requests with nothing and with everything known about them."""
    hashes = tuple(bytes([number]) * 16 for number in range(125))
    full = RequestView(2005, 500, 0.8, SpeculationMode.AUTO, 3, _SERVICE, 0.9, _KNOWN, _KNOWN)
    return [
        RouteView(RequestView(1, 0, 0.0), 1, 0.0),
        RouteView(RequestView(300, 100, 1.0), 400, 80.0),
        RouteView(full, 10_020, 250.0, 4, "tenant", hashes),
        RouteView(replace(full, mode=SpeculationMode.OFF), 10_020, 250.0, 4, "tenant", hashes[:64]),
    ]


def _candidates() -> Iterator[Candidates]:
    """Yield idle and busy workers, new and old, alike and different, with and without rivals."""
    speeds = (
        WorkerSpeed(),
        WorkerSpeed(0.02, 1e-4, 1e-4, 0.01, 1e-4, 2e-5),
        WorkerSpeed(0.05, 1e-3),
    )
    # running, waiting, free blocks, price, prompt tokens
    states = ((0, 0, 100, 0.0, 0), (8, 0, 40, 0.3, 700), (16, 5, 0, 1.5, 40_000))
    proposers: tuple[tuple[str, ...], ...] = ((), ("ngram",), ("ngram", "draft_model"))
    loads = [
        WorkerLoad(running, waiting, free, 100, price, 0.6, offered, 0.1, 16, prompts, speed=speed)
        for (running, waiting, free, price, prompts), offered, speed in product(
            states, proposers, speeds
        )
    ]
    unknown = WorkerLoad(3, 0, 0, 0, 0.0, 0.0, ())
    for age_s in (0.0, 0.1, 30.0):
        workers = tuple(
            Candidate(
                f"w-{number}",
                WorkerUsage(load, load.running, load.running // 2, load.prompt_tokens),
                50 * number,
                0 if age_s == 0.0 else 100 * (number % 3),
                age_s,
                "class" if number % 2 else None,
                own=age_s == 0.0,
            )
            for number, load in enumerate([*loads, unknown])
        )
        for some in (workers[-1:], workers[:1], workers[3:5], workers):
            for rivals in (0, 1, 15):
                yield Candidates(some, rivals)
