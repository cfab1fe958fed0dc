"""The allocation of draft slots in a step, compared with brute force."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, product
from operator import mul

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.speculation.allocation import (
    FEW_SLOTS,
    _allocate_few,
    _allocate_many,
    allocate,
)
from draftgate.policies.speculation.price import least_slot_price
from draftgate.policies.types import DraftCandidate, StepView
from tests.examples import examples
from tests.policies.costs import H100_8B


def rate(step: StepView, lengths, cost: StepCost) -> float:
    """Compute the weighted expected tokens per second from the definition."""
    chosen = list(zip(step.candidates, lengths, strict=True))
    gained = sum(c.weight * sum(c.survivals[:length]) for c, length in chosen)
    slots = sum(lengths)
    displaced = min(max(slots - step.free_slots, 0), step.prefill_tokens)
    fed = step.tokens + slots - displaced
    step_s = cost.seconds(fed, step.kv_tokens, step.sequences, slots)
    if step.prefill_tokens:
        without_s = cost.seconds(step.tokens - step.prefill_tokens)
        prompts_s = cost.seconds(step.tokens) - without_s
        whole_s = cost.seconds(step.tokens, step.kv_tokens, step.sequences)
        share_s = max(whole_s / step.tokens, prompts_s / step.prefill_tokens)
        step_s += displaced * share_s - prompts_s
    step_s += step.verify_s if slots else 0.0
    depths = {c.depth_s: 0 for c in step.candidates}
    for candidate, length in chosen:
        depths[candidate.depth_s] = max(length, depths[candidate.depth_s])
    draft_s = sum(depth_s * depth for depth_s, depth in depths.items())
    draft_s += sum({c.depth_s: c.call_s for c, length in chosen if length}.values())
    return (step.total_weight + gained) / (step_s + draft_s)


def best_rate(step: StepView, cost: StepCost) -> float:
    """Return the best rate over all draft lengths."""
    ranges = (range(len(candidate.survivals) + 1) for candidate in step.candidates)
    allowed = (lengths for lengths in product(*ranges) if sum(lengths) <= step.slot_budget)
    return max(rate(step, lengths, cost) for lengths in allowed)


@st.composite
def costs(draw) -> StepCost:
    buckets = sorted(draw(st.sets(st.integers(1, 24), min_size=1, max_size=6)))
    rises = [draw(st.sampled_from([0.0, 1e-4, 1e-3, 4e-3])) for _ in buckets]
    table = tuple(accumulate(rises, initial=draw(st.floats(1e-3, 5e-3))))[1:]
    return StepCost(tuple(buckets), table, 1e-6, 1e-5, draw(st.sampled_from([0.0, 1e-6])))


def candidates(depths_s, calls_s=()):
    chances = st.lists(st.floats(0.0, 1.0), max_size=4)
    survivals = chances.map(lambda each: tuple(accumulate(each, mul)))
    weights = st.sampled_from([1.0, 1.0, 0.5, 4.0])
    calls = dict(zip(depths_s, calls_s, strict=False))

    def candidate(survivals, depth_s, weight) -> DraftCandidate:
        return DraftCandidate(survivals, depth_s, weight, call_s=calls.get(depth_s, 0.0))

    one = st.builds(candidate, survivals, st.sampled_from(depths_s), weights)
    return st.lists(one, min_size=1, max_size=4)


def check_is_best(
    offered, others, budget, cost, prefill_tokens=0, free_slots=0, verify_s=0.0
) -> None:
    many = len(offered) + others
    weight = others + sum(candidate.weight for candidate in offered)
    step = StepView(
        *(many + prefill_tokens, 50 * many, many, budget, tuple(offered), weight),
        prefill_tokens=prefill_tokens,
        free_slots=free_slots,
        verify_s=verify_s,
    )
    lengths = allocate(step, cost)
    assert all(0 <= n <= len(c.survivals) for n, c in zip(lengths, offered, strict=True))
    assert sum(lengths) <= budget
    assert rate(step, lengths, cost) == pytest.approx(best_rate(step, cost), rel=1e-9)


@given(candidates([0.0]), st.integers(0, 8), st.integers(0, 18), costs())
@settings(max_examples=examples(200))
def test_existing_drafts_are_allocated_optimally(offered, others, budget, cost) -> None:
    """The allocation of n-gram drafts has the best rate for any step cost."""
    check_is_best(offered, others, budget, cost)


@given(candidates([0.0, 1e-4, 1e-3]), st.integers(0, 8), st.integers(0, 18), costs())
@settings(max_examples=examples(200))
def test_depths_of_computed_drafts_are_optimal(offered, others, budget, cost) -> None:
    """The allocation finds the best depths for two computing proposers and a free proposer."""
    check_is_best(offered, others, budget, cost)


@given(
    *(candidates([0.0, 1e-4]), st.integers(0, 8), st.integers(0, 18), costs()),
    *(st.integers(1, 12), st.integers(0, 6)),
)
@settings(max_examples=examples(200))
def test_allocation_beside_prompts_is_optimal(
    offered, others, budget, cost, prefill_tokens, free_slots
) -> None:
    """Slots use the tokens that prompts leave in the step, then displace prompt tokens."""
    check_is_best(offered, others, budget, cost, prefill_tokens, free_slots)


once_s = st.sampled_from([0.0, 1e-5, 2e-4, 5e-3])


@given(
    *(candidates([0.0, 1e-4, 1e-3], [0.0, 3e-4, 1e-3]), st.integers(0, 8), st.integers(0, 18)),
    *(costs(), st.integers(0, 6), st.integers(0, 6), once_s),
)
@settings(max_examples=examples(300))
def test_allocation_with_host_time_is_optimal(
    offered, others, budget, cost, prefill_tokens, free_slots, verify_s
) -> None:
    """The allocation includes the host time of verification and of each computing proposer."""
    check_is_best(offered, others, budget, cost, prefill_tokens, free_slots, verify_s)


@given(candidates([0.0, 1e-4]), st.integers(0, 8), st.integers(0, 18), costs())
def test_nothing_is_drafted_if_the_host_takes_longer_than_it_gains(
    offered, others, budget, cost
) -> None:
    """The allocation drafts nothing if the host time exceeds the gain."""
    many = len(offered) + others
    weight = others + sum(candidate.weight for candidate in offered)
    step = StepView(many, 50 * many, many, budget, tuple(offered), weight)
    most = sum(c.weight * sum(c.survivals) for c in offered)
    without_s = cost.seconds(many, 50 * many, many)
    expensive = replace(step, verify_s=(most / weight + 1e-9) * without_s)
    assert allocate(expensive, cost) == [0] * len(offered)


@given(candidates([0.0]), st.integers(0, 8), st.integers(0, 18), costs(), once_s)
def test_algorithms_for_few_and_many_slots_agree(offered, others, budget, cost, verify_s) -> None:
    """The algorithms for few slots and for many slots give the same rate."""
    many = len(offered) + others
    weight = others + sum(candidate.weight for candidate in offered)
    step = StepView(many, 50 * many, many, budget, tuple(offered), weight, verify_s=verify_s)
    few, others_way = _allocate_few(step, cost), _allocate_many(step, cost)
    assert rate(step, few, cost) == pytest.approx(rate(step, others_way, cost), rel=1e-9)


@given(candidates([0.0]), st.integers(0, 8), st.integers(1, 18), costs(), once_s)
def test_no_slot_below_the_least_price_is_taken(offered, others, budget, cost, verify_s) -> None:
    """The allocation takes no slot when no weighted survival exceeds the least price."""
    many = len(offered) + others
    weight = others + sum(candidate.weight for candidate in offered)
    step = StepView(many, 50 * many, many, budget, tuple(offered), weight, verify_s=verify_s)
    best = max(c.weight * max(c.survivals, default=0.0) for c in offered)
    least = least_slot_price(step, cost)
    assert least >= 0.0
    if best < least * (1 - 1e-9):
        assert allocate(step, cost) == [0] * len(offered)


def start_rate(step: StepView, lengths, cost: StepCost) -> float:
    """Return the rate of a step that includes the start costs of all drafting sequences."""
    start_s = sum(c.start_s for c, n in zip(step.candidates, lengths, strict=True) if n)
    gained = sum(
        c.weight * sum(c.survivals[:n]) for c, n in zip(step.candidates, lengths, strict=True)
    )
    total = step.total_weight + gained
    return total / (total / rate(step, lengths, cost) + start_s)


@given(candidates([0.0, 1e-3]), st.lists(st.floats(0.0, 1e-2), min_size=4, max_size=4), costs())
@settings(max_examples=examples(200))
def test_start_costs_count_against_new_drafts(offered, starts, cost) -> None:
    """With start costs, the allocation gains at least as much as no new drafts, and is close to the
    optimum."""
    begun = [
        replace(c, start_s=start_s if c.depth_s else 0.0)
        for c, start_s in zip(offered, starts, strict=False)
    ]
    many = len(begun)
    step = StepView(many, 50 * many, many, 16, tuple(begun), sum(c.weight for c in begun))
    lengths = allocate(step, cost)
    ranges = [range(len(c.survivals) + 1) for c in begun]
    rates = {each: start_rate(step, each, cost) for each in product(*ranges)}
    without = max(
        rated
        for each, rated in rates.items()
        if not any(n and c.start_s for n, c in zip(each, begun, strict=True))
    )
    assert rates[tuple(lengths)] >= without * (1 - 1e-9)
    assert rates[tuple(lengths)] >= 0.9 * max(rates.values())


def test_expensive_start_is_left_out() -> None:
    """A long catch-up excludes only its own sequence from drafting."""
    ready = DraftCandidate((0.9, 0.8, 0.7), 1e-4)
    behind = replace(ready, start_s=1.0)
    step = StepView(2, 1000, 2, 16, (ready, behind))
    assert allocate(step, H100_8B) == [3, 0]


def test_large_batch_takes_the_likeliest_slots() -> None:
    """A batch beyond `FEW_SLOTS` takes the likeliest slots of all sequences."""
    good, poor = DraftCandidate((0.9, 0.8, 0.7)), DraftCandidate((0.01,) * 8)
    batch = (good, poor) * (FEW_SLOTS // 8)
    step = StepView(len(batch), 1000, len(batch), 1024, batch)
    assert sum(len(candidate.survivals) for candidate in batch) > FEW_SLOTS
    assert allocate(step, H100_8B) == [3, 0] * (FEW_SLOTS // 8)
    assert allocate(step, H100_8B) == _allocate_few(step, H100_8B)


def test_heavier_sequence_gets_the_slot() -> None:
    """If two drafts are equal, the allocation verifies the draft of the sequence with the higher
    weight."""
    fair = DraftCandidate((0.8, 0.64))
    expensive = DraftCandidate((0.8, 0.64), weight=3.0)
    step = StepView(2, 1000, 2, 2, (fair, expensive), 4.0)
    assert allocate(step, H100_8B) == [0, 2]


def test_ties_go_to_earlier_candidates() -> None:
    """Among equal slots, the allocation makes the same choice on every machine."""
    step = StepView(3, 300, 3, 4, (DraftCandidate((0.5, 0.5, 0.5)),) * 3)
    assert allocate(step, StepCost((64,), (1e-3,))) == [3, 1, 0]


def test_no_candidates_or_no_budget_gives_no_drafts() -> None:
    """The allocation drafts nothing without candidates, with empty candidates, and without a
    budget."""
    assert allocate(StepView(2, 10, 2, 8, ()), H100_8B) == []
    assert allocate(StepView(2, 10, 2, 8, (DraftCandidate(()),) * 2), H100_8B) == [0, 0]
    assert allocate(StepView(2, 10, 2, 0, (DraftCandidate((0.9,)),) * 2), H100_8B) == [0, 0]
