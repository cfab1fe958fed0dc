"""Routing by weighted scorers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.policies.registry import routing_policy
from draftgate.policies.routing.scoring import SCORERS
from draftgate.policies.routing.types import Candidates, PrefixPull
from tests.policies.routing_workers import (
    REQUEST,
    decide,
    prompt,
    worker,
)


@given(st.lists(st.tuples(st.integers(0, 9000), st.floats(0, 9), st.floats(0, 3)), min_size=1))
def test_scores_are_from_0_to_1(loads) -> None:
    """Every scorer returns values from 0 to 1, so that weights are comparable."""
    workers = [
        replace(worker(n, sent, price=price), age_s=age_s)
        for n, (sent, age_s, price) in enumerate(loads)
    ]
    for scorer in SCORERS.values():
        for score in scorer(REQUEST, workers):
            assert 0.0 <= score.value <= 1.0
            assert score.per_token >= 0.0


@given(st.integers(0, 500), st.integers(1, 400), st.floats(1e-3, 1.0), st.floats(1.01, 100.0))
def test_pulled_tokens_count_by_the_time_that_they_save(cached, tokens, pull_s, times) -> None:
    """The score of a prefix that can be pulled lies between those of a missing and of a cached
    prefix."""
    holding = replace(worker(0), cached_tokens=cached)
    pulling = replace(holding, pull=PrefixPull(tokens, pull_s, pull_s * times))
    whole = replace(worker(0), cached_tokens=cached + tokens)
    missing, pulled, complete = (
        SCORERS["prefix"](REQUEST, [one])[0].value for one in (holding, pulling, whole)
    )
    assert missing > pulled > complete
    assert (missing - pulled) / (missing - complete) == pytest.approx(1 - 1 / times)


def test_weights_decide_between_scorers() -> None:
    """The scorer with the larger weight decides, and the reason names the scorers."""
    for spec, chosen in (("weighted:prefix=3,load", 1), ("weighted:prefix,load=3", 2)):
        policy = routing_policy(spec)
        workers = (worker(0), replace(worker(1, 700), cached_tokens=1023), worker(2))
        policy.placed(prompt("b", 64), workers[1])
        route = decide(policy, Candidates(workers), prompt("a", 64))
        assert route.worker_id == f"w-{chosen}"
        assert "load 0." in route.reason
