"""Tests of the comparison of phases policies: its loads, its metrics, and short runs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from bench.gateway.phase_costs import line_through
from bench.gateway.phases import (
    CHAT,
    LONG,
    ROLES,
    Point,
    Settings,
    compared,
    measure,
    measure_simulated,
    metrics_of,
)
from draftgate.backends.sim.kv_link import LOCAL_LINK
from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.types import PlannedRequest, Record, RequestSpec, TextChunk

POINT = Point(2.0, 2000, 2)


def record(name: str, at_s: float, chunks_s: list[float]) -> Record:
    planned = PlannedRequest(0, at_s, RequestSpec("", (), len(chunks_s), 0, name))
    chunks = [TextChunk(each_s, 1, 0) for each_s in chunks_s]
    return Record(planned, at_s, at_s, chunks_s[-1], Verdict.OK, chunks=chunks)


def row(point: int, policy: str, real_s: float, simulated_s: float) -> dict[str, Any]:
    sides = {
        side: {
            "chat_gap_s": {"p99": value_s},
            "chat_ttft_s": {"mean": 1.0},
            "long_ttft_s": {"mean": value_s},
            "moves": {"phases moved": 1},
        }
        for side, value_s in (("real", real_s), ("simulated", simulated_s))
    }
    return {"point": point, "policy": policy, **sides}


def test_bursts_arrive_beside_poisson_chats() -> None:
    """Bursts have fixed times, other points have other prompts, and a plan repeats exactly."""
    plan = POINT.plan(12.0, 1)
    assert [one.at_s for one in plan if one.request.class_name == LONG] == [2, 2, 6, 6, 10, 10]
    chats = sum(one.request.class_name == CHAT for one in POINT.plan(1000.0, 1))
    assert chats == pytest.approx(2000, rel=0.1)
    assert all(before.at_s <= after.at_s for before, after in pairwise(plan))
    assert plan == POINT.plan(12.0, 1)
    seeds = [one.request.seed for number in (1, 2) for one in POINT.plan(12.0, number)]
    assert len(set(seeds)) == len(seeds)
    lengths = {one.request.class_name: len(POINT.job(one).prompts[0]) for one in plan}
    assert lengths == {CHAT: 100, LONG: 2000}


def test_gaps_count_while_a_long_prompt_is_served() -> None:
    """Gaps that overlap the response to a long prompt count, and earlier and later gaps do not."""
    chat = record(CHAT, 0.0, [1.0, 2.0, 4.5, 5.0, 9.0, 9.5])
    found = metrics_of([chat, record(LONG, 3.0, [4.0, 6.0])])
    gaps = found["chat_gap_s"]
    assert gaps["mean"] == pytest.approx((2.5 + 0.5 + 4.0) / 3)
    assert (found["chats"], found["long_prompts"], found["failed_share"]) == (1, 1, 0.0)
    assert (found["chat_ttft_s"]["mean"], found["long_ttft_s"]["mean"]) == (1.0, 1.0)


def test_policies_are_compared_at_points_that_differ() -> None:
    """A point counts if its best two policies differ, and is right if both sides agree."""
    rows = [
        *(row(1, "together", 0.2, 9.0), row(1, "apart", 0.1, 8.0), row(1, "auto", 0.3, 8.5)),
        *(row(2, "together", 0.1, 0.2), row(2, "apart", 0.2, 0.1), row(2, "auto", 0.3, 0.3)),
        *(row(3, "together", 0.103, 2.0), row(3, "apart", 0.1, 1.0), row(3, "auto", 0.3, 3.0)),
    ]
    found = compared(rows)
    gaps = found["chat_gap_s.p99"]
    assert (gaps["points"], gaps["agreed_points"]) == (2, 1)
    assert [one["real"] for one in gaps["winners"]] == ["apart", "together"]
    assert (gaps["pairs"], gaps["agreed_pairs"]) == (8, 6)
    assert found["chat_ttft_s.mean"]["points"] == 0


def test_a_winner_is_the_best_in_the_mean_of_its_rounds() -> None:
    """Means over the rounds decide, and a winner that loses a round is not consistent."""
    rounds = [(0.1, 0.2), (0.2, 0.15)]
    rows = [
        one
        for together_s, apart_s in rounds
        for one in (row(1, "together", together_s, 0.1), row(1, "apart", apart_s, 0.2))
    ]
    found = compared(rows)["long_ttft_s.mean"]
    assert (found["points"], found["agreed_points"], found["consistent"]) == (1, 1, 0)
    found = compared(rows[:2])["long_ttft_s.mean"]
    assert (found["points"], found["consistent"], found["agreed_consistent"]) == (1, 1, 1)


def test_a_tie_in_the_simulator_decides_nothing() -> None:
    """A comparison is decided if the simulated policies differ by more than 1%."""
    for apart_s, decided in ((0.1005, 0), (0.102, 1)):
        rows = [row(1, "together", 0.1, 0.1), row(1, "apart", 0.2, apart_s)]
        found = compared(rows)["long_ttft_s.mean"]
        assert (found["points"], found["decided"], found["agreed_decided"]) == (1, decided, decided)


def test_auto_without_moves_is_together() -> None:
    """Where `auto` has moved nothing, it is not compared with the policy that it repeats."""
    rows = [row(1, "together", 0.2, 0.2), row(1, "apart", 0.3, 0.3), row(1, "auto", 0.1, 0.2)]
    assert compared(rows)["long_ttft_s.mean"]["winners"][0]["real"] == "auto"
    rows[2]["real"]["moves"] = {}
    assert compared(rows)["long_ttft_s.mean"]["winners"][0]["real"] == "together"


def test_points_without_a_value_are_not_compared() -> None:
    """A point at which no gap overlaps a long prompt has no winner for the gaps."""
    rows = [row(1, "together", 0.2, 0.2), row(1, "apart", 0.1, 0.1)]
    rows[0]["real"]["chat_gap_s"] = None
    found = compared(rows)
    assert found["chat_gap_s.p99"]["points"] == 0
    assert found["long_ttft_s.mean"]["points"] == 1


def test_policies_are_simulated() -> None:
    """Each policy serves all requests, and moves outputs only if its workers have roles."""
    plan = POINT.plan(3.0, 1)
    found = {each: measure_simulated(each, POINT, plan, "cpu-demo", LOCAL_LINK) for each in ROLES}
    assert all(one["chats"] + one["long_prompts"] == len(plan) for one in found.values())
    assert not found["together"]["moves"]
    assert found["apart"]["moves"]["phases moved"] > found["auto"]["moves"]["phases moved"]


def test_host_times_are_a_line_over_streams() -> None:
    """The line has the constant and the slope of its points, and neither is negative."""
    assert line_through([(1, 3.0), (4, 9.0), (12, 25.0)]) == pytest.approx((1.0, 2.0))
    assert line_through([(1, -3.0), (2, -4.0)]) == (0.0, 0.0)


@pytest.mark.long
async def test_policies_run_on_real_workers() -> None:
    """Each policy serves all requests of a point on two engines."""
    point = Point(2.0, 1000, 1)
    (rows,) = [each async for each in measure([point], Settings(3.0, rounds=1), warm=point)]
    assert [one["policy"] for one in rows] == list(ROLES)
    for one in rows:
        assert (one["real"]["failed_share"], one["real"]["long_prompts"]) == (0.0, 1)
        assert one["real"]["chats"] > 0
