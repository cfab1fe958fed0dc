"""Tests of deployments, the bounds of their rates, and the search for the best one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import TypeVar

import hypothesis.strategies as st
import pytest
from hypothesis import given

from draftgate.lab.planning.best_deployment import (
    MARGIN,
    DeploymentCandidate,
    Measured,
    Outcome,
    find_best,
    find_least,
    ranked,
    without_divisors,
)
from draftgate.lab.planning.bounds import (
    MeanLengths,
    RateBounds,
    bounds,
    largest_batch,
    pool_bound,
)
from draftgate.lab.planning.deployments import (
    Budget,
    Deployment,
    Group,
    Layout,
    bound_rps,
    deployments,
    maximal,
)
from draftgate.lab.planning.throughput import DraftPoint, Machine, Targets
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.types import Role
from draftgate.policies.values import replace

COST = StepCost((1, 100, 2048), (0.02, 0.024, 0.2), 1e-6, 1e-4, 1e-8)
DEPTHS = StepCost((1,), (0.0,))
MACHINE = Machine(COST, 60_000, 256, 2048, DEPTHS)
LENGTHS = MeanLengths.from_requests([(500, 200), (1500, 100), (100, 300)], 0.9)
RATES = st.floats(0.0, 10.0)
Found = TypeVar("Found", Outcome, Measured)
MACHINES = st.builds(RateBounds, RATES, RATES, RATES)


def _candidate(
    bound: float, layout: Layout = Layout.TOGETHER, weight: float = 1.0
) -> DeploymentCandidate:
    roles = {
        Layout.TOGETHER: (Role.ANY,),
        Layout.APART: (Role.PREFILL, Role.DECODE),
        Layout.MIXED: tuple(Role),
    }
    groups = tuple(Group("a", role, 1) for role in roles[layout])
    return DeploymentCandidate(Deployment(groups), bound, weight)


def test_lengths_are_those_of_the_requests() -> None:
    """A decode step reads the prompt and half the output, weighted by the output tokens."""
    assert LENGTHS.prompt_tokens == pytest.approx(700.0)
    assert LENGTHS.output_tokens == pytest.approx(200.0)
    assert LENGTHS.context_tokens == pytest.approx((200 * 600 + 100 * 1550 + 300 * 250) / 600)
    assert LENGTHS.longest_prompt == 1500
    with pytest.raises(ValueError, match="no requests"):
        MeanLengths.from_requests([], 0.9)


def test_decode_bound_is_that_of_the_best_batch() -> None:
    """The batch grows up to the TPOT limit, the memory or the limit of sequences."""
    context = LENGTHS.context_tokens
    batch = largest_batch(MACHINE, context, 0.05)
    seconds = [COST.seconds(n, round(n * context), n) for n in range(1, batch + 2)]
    assert seconds[batch - 1] <= 0.05 < seconds[batch]
    best = max(n / step_s for n, step_s in enumerate(seconds[:batch], 1))
    assert bounds(MACHINE, LENGTHS, Targets(tpot_s=0.05)).decode_rps == pytest.approx(best / 200.0)
    assert largest_batch(Machine(COST, 10_000, 256, 2048, DEPTHS), 1000.0, 0.1) == 10
    assert largest_batch(Machine(COST, 10_000, 3, 2048, DEPTHS), 1000.0, 0.1) == 3
    assert largest_batch(Machine(COST, 10_000, 256, 2048, DEPTHS), 1000.0, 0.01) == 0


def test_prompts_that_miss_their_limit_alone_exclude_a_machine() -> None:
    """A machine that is too slow for the longest prompts of the share serves no prompt."""
    assert bounds(MACHINE, LENGTHS, Targets(ttft_s=0.1)).both_rps == 0.0
    assert bounds(MACHINE, LENGTHS, Targets(ttft_s=0.3)).both_rps > 0.0


@given(targets=st.builds(Targets, st.floats(0.05, 2.0), st.floats(0.03, 0.5)), more=st.floats(1, 3))
def test_bounds_rise_with_looser_targets(targets: Targets, more: float) -> None:
    """Looser targets never lower a bound."""
    looser = Targets(more * targets.ttft_s, more * targets.tpot_s, targets.share)
    strict, loose = (bounds(MACHINE, LENGTHS, one) for one in (targets, looser))
    assert loose.prefill_rps >= strict.prefill_rps
    assert loose.decode_rps >= strict.decode_rps


def test_drafts_raise_the_bounds_where_tpot_limits_the_batch() -> None:
    """Two tokens per step allow steps of twice the limit, with more sequences and prompts."""
    tight, drafts = Targets(tpot_s=0.03), DraftPoint(2.0, 1.0, 1.0, 2)
    without, found = (bounds(MACHINE, LENGTHS, tight, ways) for ways in ((), (drafts,)))
    batch = largest_batch(MACHINE, LENGTHS.context_tokens, 0.06, drafts)
    step_s = COST.seconds(3 * batch, round(batch * LENGTHS.context_tokens), batch, 2 * batch)
    assert step_s <= 0.06
    assert found.decode_rps == pytest.approx(batch * 2.0 / step_s / 200.0, rel=0.02)
    assert found.decode_rps > without.decode_rps
    assert found.prefill_share_rps > without.prefill_share_rps
    assert found.prefill_rps == without.prefill_rps


@given(slots=st.floats(0.0, 8.0), share=st.floats(0.0, 1.0))
def test_ways_to_draft_never_lower_a_bound(slots: float, share: float) -> None:
    """A machine may always choose not to draft."""
    targets = Targets(0.5, 0.04)
    without = bounds(MACHINE, LENGTHS, targets)
    found = bounds(MACHINE, LENGTHS, targets, [DraftPoint(slots, share * slots, 1.0, 8)])
    assert found.decode_rps >= without.decode_rps
    assert found.both_rps >= without.both_rps


@given(machine=MACHINES, count=st.integers(1, 4))
def test_equal_machines_with_both_phases_add_up(machine: RateBounds, count: int) -> None:
    """Machines of one type that do both phases have the sum of their own bounds."""
    assert pool_bound([], [], [machine] * count) == pytest.approx(
        count * machine.both_rps, abs=1e-6
    )


@given(
    st.lists(MACHINES, max_size=3), st.lists(MACHINES, max_size=3), st.lists(MACHINES, max_size=3)
)
def test_pool_bound_is_the_best_division_of_time(prefill, decode, both) -> None:
    """No division of the time of machines with both phases exceeds the bound."""
    found = pool_bound(prefill, decode, both)
    best = 0.0
    for shares in product((0.0, 0.25, 0.5, 0.75, 1.0), repeat=len(both)):
        prompts = sum(one.prefill_rps for one in prefill)
        outputs = sum(one.decode_rps for one in decode)
        for share, one in zip(shares, both, strict=True):
            prompts += share * one.prefill_share_rps
            outputs += (1.0 - share) * one.decode_rps
        best = max(best, min(prompts, outputs))
    assert found >= best - 1e-6
    assert found <= sum(one.prefill_rps for one in prefill) + sum(
        one.prefill_share_rps for one in both
    )


def test_all_deployments_within_the_budgets_are_found_once() -> None:
    """Each role has one type of machine, and a pool without one of the phases is left out."""
    budget = Budget({"a": 1.0, "b": 2.0}, 3.0)
    found = list(deployments(("a", "b"), [budget], 8))
    assert len(found) == len(set(map(str, found)))
    texts = set(map(str, found))
    assert "3 x a" in texts
    assert "1 x a prefill + 1 x b decode" in texts
    assert "1 x a + 1 x a prefill + 1 x a decode" in texts
    assert "1 x a + 1 x a decode" in texts
    assert not any(text.endswith("x a prefill") and "+" not in text for text in texts)
    assert all(budget.admits(one) for one in found)
    assert {one.layout for one in found} == set(Layout)
    assert all(one.machines <= 2 for one in deployments(("a", "b"), [budget], 2))


def test_maximal_deployments_have_no_room_for_another_machine() -> None:
    """Of the deployments of one role, only the largest is maximal."""
    budgets = [Budget({"a": 1.0}, 3.0)]
    every = [one for one in deployments(("a",), budgets, 8) if one.layout is Layout.TOGETHER]
    assert [str(one) for one in maximal(every, budgets, 8)] == ["3 x a"]
    assert [str(one) for one in maximal(every, [Budget({"a": 0.0}, math.inf)], 3)] == ["3 x a"]


def test_repeated_deployment_has_the_same_bound_per_machine() -> None:
    """Several copies of a deployment have a multiple of its bound and of its price."""
    once = Deployment((Group("a", Role.PREFILL, 1), Group("b", Role.DECODE, 2)))
    machines = {"a": RateBounds(3.0, 1.0, 2.0), "b": RateBounds(1.0, 2.0, 1.0)}
    assert bound_rps(once, machines) == pytest.approx(3.0)
    assert bound_rps(once.repeated(4), machines) == pytest.approx(12.0)
    assert once.repeated(4).total({"a": 2.0, "b": 1.0}) == pytest.approx(16.0)


CANDIDATES = st.lists(
    st.tuples(
        st.floats(0.1, 9.0),
        st.floats(0.0, 1.0),
        st.sampled_from([1.0, 2.0]),
        st.sampled_from(Layout),
    ),
    min_size=1,
    max_size=8,
)
"""The bound of each candidate, its rate as a share of the bound, its weight and its layout."""


def _each(
    of_one: Callable[[DeploymentCandidate, float], Found],
) -> Callable[[Sequence[tuple[DeploymentCandidate, float]]], list[Found]]:
    """Return a function of several pairs, each with the result of a function of one pair."""
    return lambda pairs: [of_one(candidate, rate_rps) for candidate, rate_rps in pairs]


UNCLEAR = _each(lambda _candidate, _rate_rps: Outcome.UNCLEAR)
FAILING = _each(lambda _candidate, _rate_rps: Outcome.FAILS)


@given(CANDIDATES, st.sampled_from([1.0, 1.2]))
def test_search_finds_the_best_and_measures_nothing_that_is_worse(drawn, doubt: float) -> None:
    """Without errors, the best value is that of all candidates, whatever is unclear to the tests.

    A candidate that fails where another one serves is not measured.
    """
    candidates = [_candidate(bound, layout, weight) for bound, _, weight, layout in drawn]
    rates = {
        id(one): one.bound_rps * share
        for one, (_, share, *_) in zip(candidates, drawn, strict=True)
    }

    def test(candidate: DeploymentCandidate, rate_rps: float) -> Outcome:
        rate = rates[id(candidate)]
        if rate / doubt <= rate_rps <= rate * doubt:
            return Outcome.UNCLEAR
        return Outcome.SERVES if rate > rate_rps else Outcome.FAILS

    def measure(candidate: DeploymentCandidate, beat_rps: float) -> Measured:
        (rate,) = (rates[id(one)] for one in candidates if one.deployment is candidate.deployment)
        assert rate <= candidate.bound_rps
        return Measured(candidate, None if rate < beat_rps else rate, rate, rate)

    found = find_best(candidates, _each(test), _each(measure), most=100)
    best = max(rates[id(one)] / one.weight for one in candidates)
    known = [one.value for one in found.measured if one.rate_rps]
    if best > max(one.bound_rps / one.weight for one in candidates) / 64:
        assert best / doubt <= max(known) * (1.0 + 1e-9)
        assert max(known) <= best * (1.0 + 1e-9)
    assert found.complete
    assert not found.unmeasured
    assert [one.candidate for one in found.measured] == ranked(candidates)


def test_one_test_eliminates_each_candidate_that_is_worse() -> None:
    """The most promising candidate is tested until its rate is known, and each other one once."""
    rates = [1.9, 0.5, 1.0, 0.2, 0.1]
    candidates = [_candidate(4.0 - index / 10) for index in range(len(rates))]
    tested: list[tuple[int, float]] = []

    def test(candidate: DeploymentCandidate, rate_rps: float) -> Outcome:
        index = candidates.index(candidate)
        tested.append((index, round(rate_rps, 3)))
        return Outcome.SERVES if rates[index] > rate_rps else Outcome.FAILS

    measured: list[int] = []

    def measure(candidate: DeploymentCandidate, _beat_rps: float) -> Measured:
        index = round(10.0 * (4.0 - candidates[0].bound_rps)) if not measured else -1
        measured.append(index)
        return Measured(candidate, rates[0], 1.8, 2.0)

    find_best(candidates, _each(test), _each(measure), most=9)
    assert tested[:3] == [(0, 1.6), (0, 2.0), (0, 1.789)]
    value = max(rate for index, rate in tested if index == 0 and rate < rates[0])
    assert rates[0] / 1.06 < value
    assert tested[-4:] == [(index, value) for index in (1, 2, 3, 4)]
    assert {index for index, _ in tested[:-4]} == {0}
    assert measured == [0]


def test_candidates_with_far_lower_estimates_are_named_and_not_simulated() -> None:
    """An estimate excludes a candidate only beside a rate that another one serves, by a margin."""
    estimates = [2.0, 2.0 / MARGIN, 0.9 / MARGIN]
    candidates = [replace(_candidate(4.0), expected_rps=rate_rps) for rate_rps in estimates]
    tested: list[float] = []

    def test(candidate: DeploymentCandidate, rate_rps: float) -> Outcome:
        tested.append(candidate.expected_rps)
        return Outcome.SERVES if rate_rps < candidate.expected_rps else Outcome.FAILS

    measure = _each(lambda one, _: Measured(one, one.expected_rps, 1.9, 2.1))
    found = find_best(candidates, _each(test), measure, most=9)
    assert list(found.unlikely) == candidates[2:]
    assert [one.candidate for one in found.measured] == candidates[:2]
    assert set(tested) == set(estimates[:2])
    assert not find_best(candidates, FAILING, measure, most=9).unlikely


def test_better_candidate_raises_the_rate_for_all_that_follow() -> None:
    """A candidate that serves more than the first one is tested at higher rates."""
    rates = [1.1, 3.0, 2.0]
    candidates = [_candidate(4.0 - index / 10) for index in range(len(rates))]
    tested: list[tuple[int, float]] = []

    def test(candidate: DeploymentCandidate, rate_rps: float) -> Outcome:
        index = candidates.index(candidate)
        tested.append((index, round(rate_rps, 2)))
        return Outcome.SERVES if rates[index] > rate_rps else Outcome.FAILS

    def measure(candidate: DeploymentCandidate, _beat_rps: float) -> Measured:
        return Measured(candidate, 3.0, 2.9, 3.1)

    find_best(candidates, _each(test), _each(measure), most=9)
    value = max(rate for index, rate in tested if index == 1 and rate < rates[1])
    assert tested[-1] == (2, value)
    assert [index for index, _ in tested].count(2) == 1


@given(CANDIDATES, st.integers(1, 30))
def test_interrupted_search_returns_what_it_knows(drawn, after: int) -> None:
    """An interruption at any time leaves intervals that hold the rates, and says so."""
    candidates = [_candidate(bound, layout, weight) for bound, _, weight, layout in drawn]
    rates = [bound * share for bound, share, *_ in drawn]
    calls = 0

    def rate_of(candidate: DeploymentCandidate) -> float:
        nonlocal calls
        calls += 1
        if calls > after:
            raise KeyboardInterrupt
        places = (n for n, one in enumerate(candidates) if one.deployment is candidate.deployment)
        return rates[next(places)]

    def test(candidate: DeploymentCandidate, rate_rps: float) -> Outcome:
        return Outcome.SERVES if rate_of(candidate) > rate_rps else Outcome.FAILS

    def measure(candidate: DeploymentCandidate, _beat_rps: float) -> Measured:
        rate = rate_of(candidate)
        return Measured(candidate, rate, rate, rate)

    found = find_best(candidates, _each(test), _each(measure), most=100)
    assert found.interrupted == (calls > after)
    assert len(found.measured) == len(candidates)
    if found.interrupted:
        assert not found.complete
        for one in found.measured:
            rate = next(
                rates[n]
                for n, other in enumerate(candidates)
                if other.deployment is one.candidate.deployment
            )
            assert one.low_rps <= rate * (1 + 1e-9)
            assert rate <= max(one.high_rps, drawn[0][0] / 128) * (1 + 1e-9) or not one.high_rps


def test_deployment_with_a_multiple_is_left_out() -> None:
    """Of one, two and four machines that share a queue, only four are compared."""
    once, apart = _candidate(1.0), _candidate(2.0, Layout.APART)
    several = [
        DeploymentCandidate(once.deployment.repeated(n), float(n), float(n)) for n in (1, 2, 3, 4)
    ]
    kept = without_divisors([*several, apart])
    assert kept == [several[2], several[3], apart]
    found = find_best(several, UNCLEAR, _each(lambda one, _: Measured(one, 1.0, 0.9, 1.1)), most=9)
    assert (found.dominated, len(found.measured)) == (2, 2)


def test_candidates_that_serve_nothing_are_not_measured() -> None:
    """A search is complete without a measurement if every candidate fails at every rate."""

    def measure(candidate: DeploymentCandidate, _beat_rps: float) -> Measured:
        raise AssertionError(candidate)

    found = find_best([_candidate(2.0), _candidate(1.0)], FAILING, _each(measure), most=9)
    assert found.complete
    assert found.best is None
    assert {one.high_rps for one in found.measured} == {0.0}


def test_simple_layouts_are_measured_first() -> None:
    """Candidates are in the order of their layouts, and then of their bounds by weight."""
    mixed, apart = _candidate(9.0, Layout.MIXED), _candidate(8.0, Layout.APART, weight=4.0)
    low, high = _candidate(6.0, weight=6.0), _candidate(4.0, weight=2.0)
    assert ranked([mixed, low, apart, high]) == [high, low, apart, mixed]


@pytest.mark.parametrize(("bound", "complete"), [(0.9, True), (2.0, False)])
def test_limit_of_tests_is_reported(bound: float, complete: bool) -> None:
    """A search names what its limit leaves out, and is incomplete if that might be better."""
    found = find_best(
        [_candidate(3.0), _candidate(bound)],
        UNCLEAR,
        _each(lambda one, _: Measured(one, 1.0, 0.9, 1.1)),
        most=1,
    )
    assert found.complete is complete
    assert [one.bound_rps for one in found.unmeasured] == [bound]


@pytest.mark.parametrize(("low", "recommended"), [(1.9, Layout.TOGETHER), (2.2, Layout.APART)])
def test_simpler_layout_wins_unless_it_is_certainly_worse(low: float, recommended: Layout) -> None:
    """Together is recommended if its interval reaches the interval of the best deployment."""
    rates = {Layout.TOGETHER: (2.0, 1.9, 2.1), Layout.APART: (2.3, low, 2.4)}

    def measure(candidate: DeploymentCandidate, _beat_rps: float) -> Measured:
        return Measured(candidate, *rates[candidate.deployment.layout])

    def test(candidate: DeploymentCandidate, rate_rps: float) -> Outcome:
        serves = rate_rps <= rates[candidate.deployment.layout][1]
        return Outcome.SERVES if serves else Outcome.UNCLEAR

    candidates = [_candidate(5.0, layout) for layout in rates]
    best = find_best(candidates, _each(test), _each(measure), most=9).best
    assert best is not None
    assert best.candidate.deployment.layout is recommended


def test_only_candidates_that_are_certainly_worse_are_left_out() -> None:
    """A candidate must reach the lower end of the best interval, not the estimate."""
    limits: list[float] = []

    def measure(candidate: DeploymentCandidate, beat_rps: float) -> Measured:
        limits.append(beat_rps)
        return Measured(candidate, 2.3, 2.0, 2.6)

    found = find_best(
        [_candidate(bound) for bound in (5.0, 2.2, 1.9)], UNCLEAR, _each(measure), most=9
    )
    assert limits == [0.0, 2.0]
    assert [one.rate_rps for one in found.measured] == [2.3, 2.3, None]
    assert found.complete


LEAST = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.sampled_from(((Role.ANY,), (Role.PREFILL, Role.DECODE))),
        st.integers(1, 6),
        st.integers(1, 6),
    ),
    min_size=1,
    max_size=20,
    unique=True,
)
"""The type of machines, their roles, and the number of the first and of the second role."""


@given(LEAST, st.floats(0.5, 12.0), st.floats(0.2, 1.0))
def test_least_weight_that_serves_the_rate_is_found(drawn, rate_rps: float, share: float) -> None:
    """The search finds the least weight if more machines never serve less, with the bound ahead."""
    prices = {"a": 1.0, "b": 1.7}
    candidates = {}
    for name, roles, *counts in drawn:
        groups = tuple(Group(name, role, n) for role, n in zip(roles, counts, strict=False))
        deployment = Deployment(groups)
        bound = prices[name] * min(counts[: len(roles)])
        candidates[deployment] = DeploymentCandidate(deployment, bound, deployment.total(prices))
    tested: list[Deployment] = []

    def holds(one: DeploymentCandidate) -> bool:
        assert one.bound_rps >= rate_rps
        tested.append(one.deployment)
        return share * one.bound_rps >= rate_rps

    found = find_least(candidates.values(), rate_rps, holds, most=99)
    serving = [one for one in candidates.values() if share * one.bound_rps >= rate_rps]
    assert found.complete
    assert len(tested) == len(set(tested))
    if serving:
        assert found.best is not None
        assert found.best.candidate.weight == min(one.weight for one in serving)
    else:
        assert found.best is None


def test_larger_deployment_that_fails_excludes_smaller_ones() -> None:
    """Sixteen machines of one type need few tests, and the limit of tests is reported."""
    candidates = [
        DeploymentCandidate(Deployment((Group("a", Role.ANY, n),)), 9.0, float(n))
        for n in range(1, 17)
    ]
    tested: list[float] = []

    def holds(one: DeploymentCandidate) -> bool:
        tested.append(one.weight)
        return one.weight >= 11

    found = find_least(candidates, 1.0, holds, most=9)
    assert found.best is not None
    assert found.best.candidate.weight == 11.0
    assert len(tested) <= 4
    none = find_least(candidates, 1.0, lambda _one: False, most=1)
    assert (none.best, none.complete, len(none.unmeasured)) == (None, False, 7)
