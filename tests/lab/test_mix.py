"""Tests of the cheapest mix of machines, against enumeration and the example of Mélange."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations_with_replacement, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftgate.lab.planning.mix import BucketRates, MachineType, cheapest_mix

pytest.importorskip("scipy")


def _costs(workload: BucketRates, types: Sequence[MachineType]) -> Iterator[float]:
    """Yield the cost of every assignment of slices that is within the limits."""
    splits = []
    for bucket, rate in enumerate(workload.rates_rps):
        able = [n for n, one in enumerate(types) if one.throughput_rps[bucket] > 0.0]
        chosen = combinations_with_replacement(able, workload.slices if rate > 0.0 else 0)
        splits.append(list(chosen))
    for assignment in product(*splits):
        loads = [0.0] * len(types)
        for bucket, owners in enumerate(assignment):
            slice_rps = workload.rates_rps[bucket] / workload.slices
            for owner in owners:
                loads[owner] += slice_rps / types[owner].throughput_rps[bucket]
        counts = [math.ceil(load * (1.0 - 1e-6)) for load in loads]
        if all(one.most is None or n <= one.most for one, n in zip(types, counts, strict=True)):
            yield math.fsum(one.cost_per_hour * n for one, n in zip(types, counts, strict=True))


def _needed(
    mix_counts: Mapping[str, int], types: Mapping[str, MachineType], workload: BucketRates
) -> bool:
    """Return whether machines of these numbers can serve the workload."""
    limited = {
        name: MachineType(0.0, one.throughput_rps, mix_counts[name]) for name, one in types.items()
    }
    return cheapest_mix(workload, limited).feasible


_rates = st.sampled_from((0.0, 0.1, 0.5, 1.0, 2.5, 7.0))
_throughputs = st.sampled_from((0.0, 0.5, 1.0, 2.0, 3.0, 10.0))


@st.composite
def _problems(draw: st.DrawFn) -> tuple[BucketRates, dict[str, MachineType]]:
    buckets = draw(st.integers(1, 4))
    rates = draw(st.lists(_rates, min_size=buckets, max_size=buckets))
    types = {}
    for name in draw(st.sampled_from(("a", "ab", "abc"))):
        throughputs = draw(st.lists(_throughputs, min_size=buckets, max_size=buckets))
        cost = draw(st.sampled_from((0.7, 1.01, 3.67, 7.516)))
        most = draw(st.none() | st.integers(0, 4))
        types[name] = MachineType(cost, tuple(throughputs), most)
    return BucketRates(tuple(rates), draw(st.integers(1, 3))), types


@given(_problems())
@settings(max_examples=80, deadline=None)
def test_mix_costs_as_little_as_the_best_of_all_assignments(
    problem: tuple[BucketRates, dict[str, MachineType]],
) -> None:
    """No assignment of the slices is cheaper, and a mix is infeasible only if there is none."""
    workload, types = problem
    found = cheapest_mix(workload, types)
    costs = list(_costs(workload, list(types.values())))
    assert found.feasible == bool(costs)
    if costs:
        assert found.cost_per_hour == pytest.approx(min(costs), abs=1e-6)
        assert _needed(found.counts, types, workload)


def test_published_example_has_its_published_cost() -> None:
    """The example of Mélange needs three A10G and one A100 for 6.70 dollars per hour."""
    types = {
        "A10G": MachineType(1.01, (2.0, 1.0, 5.0, 2.0)),
        "A100": MachineType(3.67, (20.0, 20.0, 40.0, 20.0)),
    }
    found = cheapest_mix(BucketRates((6.0, 3.0, 15.0, 6.0)), types)
    assert found.counts == {"A10G": 3, "A100": 1}
    assert found.cost_per_hour == pytest.approx(6.70)


def test_bucket_that_no_type_can_serve_is_named() -> None:
    """A bucket with requests and no throughput is infeasible, and an empty one is not."""
    types = {"a": MachineType(1.0, (1.0, 0.0, 0.0)), "b": MachineType(9.0, (5.0, 0.0, 0.0))}
    found = cheapest_mix(BucketRates((1.0, 0.0, 2.0), 4), types)
    assert found.infeasible_buckets == (2,)
    assert found.counts == {"a": 0, "b": 0}


def test_limits_leave_out_as_little_as_possible() -> None:
    """With too few machines, the mix leaves out the bucket that needs more of them."""
    types = {"a": MachineType(1.0, (4.0, 1.0), 1)}
    assert cheapest_mix(BucketRates((4.0, 2.0), 2), types).infeasible_buckets == (1,)


@pytest.mark.parametrize("rate_rps", [1e-9, 1e-3])
def test_rare_requests_need_a_machine(rate_rps: float) -> None:
    """A load below the tolerance of the solver still needs one machine."""
    types = {"a": MachineType(1.0, (10.0, 10.0)), "b": MachineType(0.9, (10.0, 0.0))}
    found = cheapest_mix(BucketRates((rate_rps, rate_rps), 8), types)
    assert found.counts == {"a": 1, "b": 0}


def test_full_machine_needs_no_second_one() -> None:
    """Rounding of a load of exactly three machines does not add a fourth."""
    found = cheapest_mix(BucketRates((0.3,) * 10, 7), {"a": MachineType(2.0, (1.0,) * 10)})
    assert found.counts == {"a": 3}


@pytest.mark.parametrize(
    ("workload", "machine"),
    [
        (BucketRates((1.0,), 0), MachineType(1.0, (1.0,))),
        (BucketRates((-1.0,)), MachineType(1.0, (1.0,))),
        (BucketRates((math.nan,)), MachineType(1.0, (1.0,))),
        (BucketRates((1.0,)), MachineType(-1.0, (1.0,))),
        (BucketRates((1.0,)), MachineType(1.0, (math.inf,))),
        (BucketRates((1.0,)), MachineType(1.0, (1.0, 1.0))),
        (BucketRates((1.0,)), MachineType(1.0, (1.0,), -1)),
    ],
)
def test_wrong_numbers_are_rejected(workload: BucketRates, machine: MachineType) -> None:
    """A number without meaning raises an error instead of a plan."""
    with pytest.raises(ValueError, match=r"."):
        cheapest_mix(workload, {"a": machine})
