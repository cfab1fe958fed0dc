"""Conformance checks for policies: for our own tests, and for those of third parties."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle

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


def check_decision(policy: SpeculationPolicy, request: RequestView, load: WorkerLoad) -> None:
    """Check that a decision honours what the client asked for and what the worker has.

    Raises:
        AssertionError: the policy breaks the contract of `SpeculationPolicy.decide`.
    """
    plan = policy.decide(request, load)
    assert plan == policy.decide(request, load), "the same inputs must give the same plan"
    assert plan.mode is request.mode, "the plan must repeat what was asked for"
    assert plan.reason, "the client must learn why"
    assert (plan.proposer is None) == (plan.max_draft_tokens == 0), "no proposer, no drafts"
    wishless = request.mode is SpeculationMode.AUTO and len(load.proposers) > 0
    known = (None, *load.proposers, *([ANY_PROPOSER] if wishless else []))
    assert plan.proposer in known, "the worker has no such one"
    if request.mode in PROPOSER_MODES:
        assert plan.proposer in {None, request.mode.value}, "a named proposer is binding"
    if request.max_draft_tokens is not None:
        assert plan.max_draft_tokens <= request.max_draft_tokens, "the client's cap must hold"
    if request.mode is SpeculationMode.OFF:
        assert plan.proposer is None, "off must mean off"


def check_draft_lengths(policy: SpeculationPolicy, step: StepView, cost: StepCost) -> None:
    """Check that the lengths of a step fit its candidates and its budget.

    Raises:
        AssertionError: the policy breaks the contract of `SpeculationPolicy`.
    """
    least = policy.least_survival(replace(step, candidates=()), cost)
    assert least is None or least >= 0.0, "a survival below 0"
    lengths = list(policy.draft_lengths(step, cost))
    assert len(lengths) == len(step.candidates), "one length for each candidate"
    for length, candidate in zip(lengths, step.candidates, strict=True):
        assert 0 <= length <= candidate.max_draft_tokens, "a length beyond what can be verified"
    assert sum(lengths) <= step.slot_budget, "more slots than the step has room for"
    best = max((c.weight * max(c.survivals, default=0.0) for c in step.candidates), default=0.0)
    assert not any(lengths) or not least or best > least, "slots none of which is worth the least"


def check_speculation(policy: SpeculationPolicy) -> None:
    """Run the checks on a spread of requests, loads and steps."""
    cost = StepCost((16, 32, 64), (1e-3, 1.5e-3, 2.5e-3))
    for proposers in ((), ("ngram",), ("ngram", "draft_model")):
        for price in (0.0, 0.2, 2.0):
            load = WorkerLoad(3, 1, 5, 10, price, 0.6, proposers)
            for mode in SpeculationMode:
                for cap in (None, 0, 1, 100):
                    for view in _views(mode, cap):
                        check_decision(policy, view, load)
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
        for budget in (0, 3, 1000):
            for tokens in (count, 64, 400):
                for verify_s in (0.0, 1e-4):
                    step = StepView(
                        *(tokens, 100, count, budget, candidates, weight), verify_s=verify_s
                    )
                    check_draft_lengths(policy, step, cost)


def _views(mode: SpeculationMode, cap: int | None) -> tuple[RequestView, ...]:
    """Return requests of which nothing is known, and of which much is."""
    known = DraftCounts(300.0, 100.0)
    service = ServiceLevel(0.5, 0.01, -1)
    return (
        RequestView(10, 20, 0.0, mode, cap),
        RequestView(10, 20, 0.8, mode, cap, service, 0.9, known, known),
    )


def check_batching(policy: BatchingPolicy) -> None:
    """Run the checks of a batching policy on a spread of steps.

    Raises:
        AssertionError: the policy breaks the contract of `BatchingPolicy`.
    """
    cost = StepCost((16, 64, 256), (1e-3, 2e-3, 6e-3), 1e-7, 1e-5, 1e-8)
    for sequences in (0, 1, 40, 400):
        for most in (0, 1, 100, 5000):
            for within_s in (None, 0.0, 3e-3, 10.0):
                for known in (0, 3000):
                    batch = BatchView(
                        2 * sequences, 100 * sequences, sequences, most, known, within_s
                    )
                    tokens = policy.prefill_tokens(batch, cost)
                    assert tokens == policy.prefill_tokens(batch, cost), "not a function"
                    assert 0 <= tokens <= most, "more than there is room for"
                    assert tokens or not most or sequences, "nobody runs, and prompts wait"


def check_ordering(build: Callable[[], OrderingPolicy]) -> None:
    """Run the checks of an ordering policy on a queue that fills, is thinned out, and empties.

    Args:
        build: makes an empty queue.

    Raises:
        AssertionError: the policy breaks the contract of `OrderingPolicy`.
    """
    queue, waiting = build(), dict[int, Ticket]()
    assert queue.choose(0.0) is None, "nobody waits, nobody is next"
    assert queue.take(0.0) is None, "nobody waits, nobody is next"
    for key in range(200):
        now_s = key * 0.5
        ticket = _ticket(key, now_s)
        _check_ahead(queue, _ticket(10_000 + key, now_s), now_s)
        queue.push(ticket)
        waiting[key] = ticket
        if key % 7 == 3:
            assert queue.remove(key - 2) == waiting.pop(key - 2, None), "remove returns the ticket"
            assert queue.remove(key - 2) is None, "what is gone is gone"
        if key % 3 == 2:
            _check_taking(queue, waiting, now_s)
        _check_counts(queue, waiting)
    while waiting:
        _check_taking(queue, waiting, 1000.0)
        _check_counts(queue, waiting)
    assert queue.take(1000.0) is None, "each is taken once"


def _ticket(key: int, now_s: float) -> Ticket:
    share, work_s = 1.0 + key % 5 % 2, key % 4 * 0.1
    deadline_s = now_s + key * 7 % 5
    return Ticket(key, now_s, deadline_s, key % 3 - 1, f"tenant {key % 5}", share, work_s)


def _check_ahead(queue: OrderingPolicy, ticket: Ticket, now_s: float) -> None:
    ahead_s = queue.ahead_s(ticket, now_s)
    assert ahead_s == queue.ahead_s(ticket, now_s), "asking must change nothing"
    assert -1e-9 <= ahead_s <= queue.work_s + 1e-9, "more is ahead than waits"
    assert queue.class_ahead_s(ticket) <= ahead_s + 1e-9, "a class is more than all"


def _check_taking(queue: OrderingPolicy, waiting: dict[int, Ticket], now_s: float) -> None:
    chosen = queue.choose(now_s)
    assert chosen is not None, "somebody waits, so somebody is next"
    assert queue.choose(now_s) == chosen, "choosing must change nothing"
    assert queue.take(now_s) == chosen, "who is next is taken"
    assert waiting.pop(chosen.key) == chosen, "who is taken was waiting"


def _check_counts(queue: OrderingPolicy, waiting: dict[int, Ticket]) -> None:
    assert len(queue) == len(waiting), "the length is wrong"
    work_s = math.fsum(ticket.work_s for ticket in waiting.values())
    assert abs(queue.work_s - work_s) < 1e-6, "the sum of work is wrong"
    for tenant in ("tenant 0", "tenant 1", "nobody"):
        theirs = sum(ticket.tenant == tenant for ticket in waiting.values())
        assert queue.queued_of(tenant) == theirs, "a tenant's count is wrong"


def check_admission(build: Callable[[], AdmissionPolicy], *, bounded: bool = True) -> None:
    """Run the checks of an admission policy on a spread of requests, pools and queues.

    Args:
        build: makes a policy that has seen nothing.
        bounded: it keeps the queue's bound.

    Raises:
        AssertionError: the policy breaks the contract of `AdmissionPolicy`.
    """
    now_s = 0.0
    policy = build()
    for number, view in enumerate(_admission_views()):
        fresh = build().decide(view, now_s)
        assert fresh == build().decide(view, now_s), "the same past must give the same answer"
        answer = policy.decide(replace(view, fingerprint=number), now_s)
        now_s += 0.1
        for one in (fresh, answer):
            assert one.reason, "the client must learn why"
            if isinstance(one, Admitted):
                assert 0.0 <= one.wait_s <= one.ttft_s < math.inf, "no wait, or a negative one"
                assert 0.0 <= one.work_s < math.inf, "no work, or a negative one"
            else:
                assert 0.0 < one.retry_after_s < math.inf, "nobody can come back then"
        if isinstance(answer, Admitted):
            policy.learn(answer, answer.ttft_s * 1.5)
        if bounded and view.queue.length >= view.queue.capacity:
            assert isinstance(fresh, Refused), "the queue is full"
        if not view.queue.length and not view.pool.running:
            assert isinstance(fresh, Admitted), "nobody is here, and somebody is sent away"


def _admission_views() -> list[AdmissionView]:
    """Return requests of several kinds, where much or nothing is known."""
    views = []
    services = (ServiceLevel(), ServiceLevel(0.5), ServiceLevel(2.0, 0.03, -1))
    for speed in (WorkerSpeed(), WorkerSpeed(0.02, 1e-4, 1e-4), WorkerSpeed(0.05, 1e-3, 1e-3)):
        for running, length in ((0, 0), (8, 0), (16, 3), (16, 40), (16, 64)):
            work_s = 0.1 * length
            queue = QueueView(length, 64, length // 2, work_s, work_s / 2, work_s, 100 * length)
            pool = PoolView(2, 16, running, 50 * running, speed)
            views += [
                AdmissionView(
                    1, 500, 100.0, 10.0, n, service, sheddable=shed, pool=pool, queue=queue
                )
                for service in services
                for shed in (False, True)
                for n in (1, 4)
            ]
    return views


def check_routing(build: Callable[[], RoutingPolicy]) -> None:
    """Run the checks of a routing policy on a spread of requests, workers and rivals.

    Args:
        build: makes a policy that has placed nothing.

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
    assert policy.name == build().name, "a name must not change"


def _check_route(policy: RoutingPolicy, request: RouteView, candidates: Candidates) -> Route:
    def asked() -> Route:
        draws = cycle((0.0, 0.999, 0.3, 0.6))
        return policy.route(request, candidates, lambda: next(draws))

    route = asked()
    assert route == asked(), "the same draws must give the same answer"
    assert route.policy == policy.name, "a route says who decided"
    assert route.reason, "the operator must learn why"
    offered = [offer.worker_id for offer in route.offers]
    assert offered, "somebody has to take it"
    assert len(set(offered)) == len(offered), "a worker is offered twice"
    assert {one.worker_id for one in candidates.workers} >= set(offered), "no such worker"
    for offer in route.offers:
        assert math.isfinite(offer.score), "a score must be a number"
        assert 0.0 <= offer.score_per_token < math.inf, "a lease must not make a worker better"
    for predicted in (route.ttft_s, route.tpot_s):
        assert predicted is None or 0.0 <= predicted < math.inf, "no time is negative"
    assert 0 <= route.cached_tokens <= request.request.prompt_tokens, "more than there is"
    return route


def _route_views() -> list[RouteView]:
    """Return requests without and with all that can be known of them."""
    known = DraftCounts(300.0, 100.0)
    service = ServiceLevel(0.5, 0.01, -1)
    hashes = tuple(bytes([number]) * 16 for number in range(125))
    full = RequestView(2005, 500, 0.8, SpeculationMode.AUTO, 3, service, 0.9, known, known)
    return [
        RouteView(RequestView(1, 0, 0.0), 1, 0.0),
        RouteView(RequestView(300, 100, 1.0), 400, 80.0),
        RouteView(full, 10_020, 250.0, 4, "tenant", hashes),
        RouteView(replace(full, mode=SpeculationMode.OFF), 10_020, 250.0, 4, "tenant", hashes[:64]),
    ]


def _candidates() -> list[Candidates]:
    """Return workers idle and busy, new and old, alike and not, with and without rivals."""
    speeds = (
        WorkerSpeed(),
        WorkerSpeed(0.02, 1e-4, 1e-4, 0.01, 1e-4, 2e-5),
        WorkerSpeed(0.05, 1e-3),
    )
    loads = [
        WorkerLoad(
            running, waiting, free, 100, price, 0.6, proposers, 0.1, 16, prompts, speed=speed
        )
        for running, waiting, free, price, prompts in (
            (0, 0, 100, 0.0, 0),
            (8, 0, 40, 0.3, 700),
            (16, 5, 0, 1.5, 40_000),
        )
        for proposers in ((), ("ngram",), ("ngram", "draft_model"))
        for speed in speeds
    ]
    unknown = WorkerLoad(3, 0, 0, 0, 0.0, 0.0, ())
    found = []
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
        few = (workers[-1:], workers[:1], workers[3:5], workers)
        found += [Candidates(some, rivals) for some in few for rivals in (0, 1, 15)]
    return found
