"""The choice of a proposer for each sequence."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, product
from operator import mul

import hypothesis.strategies as st
import pytest
from hypothesis import given

from draftgate.policies.speculation.arbitration import arbitrate
from draftgate.policies.types import DraftCandidate

DEPTH_S = 1e-3
RATE = 100.0  # tokens per second: a depth costs a tenth of a token


def value(options, chosen, price) -> float:
    """Return the excess of survivals over the price, less the drafting cost at the best common
    depth."""
    free = sum(
        sum(max(c.weight * s - price, 0.0) for s in c.survivals)
        for c in (of_one[i] for of_one, i in zip(options, chosen, strict=True))
        if c.depth_s == 0.0
    )
    expensive = [of_one[i] for of_one, i in zip(options, chosen, strict=True) if of_one[i].depth_s]
    call_s = expensive[0].call_s if expensive else 0.0
    return free + max(
        sum(max(c.weight * s - price, 0.0) for c in expensive for s in c.survivals[:depth])
        - RATE * (DEPTH_S * depth + (call_s if depth else 0.0))
        for depth in range(5)
    )


def candidate(depth_s):
    chances = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4)
    survivals = chances.map(lambda each: tuple(accumulate(each, mul)))

    def candidate(survivals, weight) -> DraftCandidate:
        return DraftCandidate(survivals, depth_s, weight)

    return st.builds(candidate, survivals, st.sampled_from([1.0, 2.0]))


one = st.one_of(
    st.tuples(candidate(0.0), candidate(DEPTH_S)),
    st.tuples(candidate(0.0)),
    st.tuples(candidate(DEPTH_S)),
)


@given(
    st.lists(one, min_size=1, max_size=4),
    st.sampled_from([0.0, 0.1, 0.4]),
    st.sampled_from([0.0, 1e-3, 1e-2]),
)
def test_choice_is_optimal_at_a_price(options, price, call_s) -> None:
    """If one proposer computes its drafts, no other choice of proposers is worth more at this
    price."""
    options = [
        tuple(replace(c, call_s=call_s if c.depth_s else 0.0) for c in of_one) for of_one in options
    ]
    chosen = arbitrate(options, price, RATE)
    best = max(value(options, other, price) for other in product(*map(range, map(len, options))))
    assert value(options, chosen, price) == pytest.approx(best, abs=1e-9)


def test_computed_draft_replaces_a_short_match_but_not_a_long_match() -> None:
    """Each sequence uses the proposer with the higher gain."""
    drafted = DraftCandidate((0.8, 0.64, 0.5), DEPTH_S)
    match, guess = DraftCandidate((0.95, 0.9, 0.85)), DraftCandidate((0.1, 0.01))
    assert arbitrate([(match, drafted), (guess, drafted)], 0.05, RATE) == [0, 1]


def test_many_sequences_share_the_cost_of_a_depth() -> None:
    """Ten sequences together use a depth whose cost is too high for one sequence."""
    options = (DraftCandidate((0.3,)), DraftCandidate((0.38,), DEPTH_S))
    assert arbitrate([options], 0.05, RATE) == [0]
    assert arbitrate([options] * 10, 0.05, RATE) == [1] * 10
