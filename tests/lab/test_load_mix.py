"""Histograms of workloads, their bursts, and mixes for them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftgate.lab.planning.histogram import PlannedLength, burst_factor, histogram
from draftgate.lab.planning.load_mix import LoadPlanner, Offer
from draftgate.lab.planning.throughput import DraftPoint, Machine, Targets
from draftgate.policies.costs.step_cost import StepCost

FREE = StepCost((1,), (0.0,))
FAST = Machine(StepCost((1, 2048), (0.01, 0.05), 40e-9), 400_000, 256, 2048, FREE)
SLOW = Machine(StepCost((1, 2048), (0.03, 0.6), 200e-9), 30_000, 256, 2048, FREE)
TARGETS = Targets(2.0, 0.05, 0.95)

_requests = st.lists(
    st.builds(
        PlannedLength,
        st.just(0.0),
        st.integers(1, 9000),
        st.integers(1, 1200),
        st.sampled_from(("chat", "code")),
    ),
    min_size=1,
    max_size=30,
)


@given(_requests)
def test_every_request_is_in_the_bucket_of_its_lengths(requests: list[PlannedLength]) -> None:
    """Buckets partition the requests, and their sizes are the means of their requests."""
    buckets, owners = histogram(requests)
    assert sum(bucket.share for bucket in buckets) == pytest.approx(1.0)
    for one, owner in zip(requests, owners, strict=True):
        bucket = buckets[owner]
        assert bucket.class_name == one.class_name
        for length, (first, last) in (
            (one.prompt_tokens, bucket.prompt_range),
            (one.output_tokens, bucket.output_range),
        ):
            assert first <= length
            assert last is None or length <= last
    prompts = sum(bucket.share * bucket.size.prompt_tokens for bucket in buckets)
    assert prompts == pytest.approx(sum(one.prompt_tokens for one in requests) / len(requests))


def test_even_arrivals_need_no_more_than_the_mean() -> None:
    """Arrivals at equal distances have a factor of one."""
    arrivals_s = [float(second) for second in range(1001)]
    assert burst_factor(arrivals_s, [1.0] * 1001, 10.0, 0.995) == pytest.approx(1.0, rel=0.01)


def test_burst_needs_the_capacity_of_its_window() -> None:
    """A burst with a tenth of the requests counts if more than nine tenths must be in time."""
    arrivals_s = sorted([*(float(second) for second in range(900)), *[450.0] * 100])
    works = [1.0] * 1000
    assert burst_factor(arrivals_s, works, 10.0, 0.8) == pytest.approx(1.0, rel=0.15)
    assert burst_factor(arrivals_s, works, 10.0, 0.95) == pytest.approx(110 / 10 * 899 / 1000)


@given(st.lists(st.floats(0, 100), min_size=2, max_size=50), st.floats(0.5, 1.0))
def test_factor_is_at_least_one_and_grows_with_the_share(times: list[float], share: float) -> None:
    """A larger share never needs less capacity."""
    arrivals_s, works = sorted(times), [1.0] * len(times)
    smaller = burst_factor(arrivals_s, works, 5.0, share / 2)
    assert 1.0 <= smaller <= burst_factor(arrivals_s, works, 5.0, share)


def _planner(
    requests: list[PlannedLength], *drafts: DraftPoint, most: int | None = None
) -> LoadPlanner:
    offers = {
        "fast": Offer(FAST, 4.0, most, lambda _bucket: drafts),
        "slow": Offer(SLOW, 0.2, most, lambda _bucket: drafts),
    }
    return LoadPlanner.from_requests(requests, offers, TARGETS)


@settings(max_examples=8)
@given(_requests, st.floats(0.0, 4.0), st.floats(0.0, 1.0))
def test_speculation_never_raises_the_cost(
    requests: list[PlannedLength], slots: float, accepted: float
) -> None:
    """Each cell has the better throughput, so the cheapest mix never costs more with drafts."""
    pytest.importorskip("scipy")
    drafts = DraftPoint(slots, slots * accepted, 1.0, 4)
    without, with_drafts = _planner(requests).mix(5.0), _planner(requests, drafts).mix(5.0)
    if without.feasible:
        assert with_drafts.cost_per_hour <= without.cost_per_hour * (1.0 + 1e-9)


def test_short_requests_go_to_cheap_machines() -> None:
    """A mix of unlike machines costs less than either type alone."""
    pytest.importorskip("scipy")
    short = [PlannedLength(0.0, 100, 50)] * 9
    long = [PlannedLength(0.0, 7000, 100)]
    planner = _planner(short + long)
    mix = planner.mix(40.0)
    assert all(mix.counts.values())
    assert mix.cost_per_hour < planner.mix(40.0, "fast").cost_per_hour
    assert not planner.mix(40.0, "slow").feasible


def test_limits_leave_buckets_unserved() -> None:
    """With too few machines, the plan is infeasible and names buckets by their lengths."""
    pytest.importorskip("scipy")
    planner = _planner([PlannedLength(0.0, 3000, 300)], most=1)
    mix = planner.mix(100.0)
    assert not mix.feasible
    (bucket,) = (planner.buckets[one] for one in mix.infeasible_buckets)
    assert str(bucket) == "prompts of 2,000 to 3,999 and outputs of 250 to 499 tokens"
