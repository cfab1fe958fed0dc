"""Tests of the history of flows and of the division of their remaining time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.policies.admission.types import PoolView, RefusalKind
from draftgate.policies.flows.division import divide, judged, refuse_flow, service_s, targets
from draftgate.policies.flows.history import (
    MOST_HOPS,
    MOST_KINDS,
    FlowHistory,
)
from draftgate.policies.flows.types import HopForecast, HopKind, HopRecord
from draftgate.policies.types import ANYTIME, UNKNOWN_SPEED, ServiceLevel, WorkerSpeed
from draftgate.policies.values import replace

PLAN, RETRIEVE, ANSWER = (
    HopKind("/v1/chat/completions", "m"),
    HopKind("/v1/embeddings", "m"),
    HopKind("/v1/completions", "m"),
)
SPEED = WorkerSpeed(tpot_s=0.01, prompt_token_s=0.001, sequence_s=0.001)

seconds = st.floats(0.001, 100.0)
tokens = st.floats(0.0, 4096.0)
speeds = st.builds(WorkerSpeed, tpot_s=st.floats(0.0, 0.2), prompt_token_s=st.floats(0.0, 0.01))
forecasts = st.builds(
    HopForecast,
    weight=st.floats(0.0, 1.0),
    prompt_tokens=tokens,
    output_tokens=tokens,
    service_s=st.floats(0.0, 10.0),
    gap_s=st.floats(0.0, 5.0),
)
kinds = st.sampled_from([PLAN, RETRIEVE, ANSWER])


def hop(
    kind: HopKind, begun_s: float, ended_s: float | None, prompt: int = 10, output: int = 20
) -> HopRecord:
    """Return a hop that did not wait."""
    served_s = 0.0 if ended_s is None else ended_s - begun_s
    return HopRecord(kind, begun_s, ended_s, prompt, output, served_s)


records = st.lists(
    st.builds(
        hop,
        kinds,
        st.floats(0.0, 10.0),
        st.none() | st.floats(10.0, 20.0),
        st.integers(0, 100),
        st.integers(0, 100),
    ),
    max_size=6,
)

THREE = (
    hop(PLAN, 0.0, 1.0, 100, 50),
    hop(RETRIEVE, 1.5, 1.6, 8, 0),
    hop(ANSWER, 1.6, 4.0, 500, 200),
)


# --- division -------------------------------------------------------------------------------------


@given(
    remaining_s=seconds,
    own=forecasts,
    later=st.lists(forecasts, max_size=5),
    speed=speeds,
    wait_s=st.floats(0.0, 10.0),
)
def test_budget_is_positive_and_within_the_remaining_time(
    remaining_s: float,
    own: HopForecast,
    later: list[HopForecast],
    speed: WorkerSpeed,
    wait_s: float,
) -> None:
    """A hop has a budget of more than 0, at most the remaining time, in proportion to its time."""
    found = divide(remaining_s, own, later, speed, wait_s)
    assert 0.0 < found.budget_s <= remaining_s * (1 + 1e-9)
    shares = found.own_s + found.later_s
    assert found.budget_s * shares <= remaining_s * found.own_s * (1 + 1e-9)


@given(
    remaining_s=seconds,
    hops=st.lists(forecasts, min_size=1, max_size=6),
    speed=speeds,
    wait_s=st.floats(0.0, 10.0),
)
def test_budgets_of_certain_hops_sum_to_at_most_the_remaining_time(
    remaining_s: float, hops: list[HopForecast], speed: WorkerSpeed, wait_s: float
) -> None:
    """If each hop takes its whole budget, the flow ends by its deadline."""
    certain = [replace(one, weight=1.0, gap_s=0.0) for one in hops]
    left_s, total_s = remaining_s, 0.0
    for index, one in enumerate(certain):
        if left_s <= 1e-9:
            break
        budget_s = divide(left_s, one, certain[index + 1 :], speed, wait_s).budget_s
        total_s, left_s = total_s + budget_s, left_s - budget_s
    assert total_s <= remaining_s * (1 + 1e-9)


@given(
    remaining_s=seconds,
    own=forecasts,
    later=st.lists(forecasts, min_size=1, max_size=5),
    speed=speeds,
    wait_s=st.floats(0.0, 10.0),
    slower=st.floats(1.0, 10.0),
    which=st.integers(0, 4),
)
def test_a_slower_later_hop_never_increases_the_budget(
    remaining_s: float,
    own: HopForecast,
    later: list[HopForecast],
    speed: WorkerSpeed,
    wait_s: float,
    slower: float,
    which: int,
) -> None:
    """The budget of a hop does not grow if a later hop is longer or a client takes longer."""
    at = which % len(later)
    longer = replace(
        later[at],
        prompt_tokens=later[at].prompt_tokens * slower,
        output_tokens=later[at].output_tokens * slower,
        service_s=later[at].service_s * slower,
        gap_s=later[at].gap_s * slower,
    )
    before = divide(remaining_s, own, later, speed, wait_s)
    after = divide(remaining_s, own, [*later[:at], longer, *later[at + 1 :]], speed, wait_s)
    assert after.budget_s <= before.budget_s * (1 + 1e-12)


def test_budget_is_proportional_to_the_predicted_times() -> None:
    """A hop of 1 s before a hop of 3 s gets a quarter of the time that the client leaves."""
    own = HopForecast(1.0, 0.0, 100.0, 0.0, 0.0)
    after = HopForecast(1.0, 0.0, 300.0, 0.0, 0.5)
    found = divide(8.5, own, [after], SPEED)
    assert found.budget_s == pytest.approx(2.0)
    assert (found.own_s, found.later_s, found.gaps_s) == pytest.approx((1.0, 3.0, 0.5))
    assert found.least_s == pytest.approx(4.5)


def test_waits_are_part_of_the_times() -> None:
    """The predicted waits count as time of their hops, so waits make the budgets more equal."""
    own, after = HopForecast(1.0, 0.0, 100.0, 0.0, 0.0), HopForecast(1.0, 0.0, 300.0, 0.0, 0.0)
    found = divide(8.0, own, [after], SPEED, wait_s=96.0, later_wait_s=96.0)
    assert found.budget_s == pytest.approx(8.0 * 97 / 196)
    assert found.least_s == pytest.approx(1.0 + 99.0)


def test_measured_times_replace_an_unknown_speed() -> None:
    """Without a known speed, the measured time of earlier hops is the prediction."""
    one = HopForecast(1.0, 10.0, 10.0, 2.5, 0.0)
    assert service_s(one, UNKNOWN_SPEED) == pytest.approx(2.5)
    assert service_s(one, SPEED) == pytest.approx(0.11)


def test_no_time_cannot_be_divided() -> None:
    """The division of no time is an error, because no hop could have a budget."""
    with pytest.raises(ValueError, match="no time remains"):
        divide(0.0, HopForecast(1.0, 1.0, 1.0, 1.0, 0.0), [], SPEED)


# --- targets --------------------------------------------------------------------------------------


@given(
    remaining_s=seconds,
    own=forecasts,
    later=st.lists(forecasts, max_size=3),
    speed=speeds,
    wait_s=st.floats(0.0, 10.0),
)
def test_targets_that_are_met_keep_the_budget(
    remaining_s: float,
    own: HopForecast,
    later: list[HopForecast],
    speed: WorkerSpeed,
    wait_s: float,
) -> None:
    """A hop that fits into its budget and just meets its targets ends within the budget."""
    division = divide(remaining_s, own, later, speed, wait_s)
    found = targets(division, own, speed, ANYTIME)
    assert found.ttft_s is not None
    assert found.ttft_s > 0.0
    if division.own_s <= division.budget_s and speed.prompt_token_s > 0.0:
        decode_s = max(own.output_tokens - 1.0, 0.0) * (found.tpot_s or 0.0)
        assert found.ttft_s + decode_s <= division.budget_s * (1 + 1e-9) + 0.001


def test_flow_that_just_fits_has_the_predicted_latencies_as_targets() -> None:
    """Without spare time, the TTFT target is wait and prompt, and the TPOT target the speed."""
    own, after = HopForecast(1.0, 500.0, 101.0, 0.0, 0.0), HopForecast(1.0, 0.0, 300.0, 0.0, 0.0)
    total_s = 2 * 2.0 + service_s(own, SPEED) + service_s(after, SPEED)
    division = divide(total_s, own, [after], SPEED, wait_s=2.0, later_wait_s=2.0)
    assert judged(total_s, division, own, SPEED, ANYTIME).ttft_s == pytest.approx(2.51)
    found = targets(division, own, SPEED, ANYTIME)
    assert found.tpot_s == pytest.approx(0.01)
    assert found.ttft_s == pytest.approx(2.0 + 0.5 + 0.01)


def test_own_targets_of_the_request_remain_if_tighter() -> None:
    """A flow makes no target of a request looser, and changes no priority."""
    own = HopForecast(1.0, 100.0, 100.0, 0.0, 0.0)
    division = divide(100.0, own, [], SPEED)
    found = targets(division, own, SPEED, ServiceLevel(0.5, 0.02, -1))
    assert found == ServiceLevel(0.5, 0.02, -1)
    derived = targets(division, own, SPEED, ServiceLevel(1e6, 1e6, 2))
    assert derived.ttft_s is not None
    assert derived.ttft_s < 100.0
    assert derived.priority == 2


def test_embedding_has_its_budget_as_ttft_target() -> None:
    """A hop without output has no TPOT target."""
    own, after = HopForecast(1.0, 100.0, 0.0, 0.0, 0.0), HopForecast(1.0, 0.0, 90.0, 0.0, 0.0)
    division = divide(10.0, own, [after], SPEED)
    assert targets(division, own, SPEED, ANYTIME) == ServiceLevel(division.budget_s)


# --- refusal --------------------------------------------------------------------------------------


def test_flow_that_cannot_end_in_time_is_refused() -> None:
    """A flow is refused if its hops take longer than its time, until enough sequences end."""
    own, after = HopForecast(1.0, 0.0, 100.0, 0.0, 0.0), HopForecast(1.0, 0.0, 200.0, 0.0, 0.0)
    pool = PoolView(1, 8.0, 8, speed=SPEED)
    # One sequence less saves 0.3 s. The flow takes 3 s, so 4 sequences must end.
    refused = refuse_flow(1.8, divide(1.8, own, [after], SPEED), own, [after], pool, 0.5)
    assert refused is not None
    assert refused.kind is RefusalKind.FLOW
    assert refused.retry_after_s == pytest.approx(2.0)
    assert "3.00 s" in refused.reason
    waiting = divide(3.1, own, [after], SPEED, wait_s=1.0, later_wait_s=2.0)
    refused = refuse_flow(3.1, waiting, own, [after], pool, 0.5)
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(3.0)
    assert refuse_flow(3.1, divide(3.1, own, [after], SPEED), own, [after], pool, 0.5) is None


def test_idle_pool_refuses_no_flow() -> None:
    """A refusal would not help a client whose deadline no load allows."""
    own = HopForecast(1.0, 0.0, 300.0, 0.0, 0.0)
    division = divide(1.8, own, [], SPEED)
    idle, busy = (PoolView(1, 8.0, running, speed=SPEED) for running in (0, 1))
    assert refuse_flow(1.8, division, own, [], idle, 0.5) is None
    assert refuse_flow(1.8, division, own, [], busy, 0.5) is not None


def test_hops_elsewhere_have_their_measured_time_and_no_queue_here() -> None:
    """A later hop on another model counts its measured time, and no work for this model."""
    own = HopForecast(1.0, 0.0, 100.0, 0.0, 0.0)
    here, elsewhere = (HopForecast(1.0, 0.0, 300.0, 2.0, 0.0, other) for other in (False, True))
    found = divide(12.0, own, [here, elsewhere], SPEED)
    assert (found.own_s, found.later_served_s, found.later_here_s) == pytest.approx((1.0, 5.0, 3.0))
    assert found.budget_s == pytest.approx(2.0)


# --- history --------------------------------------------------------------------------------------


def test_history_predicts_the_later_hops_and_their_lengths() -> None:
    """After one flow, the history knows the hops after the first, and none after the last."""
    history = FlowHistory()
    assert history.later("t", 1, PLAN) == ()
    assert history.own("t", 1, PLAN) is None
    history.add_flow("t", THREE)
    retrieve, answer = history.later("t", 1, PLAN)
    assert retrieve == HopForecast(1.0, 8.0, 0.0, pytest.approx(0.1), pytest.approx(0.5))
    assert answer == HopForecast(1.0, 500.0, 200.0, pytest.approx(2.4), 0.0)
    assert history.later("t", 2, RETRIEVE) == (answer,)
    assert history.later("t", 3, ANSWER) == ()
    own = history.own("t", 1, PLAN)
    assert own is not None
    assert (own.prompt_tokens, own.output_tokens) == (100.0, 50.0)


def test_history_tells_hops_on_another_model_apart() -> None:
    """A later hop is elsewhere if it needs another model than the hop that has arrived."""
    history = FlowHistory()
    embed = HopKind("/v1/embeddings", "vectors")
    history.add_flow("t", (hop(PLAN, 0.0, 1.0), hop(embed, 1.0, 1.1), hop(ANSWER, 1.1, 3.0)))
    assert [one.elsewhere for one in history.later("t", 1, PLAN)] == [True, False]
    assert [one.elsewhere for one in history.later("t", 2, embed)] == [True]


def test_tenants_have_separate_histories() -> None:
    """The flows of one tenant predict nothing for another tenant."""
    history = FlowHistory()
    history.add_flow("a", THREE)
    assert history.later("b", 1, PLAN) == ()


def test_parallel_hops_count_once() -> None:
    """Hops that overlap an earlier hop add no time to the expected rest of the flow."""
    history = FlowHistory()
    parallel = [hop(RETRIEVE, 1.0, 1.2), hop(RETRIEVE, 1.01, 1.3), hop(RETRIEVE, 1.02, 1.4)]
    history.add_flow("t", (hop(PLAN, 0.0, 1.0), *parallel, hop(ANSWER, 1.4, 3.0)))
    assert [one.weight for one in history.later("t", 1, PLAN)] == [1.0, 0.0, 0.0, 1.0]


def test_next_request_after_the_last_byte_overlaps_nothing() -> None:
    """A hop that arrives a moment before the recorded end of the last hop counts in full."""
    history = FlowHistory()
    history.add_flow("t", (hop(PLAN, 0.0, 1.0), hop(ANSWER, 0.99, 3.0)))
    (answer,) = history.later("t", 1, PLAN)
    assert (answer.weight, answer.gap_s) == (1.0, 0.0)


def test_a_hop_that_rarely_follows_has_its_probability() -> None:
    """Kinds that follow are weighted by how often they followed, where old flows count less."""
    history = FlowHistory()
    for _ in range(50):
        history.add_flow("t", (THREE[0], THREE[2]))
        history.add_flow("t", (THREE[0],))
    (answer,) = history.later("t", 1, PLAN)
    assert 0.45 < answer.weight < 0.5
    for _ in range(200):
        history.add_flow("t", (THREE[0],))
    assert history.later("t", 1, PLAN) == ()


def test_new_lengths_replace_old_lengths() -> None:
    """The history follows an application whose hops become longer."""
    history = FlowHistory()
    for _ in range(100):
        history.add_flow("t", THREE)
    for _ in range(100):
        history.add_flow("t", (replace(THREE[0], output_tokens=500),))
    own = history.own("t", 1, PLAN)
    assert own is not None
    assert own.output_tokens > 490


@given(
    flows=st.lists(st.tuples(st.sampled_from("abc"), records), max_size=30),
    most=st.integers(1, 8),
)
def test_history_is_bounded_and_deterministic(
    flows: list[tuple[str, list[HopRecord]]], most: int
) -> None:
    """The history keeps at most its states, and the same flows give the same predictions."""
    one, other = FlowHistory(most), FlowHistory(most)
    for history in (one, other):
        for tenant, hops in flows:
            history.add_flow(tenant, hops)
            assert len(history) <= most
    for tenant in "abc":
        for kind in (PLAN, RETRIEVE, ANSWER):
            found = one.later(tenant, 1, kind)
            assert found == other.later(tenant, 1, kind)
            assert all(0.0 <= hop.weight <= 1.0 + 1e-9 for hop in found)
            assert all(math.isfinite(hop.service_s) for hop in found)


def test_kinds_and_positions_are_bounded() -> None:
    """A client with a new model for each hop, or with endless flows, takes bounded memory."""
    history = FlowHistory()
    for number in range(100):
        after = HopKind("/v1/completions", f"m{number}")
        history.add_flow("t", (THREE[0], hop(after, 2.0, 3.0)))
    assert len(history.later("t", 1, PLAN)) <= MOST_KINDS
    history.add_flow("long", [hop(PLAN, float(at), at + 1.0) for at in range(1000)])
    assert len(history.later("long", 1, PLAN)) == MOST_HOPS - 1
