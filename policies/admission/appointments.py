"""Appointments: the times at which refused requests should return.

Admitted requests occupy the pool for the next W seconds. Each refused request is booked after them
and after all earlier bookings. Its client should return when the pool has done enough of this work
to admit the request. The gateway recognises clients by the fingerprints of their requests.

Gateways share their bookings. A gateway takes its new and closed bookings as *notes*, and merges
the notes of the others. A note may arrive twice and late, but a closed booking never opens again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Final, NamedTuple

from draftgate.policies.ordering.prefix_sum_queue import PrefixSumQueue

BookedWork = tuple[float, float]
"""Work of bookings in higher-priority classes, and in a request's own class, in seconds."""

MOST_BOOKINGS: Final = 65536
"""Maximum number of bookings, which take about 20 megabytes. That is a minute of a load of 45
requests per second at 24 times the capacity. Clients without a booking get a time to return, but
they are not recognised when they return."""

EARLY_S: Final = 0.05
"""Seconds by which a client may be early and still be on time, because clocks and timers differ."""

LATE_S: Final = 1.5
"""A client keeps its appointment if it is at most this many seconds late, because `Retry-After` has
whole seconds and networks add some delay. A client that is later loses its place, and is
admitted only if the pool has capacity."""

_GRACE_S: Final = 5.0
GRACE_SHARE: Final = 0.25
"""The gateway expects a client for this many seconds, plus this share of its delay, after its
appointment. OpenAI's clients add a quarter of jitter to their delays."""

SAME_BURST_S: Final = 0.25
"""An equal request that arrives this soon after the first is a second request, not the first one
again. OpenAI's clients wait for at least half a second before they retry."""

KEPT_AT_FIRST: Final = 1.0
"""Initial estimate of the share of appointments that clients keep. The gateway learns a lower share
when bookings expire."""

MOST_GAP_STEPS: Final = 100
LEAST_GAP_S: Final = 0.01
"""Steps and precision of the search for a gap. Each step moves to the end of the work that the
previous one found, so the search never skips a gap. (Chosen, not tuned.)"""

_LEARNING: Final = 0.02
"""Weight of one appointment in that share, which averages about the last fifty. (Chosen, not
tuned.)"""


@dataclass(slots=True)
class Booking:
    """A refused request with an appointment.

    Attributes:
        due_s: time at which the client should return.
        booked_s: time at which the client received the appointment.
        again: whether the client returned on time before and was refused again.
        share: weight of the tenant.
        name: identifier of the booking for all gateways, or an empty string before it is shared.
        number: identifier of the booking in this process, set when it is booked.
        closed: whether the client has returned.
    """

    fingerprint: int
    priority: int
    tenant: str
    work_s: float
    due_s: float
    booked_s: float
    again: bool = False
    share: float = 1.0
    name: str = ""
    number: int = 0
    closed: bool = False

    def is_due(self, now_s: float) -> bool:
        """Return whether the client may return now."""
        return now_s >= self.due_s - EARLY_S

    def is_kept(self, now_s: float) -> bool:
        """Return whether a client that returns now would be on time."""
        return self.is_due(now_s) and now_s <= self.due_s + LATE_S

    @property
    def until_s(self) -> float:
        """The time after which the client is no longer expected."""
        return self.due_s + _GRACE_S + GRACE_SHARE * (self.due_s - self.booked_s)


class BookingNote(NamedTuple):
    """A booking as gateways tell it to each other, whose times are relative to now.

    Attributes:
        name: identifier of the booking.
        due_in_s: seconds until the client should return, negative after that time.
        booked_ago_s: seconds since the client received the appointment.
        share: weight of the tenant.
        closed: whether the client has returned.
        model: name of the model whose workers have the appointment.
    """

    name: str
    fingerprint: int
    priority: int
    tenant: str
    work_s: float
    due_in_s: float
    booked_ago_s: float
    again: bool = False
    share: float = 1.0
    closed: bool = False
    model: str = ""

    @staticmethod
    def from_booking(booking: Booking, now_s: float) -> BookingNote:
        """Return the note of a booking with a name."""
        return BookingNote(
            booking.name,
            booking.fingerprint,
            booking.priority,
            booking.tenant,
            booking.work_s,
            booking.due_s - now_s,
            now_s - booking.booked_s,
            booking.again,
            booking.share,
            booking.closed,
        )

    def later(self, seconds: float) -> BookingNote:
        """Return the same note, some seconds later."""
        return self._replace(
            due_in_s=self.due_in_s - seconds, booked_ago_s=self.booked_ago_s + seconds
        )

    def booking(self, now_s: float) -> Booking:
        """Return the booking on the clock of this process."""
        return Booking(
            self.fingerprint,
            self.priority,
            self.tenant,
            self.work_s,
            now_s + self.due_in_s,
            now_s - self.booked_ago_s,
            self.again,
            self.share,
            self.name,
        )

    @property
    def ends_in_s(self) -> float:
        """Seconds until the client is no longer expected."""
        return self.booking(0.0).until_s


@dataclass(slots=True)
class _TenantBookings:
    """Sums over a tenant's bookings in a class."""

    share: float
    work_s: float = 0.0
    bookings: int = 0


class Appointments:
    """The bookings, and the work that they will bring to the pool.

    Attributes:
        classes: the priority classes that have bookings.
        kept_share: learned share of appointments that clients keep.
    """

    def __init__(self, most: int = MOST_BOOKINGS) -> None:
        self.kept_share = KEPT_AT_FIRST
        self._most = most
        self._by_fingerprint: dict[int, dict[int, Booking]] = {}  # fingerprint -> number -> booking
        self._by_end: list[tuple[float, int, Booking]] = []  # a heap
        self._classes: defaultdict[int, dict[str, _TenantBookings]] = defaultdict(dict)
        self.classes: Collection[int] = self._classes.keys()
        self._by_due: defaultdict[int, PrefixSumQueue] = defaultdict(PrefixSumQueue)
        self._count = 0
        self._number = 0
        self._by_name: dict[str, Booking] = {}  # open bookings that other gateways may know
        # New and closed bookings for the other gateways, and those on their way, by number.
        self._changed: dict[int, Booking] = {}
        self._sent: dict[int, Booking] = {}

    def __len__(self) -> int:
        """Return the number of bookings."""
        return self._count

    def expire(self, now_s: float) -> None:
        """Drop bookings whose clients did not return."""
        while self._by_end and self._by_end[0][0] < now_s:
            _, number, booking = heappop(self._by_end)
            if number in self._by_fingerprint.get(booking.fingerprint, {}):
                self._drop(booking)
                self._changed.pop(number, None)
                self._learn(kept=False)

    def find(self, fingerprint: int, now_s: float, retries: int | None) -> Booking | None:
        """Return the earliest booking of a request, or None.

        A first attempt has no booking. A second equal request in the same burst has no booking
        either. The fingerprint 0 belongs to no request.
        """
        if not fingerprint or fingerprint not in self._by_fingerprint or retries == 0:
            return None
        booking = min(self._by_fingerprint[fingerprint].values(), key=lambda booking: booking.due_s)
        is_burst = now_s - booking.booked_s < SAME_BURST_S
        if retries is None and is_burst and not booking.is_due(now_s):
            return None
        return booking

    def ahead_s(self, priority: int, tenant: str, share: float, work_s: float) -> BookedWork:
        """Return the work of bookings ahead of a new request.

        The first value is the work in higher-priority classes. The second value is the work in the
        request's own class, in which tenants share the pool as in `fair`. The bookings of one
        tenant therefore do not cause the refusal of new requests of another tenant.
        """
        better_s = 0.0
        for level, bookings in self._classes.items():
            if level < priority:
                better_s += sum(sums.work_s for sums in bookings.values())
        tenants = self._classes.get(priority, {})
        own_s = tenants[tenant].work_s if tenant in tenants else 0.0
        until = (own_s + work_s) / share
        others_s = (
            min(sums.work_s, until * sums.share) for name, sums in tenants.items() if name != tenant
        )
        return better_s * self.kept_share, (own_s + sum(others_s)) * self.kept_share

    def gap_s(
        self, priority: int, now_s: float, ahead_s: float, longer_s: Callable[[BookedWork], float]
    ) -> float:
        """Return the seconds until the first gap between the bookings.

        The pool has then done the work ahead, and the work of all bookings in this and in
        higher-priority classes that are due by then.

        Args:
            ahead_s: seconds until the pool has done the work of the waiting requests.
            longer_s: returns the additional seconds that the pool takes for booked work.
        """
        own = [queue for level, queue in self._by_due.items() if level == priority]

        def done_s(gap_s: float) -> float:
            better_s = self._better_due_s(priority, -math.inf, now_s + gap_s)
            due = now_s + gap_s, self._number + 1
            own_s = self.kept_share * sum(queue.work_before(due) for queue in own)
            return ahead_s + longer_s((better_s, own_s))

        return _settle(done_s, ahead_s)

    def overtaken_s(
        self, priority: int, now_s: float, ahead_s: float, longer_s: Callable[[BookedWork], float]
    ) -> float:
        """Return the seconds until a waiting request starts, if booked requests overtake it.

        The pool has then done the work ahead, and the work of the bookings in higher-priority
        classes whose clients return by then. The arguments are those of `gap_s`.
        """

        def done_s(gap_s: float) -> float:
            better_s = self._better_due_s(priority, now_s - LATE_S, now_s + gap_s)
            return ahead_s + longer_s((better_s, 0.0))

        return _settle(done_s, ahead_s)

    def _better_due_s(self, priority: int, after_s: float, before_s: float) -> float:
        """Return the work of bookings in higher-priority classes that are due in a period."""
        queues = [queue for level, queue in self._by_due.items() if level < priority]
        before, after = (before_s, self._number + 1), (after_s, 0)
        due_s = sum(queue.work_before(before) - queue.work_before(after) for queue in queues)
        return self.kept_share * due_s

    def book(self, booking: Booking) -> None:
        """Add a booking if its request has a fingerprint and the limit permits it."""
        if booking.fingerprint and self._count < self._most:
            self._add(booking)
            self._changed[booking.number] = booking

    def close(self, booking: Booking) -> None:
        """Remove the booking of a request that returned."""
        self._end(booking)
        if booking.name:
            self._changed[booking.number] = booking
        else:
            del self._changed[booking.number]  # the other gateways never know it

    def take(self, now_s: float, most: int, source: str) -> list[BookingNote]:
        """Return at most this number of new and closed bookings for the other gateways.

        The same bookings are returned until `confirm`, because the others may know them already.

        Args:
            source: an id of this gateway, the prefix of the names of its bookings.
        """
        if not self._sent:
            self._sent = dict(islice(self._changed.items(), most))
            for number, booking in self._sent.items():
                del self._changed[number]
                if not booking.name:
                    booking.name = f"{source}-{number}"
                    self._by_name[booking.name] = booking
        return [BookingNote.from_booking(booking, now_s) for booking in self._sent.values()]

    def confirm(self) -> None:
        """Note that the other gateways can read the bookings that `take` has returned."""
        self._sent = {}

    def merge(self, notes: Collection[BookingNote], now_s: float) -> None:
        """Add the bookings of other gateways, and close bookings whose clients returned there."""
        self.expire(now_s)
        if not notes:
            return
        waiting = (*self._changed.values(), *self._sent.values())
        closed = {booking.name for booking in waiting if booking.closed}
        for note in notes:
            known = self._by_name.get(note.name)
            if note.closed and known is not None:
                self._end(known)
            is_new = known is None and not note.closed and note.name not in closed
            if is_new and note.ends_in_s >= 0.0 and self._count < self._most:
                self._add(note.booking(now_s))

    def restore(self) -> None:
        """Tell the other gateways all bookings again, because the store has lost its memory."""
        for booking in self._open():
            self._changed[booking.number] = booking

    def _open(self) -> list[Booking]:
        return [one for equal in self._by_fingerprint.values() for one in equal.values()]

    def _add(self, booking: Booking) -> None:
        self._number += 1
        self._count += 1
        booking.number = self._number
        if booking.name:
            self._by_name[booking.name] = booking
        self._by_fingerprint.setdefault(booking.fingerprint, {})[self._number] = booking
        heappush(self._by_end, (booking.until_s, self._number, booking))
        self._by_due[booking.priority].insert((booking.due_s, booking.number), booking.work_s)
        tenants = self._classes[booking.priority]
        sums = tenants.setdefault(booking.tenant, _TenantBookings(booking.share))
        sums.share = booking.share
        sums.work_s += booking.work_s
        sums.bookings += 1

    def _end(self, booking: Booking) -> None:
        """Remove the booking of a request that returned to any gateway."""
        booking.closed = True
        self._drop(booking)
        # Rebuild the heap when most of its bookings are closed.
        if len(self._by_end) > 2 * self._count + 64:
            self._by_end = [(one.until_s, one.number, one) for one in self._open()]
            heapify(self._by_end)
        if not booking.again:
            self._learn(kept=True)

    def _drop(self, booking: Booking) -> None:
        self._by_name.pop(booking.name, None)
        equal = self._by_fingerprint[booking.fingerprint]
        del equal[booking.number]
        if not equal:
            del self._by_fingerprint[booking.fingerprint]
        by_due = self._by_due[booking.priority]
        by_due.remove((booking.due_s, booking.number))
        if not by_due:
            del self._by_due[booking.priority]
        tenants = self._classes[booking.priority]
        sums = tenants[booking.tenant]
        sums.work_s -= booking.work_s
        sums.bookings -= 1
        if not sums.bookings:
            del tenants[booking.tenant]
            if not tenants:
                del self._classes[booking.priority]
        self._count -= 1

    def _learn(self, *, kept: bool) -> None:
        self.kept_share += _LEARNING * (float(kept) - self.kept_share)


def _settle(done_s: Callable[[float], float], first_s: float) -> float:
    """Return the first time after which the work that is due by then is done."""
    gap_s = first_s
    for _ in range(MOST_GAP_STEPS):
        next_s = done_s(gap_s)
        if next_s <= gap_s + LEAST_GAP_S:
            break
        gap_s = next_s
    return gap_s
