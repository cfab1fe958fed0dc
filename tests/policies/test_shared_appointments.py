"""Appointments that gateways share, without a store."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.policies.admission.appointments import Appointments, Booking, BookingNote
from draftgate.policies.admission.deadline import Deadline
from draftgate.policies.admission.types import Admitted, Refused
from tests.policies.test_admission import view

OFFSET_S = 1000.0
"""Difference between the clocks of two gateways."""


def booked(appointments: Appointments, fingerprint: int = 1, due_s: float = 10.0) -> Booking:
    """Return a new booking of half a second of work."""
    booking = Booking(fingerprint, 0, "t", 0.5, due_s, 0.0, share=2.0)
    appointments.book(booking)
    return booking


def exchanged(source: Appointments, sink: Appointments, now_s: float = 0.0) -> list[BookingNote]:
    """Tell the bookings of one gateway to another, whose clock differs."""
    notes = source.take(now_s, 1000, "a")
    sink.merge(notes, now_s + OFFSET_S)
    source.confirm()
    return notes


def test_other_gateways_honour_a_booking() -> None:
    """A gateway recognises the client of another gateway and counts the work of its booking."""
    first, second = Appointments(), Appointments()
    booked(first)
    exchanged(first, second, 4.0)
    found = second.find(1, OFFSET_S + 10.0, 1)
    assert found is not None
    assert (found.due_s, found.booked_s) == (OFFSET_S + 10.0, OFFSET_S)
    assert found.until_s == OFFSET_S + 10.0 + 5.0 + 0.25 * 10.0
    assert second.ahead_s(0, "t", 1.0, 0.1) == first.ahead_s(0, "t", 1.0, 0.1) == (0.0, 0.5)
    gap_s = second.gap_s(0, OFFSET_S + 9.9, 0.2, sum)
    assert gap_s == first.gap_s(0, 9.9, 0.2, sum) == pytest.approx(0.7)


def test_a_kept_booking_is_closed_everywhere() -> None:
    """A client that returns to another gateway has no booking at the first gateway any more."""
    first, second = Appointments(), Appointments()
    booked(first)
    exchanged(first, second)
    second.close(second.find(1, OFFSET_S + 10.0, 1))
    (note,) = second.take(OFFSET_S + 10.0, 10, "b")
    assert note.closed
    first.merge([note, note], 10.0)
    assert len(first) == len(second) == 0
    assert first.take(10.0, 10, "a") == []


def test_a_booking_that_is_closed_before_it_is_told_stays_unknown() -> None:
    """A gateway tells the others nothing about a booking that is over already."""
    appointments = Appointments()
    appointments.close(booked(appointments))
    missed = booked(appointments)
    appointments.expire(missed.until_s + 1.0)
    assert appointments.take(20.0, 10, "a") == []


def test_own_and_late_notes_change_nothing() -> None:
    """A gateway ignores its own notes, repeated notes, and notes of bookings that it has closed."""
    first, second = Appointments(), Appointments()
    booking = booked(first)
    notes = exchanged(first, second)
    first.merge(notes, 0.0)
    second.merge(notes, OFFSET_S)
    assert len(first) == len(second) == 1
    first.close(booking)
    first.merge(notes, 0.0)  # the store does not know yet that the client has returned
    first.take(10.0, 10, "a")
    first.merge(notes, 0.0)
    assert len(first) == 0
    second.merge([notes[0].later(60.0)._replace(name="over")], OFFSET_S)
    assert len(second) == 1


def test_unconfirmed_notes_are_told_again() -> None:
    """Notes are repeated until the store has confirmed them, and all notes after it was empty."""
    appointments = Appointments()
    booked(appointments)
    (sent,) = appointments.take(0.0, 10, "a")
    booked(appointments, 2)
    (again,) = appointments.take(1.0, 10, "a")
    assert again == sent.later(1.0)
    appointments.confirm()
    (second,) = appointments.take(1.0, 10, "a")
    assert second.fingerprint == 2
    appointments.confirm()
    appointments.restore()
    assert {one.name for one in appointments.take(2.0, 10, "a")} == {sent.name, second.name}


def test_shared_bookings_are_bounded() -> None:
    """A gateway takes no more bookings than its own maximum from other gateways."""
    first, second = Appointments(), Appointments(most=3)
    for fingerprint in range(1, 9):
        booked(first, fingerprint)
    exchanged(first, second)
    assert len(second) == 3


@given(st.lists(st.tuples(st.sampled_from("bcte"), st.integers(0, 1), st.integers(1, 3))))
def test_gateways_agree_after_an_exchange(steps) -> None:
    """Gateways that book, close and exchange in any order know the same bookings at the end."""
    both, now_s = (Appointments(), Appointments()), 0.0
    for step, which, fingerprint in steps:
        one, other = both[which], both[1 - which]
        if step == "b":
            one.book(Booking(fingerprint, 0, "t", 0.5, now_s + 5.0, now_s))
        elif step == "t":
            now_s += 1.0
        elif step == "e":
            notes = one.take(now_s, 2, "xy"[which])
            other.merge(notes, now_s)
            one.confirm()
        else:
            found = one.find(fingerprint, now_s, 1)
            if found is not None:
                one.close(found)
    for _ in range(len(steps) + 1):
        for which in (0, 1):
            both[1 - which].merge(both[which].take(now_s, 1000, "xy"[which]), now_s)
            both[which].confirm()
    for one in both:
        one.expire(now_s)
    names = [{booking.name for booking in one._open()} for one in both]
    assert names[0] == names[1]
    assert len(both[0]) == len(both[1]) == len(names[0])


def test_another_gateway_admits_a_request_at_its_appointment() -> None:
    """A client that a gateway has refused is admitted on time by another gateway, ahead of new
    requests, and the other gateway gives later times to its own clients."""
    first, second = Deadline(), Deadline()
    refused = first.decide(view(3.0), 0.0)
    assert isinstance(refused, Refused)
    for number in range(50):
        first.decide(view(3.0, fingerprint=2 + number), 0.0)
    alone = Deadline().decide(view(3.0, fingerprint=77), 0.0)
    exchanged(first.appointments, second.appointments)
    later = second.decide(view(3.0, fingerprint=77), OFFSET_S)
    assert later.retry_after_s > alone.retry_after_s + 50 * 0.1
    now_s = OFFSET_S + refused.retry_after_s
    assert isinstance(second.decide(view(0.6, fingerprint=99), now_s), Refused)
    assert isinstance(second.decide(view(0.6), now_s), Admitted)
    assert isinstance(second.decide(view(0.6), now_s), Refused), "an appointment is for one request"
