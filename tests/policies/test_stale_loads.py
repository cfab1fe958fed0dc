"""Routing with old load reports and several gateways."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.policies.registry import routing_policy
from draftgate.policies.routing.prediction import predict
from draftgate.policies.routing.selection import fill_levels
from draftgate.policies.routing.types import Candidate, Candidates, Route, RouteView, ScoredWorker
from draftgate.policies.types import (
    RequestView,
)
from tests.policies.routing_workers import (
    REQUEST,
    SPEED,
    decide,
    worker,
    workers_with_tokens,
)


@given(
    st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.01, 10.0)), min_size=1, max_size=12),
    st.floats(0.1, 1000.0),
)
def test_fill_levels_reaches_one_common_level(columns, tokens) -> None:
    """All filled places reach the same level, and unfilled places are above that level."""
    columns.sort()
    levels, rises = [level for level, _ in columns], [rise for _, rise in columns]
    fills = fill_levels(levels, rises, tokens)
    assert sum(fills) == pytest.approx(tokens)
    surfaces = [
        level + rise * fill for level, rise, fill in zip(levels, rises, fills, strict=True) if fill
    ]
    assert max(surfaces) == pytest.approx(min(surfaces))
    unfilled = [level for level, fill in zip(levels, fills, strict=True) if not fill]
    assert all(level >= max(surfaces) - 1e-6 for level in unfilled)


@pytest.mark.parametrize("spec", ["least_cost", "weighted:load=1"])
def test_gateways_with_the_same_old_report_do_not_herd(spec: str) -> None:
    """1,600 decisions based on one report even out its loads.

    All decisions choose the least loaded worker when the gateway has no rivals.
    """
    report = (0, 4000, 8000, 16_000)

    def counts(rivals: int) -> Counter[str]:
        workers = tuple(
            replace(
                worker(n, 0, kv_blocks_free=1000 - sent // 16, prompt_tokens=sent, max_sequences=0),
                age_s=0.001,
                own=False,
            )
            for n, sent in enumerate(report)
        )
        policy, draw = routing_policy(spec), Random(3).random
        request = RouteView(RequestView(1200, 1, 0.0), 1200, 0.0)
        return Counter(
            policy.route(request, Candidates(workers, rivals), draw).worker_id for _ in range(1600)
        )

    assert counts(0) == {"w-0": 1600}
    # 16 requests of 1,200 tokens fill the first three to 10,400 tokens.
    expected_tokens = {"w-0": 10_400, "w-1": 6400, "w-2": 2400}
    chosen = counts(15)
    assert chosen.keys() == expected_tokens.keys()
    for name, tokens in expected_tokens.items():
        assert chosen[name] == pytest.approx(1600 * tokens / 19_200, rel=0.15)


def workers_with_report_ages(
    *ages_s: float, leased_tokens: int = 0, **fields: object
) -> tuple[Candidate, ...]:
    """Return workers that differ only in the age of their reports."""
    return tuple(
        replace(worker(n, **fields), age_s=age_s, leased_tokens=leased_tokens, own=False)
        for n, age_s in enumerate(ages_s)
    )


def costs_of(workers: tuple[Candidate, ...], gateways: int = 1) -> list[float]:
    """Return the cost of a request on each worker."""
    predictions = predict(REQUEST, workers, gateways=gateways)
    assert predictions is not None
    return [prediction.score.value for prediction in predictions]


def test_age_of_reports_does_not_matter_for_idle_workers() -> None:
    """The age of a report does not change the cost of an idle worker."""
    fresh, old = costs_of(workers_with_report_ages(0.0, 1.0))
    assert fresh == old


def test_leases_after_an_old_report_are_partly_processed() -> None:
    """The worker with the older report has processed more of its equal leases."""
    many_tokens = round(1.0 / SPEED.step_token_s) * 2
    fresh, old = costs_of(workers_with_report_ages(0.0, 1.0, leased_tokens=many_tokens))
    assert fresh - old == pytest.approx(1.0)
    few_tokens = round(0.1 / SPEED.step_token_s)
    fresh, old = costs_of(workers_with_report_ages(0.0, 1.0, leased_tokens=few_tokens))
    assert 0.0 < fresh - old < 0.1


def test_assumed_leases_of_rivals_keep_workers_busy() -> None:
    """The forecast assumes that every other gateway leased as much as this gateway."""
    few_tokens = round(0.1 / SPEED.step_token_s)
    (fresh, old), (fresh_with_rivals, old_with_rivals) = (
        costs_of(workers_with_report_ages(0.0, 1.0, leased_tokens=few_tokens), gateways)
        for gateways in (1, 30)
    )
    assert fresh_with_rivals - old_with_rivals > fresh - old
    assert fresh_with_rivals - old_with_rivals == pytest.approx(1.0)


@given(st.lists(st.tuples(st.integers(0, 60_000), st.floats(0, 5), st.integers(0, 60_000))))
def test_score_falls_by_at_most_the_age_of_the_report(loads) -> None:
    """The predicted time never falls below the time of the request itself."""
    workers = tuple(
        replace(worker(n, prompt_tokens=ahead), age_s=age_s, leased_tokens=leased)
        for n, (ahead, age_s, leased) in enumerate([*loads, (0, 0.0, 0)])
    )
    now = tuple(replace(candidate, age_s=0.0) for candidate in workers)
    for candidate, aged, score, fresh in zip(
        workers, predict(REQUEST, workers), costs_of(workers), costs_of(now),
        strict=True,
    ):  # fmt: skip
        assert 0.0 <= fresh - score <= candidate.age_s + 1e-9
        assert aged.ttft_s > 0.0


def _least_with(route: Route, leased: dict[str, int]) -> ScoredWorker:
    """Return the offer that a state store with all leases chooses."""
    return min(
        route.offers,
        key=lambda offer: offer.score + offer.score_per_token * leased[offer.worker_id],
    )


def test_reservation_takes_the_least_score_with_all_leases() -> None:
    """The best offers of an old report lose to other offers as leases accumulate."""
    route = decide(routing_policy("least_cost"), workers_with_tokens(0, 0, 0, 0))
    leased = dict.fromkeys((offer.worker_id for offer in route.offers), 0)
    for _ in range(40):
        chosen = _least_with(route, leased)
        leased[chosen.worker_id] += REQUEST.most_tokens
    assert set(leased.values()) == {10 * REQUEST.most_tokens}
    assert _least_with(route, dict.fromkeys(leased, 0)).worker_id == route.worker_id


def test_of_many_workers_the_best_64_are_offered() -> None:
    """The route has at most 64 offers, and the chosen worker is first."""
    route = decide(routing_policy("least_loaded"), workers_with_tokens(*range(500, 300, -1)))
    assert len(route.offers) == 64
    assert route.worker_id == "w-199"
