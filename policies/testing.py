"""Conformance checks for policies: for our own tests, and for those of third parties."""

from __future__ import annotations

from dataclasses import replace

from policies.protocols import BatchingPolicy, SpeculationPolicy
from policies.step_cost import StepCost
from policies.types import (
    ANY_PROPOSER,
    PROPOSER_MODES,
    BatchView,
    DraftCandidate,
    DraftCounts,
    RequestView,
    ServiceLevel,
    SpeculationMode,
    StepView,
    WorkerLoad,
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
                tuple((i % 10 / 10) ** n for n in range(1, i % 9)), i % 3 * 1e-4, 1.0 + i % 2
            )
            for i in range(count)
        )
        weight = sum(candidate.weight for candidate in candidates)
        for budget in (0, 3, 1000):
            for tokens in (count, 64, 400):
                step = StepView(tokens, 100, count, budget, candidates, weight)
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
