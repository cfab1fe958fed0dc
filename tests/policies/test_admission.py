"""Admission: which requests may wait, and when refused clients should return."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from draftgate.policies.admission.appointments import Appointments, Booking
from draftgate.policies.admission.class_drain import ClassFlows
from draftgate.policies.admission.deadline import DrainRate
from draftgate.policies.admission.output_history import OutputHistory
from draftgate.policies.admission.refusals import TENANT_ALPHA
from draftgate.policies.admission.types import (
    AdmissionView,
    Admitted,
    PoolView,
    QueueView,
    RefusalKind,
    Refused,
)
from draftgate.policies.admission.wait_forecast import WaitCorrection, forecast_wait, pool_of
from draftgate.policies.protocols import AdmissionPolicy
from draftgate.policies.registry import admission_policy
from draftgate.policies.testing import check_admission
from draftgate.policies.types import ServiceLevel, WorkerLoad, WorkerSpeed

SPEED = WorkerSpeed(tpot_s=0.02, prompt_token_s=1e-4, sequence_s=1e-4)
BUSY = PoolView(workers=1, max_sequences=32, running=32, speed=SPEED)


def view(
    ahead_s: float = 0.0, ttft_s: float | None = 2.0, prompt_tokens: int = 0, **others
) -> AdmissionView:
    """Return the view of a request of 3.2 s for a pool of 32 sequences."""
    queue = QueueView(round(ahead_s * 10), 1024, 0, ahead_s, ahead_s, ahead_s)
    service = ServiceLevel(ttft_s)
    given_ = {"fingerprint": 1, "pool": BUSY, "queue": queue, "service": service, **others}
    return AdmissionView(
        prompt_tokens=prompt_tokens, output_tokens=160.0, max_wait_s=20.0, **given_
    )


@pytest.mark.parametrize("spec", ["deadline", "bounded", "none"])
def test_shipped_policy_keeps_its_contract(spec: str) -> None:
    """Every shipped policy is found by its name and keeps the contract of `AdmissionPolicy`."""
    policy = admission_policy(spec)
    assert isinstance(policy, AdmissionPolicy)
    assert policy.name == spec
    check_admission(lambda: admission_policy(spec), bounded=spec != "none")


def test_forecast_follows_its_formula() -> None:
    """Wait, TTFT and work follow the documented formula for capacity, speed and work ahead."""
    predicted = forecast_wait(replace(view(1.0), prompt_tokens=1000))
    assert predicted.work_s == pytest.approx((0.1 + 3.2) / 32)
    assert predicted.wait_s == pytest.approx(1.0 + 0.1)
    assert predicted.ttft_s == pytest.approx(predicted.wait_s + 0.1)
    free = replace(BUSY, running=31)
    assert forecast_wait(view(pool=free)).wait_s == 0.0
    prompts = replace(BUSY, prompt_tokens=50_000)
    assert forecast_wait(view(pool=prompts)).wait_s == pytest.approx(5.0)
    unknown = replace(BUSY, speed=WorkerSpeed())
    assert forecast_wait(view(9.0, pool=unknown)).wait_s == 0.0


def test_sure_wait_leaves_a_margin_for_chance() -> None:
    """The sure wait W leaves a margin of z sqrt(W x grain) to the allowed wait, and no margin for z
    = 0."""
    predicted = forecast_wait(view(1.0))
    sure_s = predicted.within_s(2.0, 1.645)
    assert sure_s + 1.645 * (sure_s * predicted.grain_s) ** 0.5 == pytest.approx(2.0)
    assert predicted.within_s(2.0, 0.0) == pytest.approx(2.0)
    assert predicted.within_s(-1.0, 1.645) == 0.0


def test_pool_adds_up_several_workers() -> None:
    """A pool adds up capacities and sequences, averages speeds, and is bounded by KV memory."""
    one = WorkerLoad(3, 1, 5, 100, 0.0, 0.5, (), max_sequences=16, prompt_tokens=7, speed=SPEED)
    other = structs.replace(one, speed=replace(SPEED, tpot_s=0.04))
    pool = pool_of([one, other])
    assert (pool.workers, pool.max_sequences, pool.running, pool.prompt_tokens) == (2, 32.0, 8, 14)
    assert pool.speed.tpot_s == pytest.approx(0.03)
    assert pool_of([one, other], sequence_tokens=400.0).max_sequences == pytest.approx(8.0)
    unreported = structs.replace(one, kv_blocks_free=0, kv_blocks_total=0)
    assert pool_of([unreported], sequence_tokens=400.0).max_sequences == one.max_sequences, (
        "unknown memory"
    )
    assert pool_of([one, structs.replace(one, max_sequences=0)]).max_sequences == 0.0
    assert pool_of([]).max_sequences == 0.0


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0.1, 10) | st.none())
def test_more_work_ahead_never_admits_a_refused_request(less_s, more_s, ttft_s) -> None:
    """A refused request stays refused with more work ahead, and its delay is not shorter."""
    less_s, more_s = sorted((less_s, more_s))
    answers = [
        admission_policy("deadline").decide(view(ahead_s, ttft_s), 0.0)
        for ahead_s in (less_s, more_s)
    ]
    if isinstance(answers[0], Refused):
        assert isinstance(answers[1], Refused)
        assert answers[1].retry_after_s >= answers[0].retry_after_s - 0.3


@given(st.lists(st.floats(0.05, 8), min_size=1, max_size=30))
def test_longer_target_is_never_worse_than_a_shorter_target(targets) -> None:
    """A longer target is never worse for the same queue and bookings."""
    policy = admission_policy("deadline")
    for number in range(30):
        policy.decide(view(1.9, fingerprint=100 + number), 0.0)
    admitted = [
        ttft_s
        for ttft_s in sorted(targets)
        if isinstance(policy.decide(view(0.9, ttft_s, fingerprint=7), 0.0), Admitted)
    ]
    assert admitted == sorted(targets)[len(targets) - len(admitted) :]


def test_request_is_admitted_at_its_appointment() -> None:
    """The policy admits a returning request after the waiting requests, regardless of other
    bookings."""
    policy = admission_policy("deadline")
    first = policy.decide(view(3.0), 0.0)
    assert first.kind is RefusalKind.DEADLINE
    for number in range(50):
        policy.decide(view(3.0, fingerprint=2 + number), 0.0)
    now_s = first.retry_after_s
    assert isinstance(policy.decide(view(0.6, fingerprint=99), now_s), Refused)
    assert isinstance(policy.decide(view(0.6), now_s), Admitted)
    assert isinstance(policy.decide(view(0.6), now_s), Refused), "an appointment is for one request"


def test_early_return_is_given_the_remaining_delay() -> None:
    """A client that returns early receives the remaining delay and keeps its appointment."""
    policy = admission_policy("deadline")
    retry_s = policy.decide(view(5.0), 0.0).retry_after_s
    for at_s in (1.0, 1.5, 2.0):
        assert policy.decide(view(5.0 - at_s), at_s).retry_after_s == pytest.approx(retry_s - at_s)


def test_equal_requests_have_separate_appointments() -> None:
    """Equal requests in one burst have separate bookings."""
    for retries in (None, 0):
        policy = admission_policy("deadline")
        delays = [policy.decide(view(3.0, retries=retries), 0.0).retry_after_s for _ in range(5)]
        assert delays == sorted(delays)
        assert delays[-1] > delays[0] + 0.3


def test_new_request_waits_for_bookings_except_at_low_water() -> None:
    """The policy admits a new request below the low-water mark. Above the mark, it considers queue
    and bookings."""
    policy = admission_policy("deadline")
    for number in range(40):
        policy.decide(view(3.0, fingerprint=number), 0.0)
    assert isinstance(policy.decide(view(0.5, fingerprint=99), 0.1), Refused)
    assert isinstance(policy.decide(view(0.1, fingerprint=99), 0.2), Admitted)


def test_bookings_of_one_tenant_do_not_refuse_another() -> None:
    """The policy admits a new request of a tenant regardless of the appointments of
    another tenant."""
    policy = admission_policy("deadline")
    for number in range(500):
        policy.decide(view(3.0, tenant="flood", fingerprint=number), 0.0)
    assert isinstance(policy.decide(view(0.9, tenant="flood", fingerprint=999), 0.1), Refused)
    assert isinstance(policy.decide(view(0.9, tenant="other", fingerprint=999), 0.1), Admitted)


def test_bookings_do_not_delay_better_classes() -> None:
    """A booking counts only for its own class and worse classes."""
    policy = admission_policy("deadline")
    for number in range(50):
        policy.decide(view(3.0, fingerprint=number), 0.0)
    for priority, own_s, answer in (
        (-1, 0.7, Admitted),
        (0, 0.7, Refused),
        (1, 0.4, Refused),
        (1, 0.1, Admitted),
    ):
        asked = view(
            fingerprint=900 + priority,
            service=ServiceLevel(3.0, priority=priority),
            queue=QueueView(7, 1024, 0, 0.7, 0.7, 0.7, class_s=own_s),
        )
        assert isinstance(policy.decide(asked, 0.1), answer), (priority, own_s)


def test_queue_drains_with_the_share_that_better_classes_leave() -> None:
    """A class receives the share that better classes leave, which is at least a quarter."""
    classes = ClassFlows()
    for step in range(300):
        classes.add_request(0, 0.06, step / 10)  # 0.6 of the pool
    assert classes.drain(1, 30.0).least == classes.drain(1, 30.0).strict
    drain = classes.drain(1, 30.0, booked={0})
    assert drain.strict == pytest.approx(0.4, abs=0.02)
    assert drain.least == 0.25
    assert drain.spread == pytest.approx(2.0), "at most"
    assert classes.drain(0, 30.0).spread == 1.0
    assert drain.lasting.wait_s(2.0, 2.0, 1.0) == pytest.approx(2.0 / drain.strict)
    assert drain.wait_s(2.0, 0.3, 1.0) == pytest.approx(0.3 * 4)
    assert drain.wait_s(2.0, 0.0, 1.0) == 1.0
    assert drain.wait_s(90.0, 90.0, 1.0) == pytest.approx(90.0 + 0.1 * 18.0, rel=0.01)
    assert classes.drain(0, 30.0).wait_s(2.0, 2.0, 1.0) == 2.0
    assert classes.drain(-1, 30.0).worse == 0.75
    assert classes.drain(1, 300.0).least == 1.0, "no request has arrived for long"
    for priority in range(1000):
        classes.add_request(priority, 0.06, 30.0)
    assert len(classes._flows) <= 17


def test_returning_clients_of_better_classes_overtake_a_request() -> None:
    """A request waits for clients of better classes that return before it starts, and not for
    clients that return later or are late already."""
    appointments = Appointments()
    for number, (priority, due_s) in enumerate(
        [(-1, 8.0), (-1, 10.3), (-1, 10.7), (0, 10.2), (1, 10.2), (-1, 12.0)], start=1
    ):
        appointments.book(Booking(number, priority, "", 0.5, due_s, 0.0))
    assert appointments.overtaken_s(0, 10.0, 0.4, sum) == pytest.approx(0.4 + 2 * 0.5)
    assert appointments.overtaken_s(0, 10.0, 0.2, sum) == 0.2
    assert appointments.overtaken_s(-1, 10.0, 0.4, sum) == 0.4


def test_missed_booking_expires_and_lowers_the_kept_share() -> None:
    """A missed booking expires, and each booking has less weight if fewer clients keep their
    bookings."""
    appointments = Appointments()
    appointments.book(Booking(1, 0, "", 0.5, 10.0, 0.0))
    before = appointments.kept_share
    assert appointments.ahead_s(0, "", 1.0, 0.1) == pytest.approx((0.0, 0.5 * before))
    assert appointments.ahead_s(1, "", 1.0, 0.1) == pytest.approx((0.5 * before, 0.0))
    appointments.expire(17.0)
    assert len(appointments) == 1
    appointments.expire(18.0)
    assert len(appointments) == 0
    assert appointments.ahead_s(0, "", 1.0, 0.1) == (0.0, 0.0)
    assert appointments.kept_share < before


def test_bookings_are_bounded() -> None:
    """The number of bookings and the size of their index are bounded."""
    appointments = Appointments(most=10)
    for number in range(1, 101):
        appointments.book(Booking(number, 0, str(number), 0.1, 5.0, 0.0))
    assert len(appointments) == 10
    for number in range(1, 11):
        appointments.close(appointments.find(number, 5.0, None))
    assert len(appointments) == 0
    for turn in range(1000):
        booking = Booking(1, 0, "", 0.1, 5.0, 0.0)
        appointments.book(booking)
        appointments.close(booking)
        assert len(appointments._by_end) <= 100, turn


def test_queue_is_bounded_in_total_and_per_tenant() -> None:
    """A full queue refuses all requests, and two tenants leave places for a third."""
    policy = admission_policy("bounded")
    full = view(queue=QueueView(64, 64, 0, 1.0, 1.0, 1.0))
    assert policy.decide(full, 0.0).kind is RefusalKind.QUEUE_FULL
    lengths = {"a": 0, "b": 0}
    for tenants in (["a"], ["a", "b"]):
        lengths = dict.fromkeys(lengths, 0)
        for number in range(300):
            tenant, length = tenants[number % len(tenants)], sum(lengths.values())
            queue = QueueView(length, 64, lengths[tenant])
            if isinstance(policy.decide(view(queue=queue), 0.0), Admitted):
                lengths[tenant] += 1
        assert sum(lengths.values()) < 64
        each = TENANT_ALPHA * 64 / (1 + TENANT_ALPHA * len(tenants))
        assert max(lengths.values()) == pytest.approx(each, abs=1.0)


def test_tpot_target_is_refused_only_if_the_load_spoils_it() -> None:
    """The policy refuses a TPOT target only if the load breaks a target that an idle pool would
    meet."""
    slow = replace(BUSY, running=20, speed=WorkerSpeed(0.030, 1e-4, 1e-3))
    policy = admission_policy("deadline")
    spoilt = policy.decide(view(pool=slow, service=ServiceLevel(None, 0.020)), 0.0)
    assert spoilt.kind is RefusalKind.TPOT
    assert "20 ms" in spoilt.reason
    for target_s in (0.005, 0.031):
        answer = policy.decide(view(pool=slow, service=ServiceLevel(None, target_s)), 0.0)
        assert isinstance(answer, Admitted)


def test_sheddable_request_is_refused_as_soon_as_others_wait() -> None:
    """The policy admits a sheddable request only if no request waits."""
    policy = admission_policy("deadline")
    assert isinstance(policy.decide(view(0.0, sheddable=True), 0.0), Admitted)
    assert policy.decide(view(0.6, sheddable=True), 0.0).kind is RefusalKind.SHED
    assert isinstance(policy.decide(view(0.6), 0.0), Admitted)


def test_unknown_capacity_admits_until_the_queue_is_full() -> None:
    """Only the bound of the queue applies without a known capacity or speed."""
    policy = admission_policy("deadline")
    asked = view(0.0, pool=PoolView(), queue=QueueView(40, 64))
    assert isinstance(policy.decide(asked, 0.0), Admitted)
    refused = policy.decide(replace(asked, queue=QueueView(64, 64)), 0.0)
    assert refused.retry_after_s >= 1.0


def test_systematic_errors_of_forecasts_are_corrected() -> None:
    """The correction factor approaches 3 when waits are three times as long as predicted."""
    error = WaitCorrection()
    for _ in range(1000):
        predicted_s = 0.5 * error.factor
        error.add_wait(predicted_s, 1.5, has_target=True)
    assert error.factor == pytest.approx(3.0, rel=0.1)
    healed = error.factor
    for _ in range(15):
        error.add_wait(0.5, 50.0, has_target=False)
    assert error.factor == healed, "overtaken requests do not count"


@given(
    ahead_s=st.floats(0.0, 30.0),
    waited_s=st.floats(0.0, 30.0),
    booked=st.integers(0, 3),
    ttft_s=st.none() | st.floats(0.05, 20.0),
    tpot_s=st.none() | st.floats(0.005, 0.05),
    prompt_tokens=st.integers(0, 20_000),
    tenant_length=st.integers(0, 2000),
    sheddable=st.booleans(),
    spec=st.sampled_from(["deadline", "bounded"]),
)
def test_the_message_of_a_refusal_shows_the_violated_bound(
    ahead_s: float, waited_s: float, booked: int, *, spec: str, sheddable: bool, **others
) -> None:
    """A message that states a value and its bound shows a value beyond the bound."""
    policy = admission_policy(spec)
    for number in range(booked):
        policy.decide(view(30.0, fingerprint=100 + number), 0.0)
    asked = view(ahead_s, sheddable=sheddable, prompt_tokens=others["prompt_tokens"])
    asked = replace(
        asked,
        service=ServiceLevel(others["ttft_s"], others["tpot_s"]),
        queue=replace(asked.queue, tenant_length=others["tenant_length"]),
    )
    for found in (policy.decide(asked, 0.0), policy.reconsider(asked, waited_s, 0.0)):
        if not isinstance(found, Refused):
            continue
        values = r"([0-9.]+) m?s(?:, with [^;]*)?,?(?: which)? exceeds ([0-9.]+) m?s"
        stated = re.search(values, found.reason)
        waited = re.search(r"waited ([0-9.]+) s of at most ([0-9.]+) s", found.reason)
        if found.kind is RefusalKind.QUEUE_FULL:
            assert stated is waited is None
        elif "unknown" not in found.reason:
            one = stated or waited
            assert one is not None, found.reason
            assert float(one[1]) > float(one[2]), found.reason


def test_output_length_is_predicted_per_tenant() -> None:
    """The predicted output length of a tenant is bounded, and approaches the mean of all tenants
    over time."""
    history = OutputHistory(most_tenants=5)
    assert history.expected_tokens("a", 100) == 100.0
    for _ in range(200):
        history.add_sequence("short", 10, 100)
        history.add_sequence("long", 100, 100)
    assert history.expected_tokens("short", 1000) < 250
    assert history.expected_tokens("long", 1000) > 850
    assert 400 < history.expected_tokens("new", 1000) < 700
    for number in range(100):
        history.add_sequence(str(number), 1, 1)
    assert len(history._tenants) == 5


def test_requests_without_fingerprint_have_no_bookings() -> None:
    """A request with a fingerprint of 0 creates no booking and finds none."""
    appointments = Appointments()
    appointments.book(Booking(0, 0, "a", 0.5, 10.0, 0.0))
    assert len(appointments) == 0
    assert appointments.find(0, 10.0, None) is None


@pytest.mark.parametrize("slowness", [0.5, 1.0, 1.3])
def test_drain_rate_is_the_time_of_the_work_that_left_the_queue(slowness: float) -> None:
    """The learned factor is the time per predicted second, for a queue that stays full."""
    rate, queued_s = DrainRate(), 1.0
    for step in range(600):
        rate.observe(view(queued_s), 0.1 * step)
        rate.admit(0.1 / slowness)
        queued_s = 1.0  # the pool drains as much as is admitted
    assert rate.factor == pytest.approx(slowness, rel=0.03)


def test_idle_time_does_not_change_the_drain_rate() -> None:
    """A pool that idles after its queue is empty keeps its factor."""
    rate = DrainRate()
    for step in range(100):
        rate.observe(view(0.5), 100.0 * step)
        rate.observe(view(0.0), 100.0 * step + 50.0)
    assert rate.factor == pytest.approx(1.0, rel=0.01)


@given(
    delays=st.lists(st.floats(0.0, 20.0), max_size=20),
    ahead_s=st.floats(0.0, 5.0),
    factor=st.floats(0.1, 1.5),
)
def test_gap_is_the_first_time_at_which_all_due_work_is_done(
    delays: list[float], ahead_s: float, factor: float
) -> None:
    """At the gap, and not before, the pool has done the work ahead and all bookings due by then."""
    appointments, now_s = Appointments(), 100.0
    for number, delay_s in enumerate(delays):
        appointments.book(Booking(number + 1, 0, "", 0.5, now_s + delay_s, now_s))
    gap_s = appointments.gap_s(0, now_s, ahead_s, lambda booked: factor * sum(booked))

    def done_s(after_s: float) -> float:
        due = sum(now_s + delay_s <= now_s + after_s for delay_s in delays)
        return ahead_s + factor * 0.5 * due

    assert done_s(gap_s) <= gap_s + 0.02
    earlier = [gap_s * share for share in (0.0, 0.25, 0.5, 0.75, 0.95)]
    assert all(done_s(after_s) > after_s for after_s in earlier if after_s < gap_s - 0.02)


def test_gap_ignores_lower_priority_bookings() -> None:
    """A booking of a lower-priority class does not delay a higher class."""
    appointments = Appointments()
    appointments.book(Booking(1, 1, "", 5.0, 1.0, 0.0))
    assert appointments.gap_s(0, 0.0, 2.0, sum) == 2.0
    assert appointments.gap_s(1, 0.0, 2.0, sum) == pytest.approx(7.0)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_the_speed_of_a_pool_includes_the_work_of_other_gateways(share: float) -> None:
    """A gateway that runs a part of a pool's sequences learns the speed of the whole pool.

    The pool needs two seconds for each second of predicted work.
    """
    rate, pool = DrainRate(), replace(BUSY, share=share)
    for second in range(300):
        own_s = (200.0 - second / 2) * share
        rate.observe(view(own_s / share, pool=pool), float(second))
    assert rate.factor == pytest.approx(2.0, rel=0.05)
