"""Routing by weighted scorers."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from draftgate.policies.registry import routing_policy
from draftgate.policies.routing.placement_history import PlacementHistory
from draftgate.policies.routing.scoring import SCORERS
from tests.policies.routing_workers import (
    REQUEST,
    decide,
    prompt,
    worker,
    workers_with_tokens,
)


@given(st.lists(st.tuples(st.integers(0, 9000), st.floats(0, 9), st.floats(0, 3)), min_size=1))
def test_scores_are_from_0_to_1(loads) -> None:
    """Every scorer returns values from 0 to 1, so that weights are comparable."""
    workers = [
        replace(worker(n, sent, price=price), age_s=age_s)
        for n, (sent, age_s, price) in enumerate(loads)
    ]
    for scorer in SCORERS.values():
        for score in scorer(REQUEST, workers, PlacementHistory()):
            assert 0.0 <= score.value <= 1.0
            assert score.per_token >= 0.0


def test_weights_decide_between_scorers() -> None:
    """The scorer with the larger weight decides, and the reason names the scorers."""
    for spec, chosen in (("weighted:prefix=3,load", 1), ("weighted:prefix,load=3", 2)):
        policy = routing_policy(spec)
        policy.placed(prompt("a", 64), worker(1))
        route = decide(policy, workers_with_tokens(0, 700, 0), prompt("a", 64))
        assert route.worker_id == f"w-{chosen}"
        assert "load 0." in route.reason
