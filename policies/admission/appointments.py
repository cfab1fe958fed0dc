"""When those who were refused come back.

Future time of the pool is one line. Who was admitted occupies it from now on, for W seconds; who
was refused is booked behind them and all who were booked before, and told to come when so much of
the line has drained that it can be let in. Clients are known by their requests' fingerprints.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final

MOST_BOOKINGS: Final = 16384
"""Bookings that are kept, five megabytes or so: more than a minute of three times what 100 requests
a second can be served. Beyond it clients are told when to come, and not known when they do."""

EARLY_S: Final = 0.05
"""Who comes no earlier is on time: clients' clocks and timers."""

LATE_S: Final = 1.5
"""Who comes no later has kept its appointment: `Retry-After` has whole seconds, and networks take
theirs. Who is later is let in all the same if there is room, but goes to the end of the line if
there is none."""

GRACE_S: Final = 5.0
GRACE_SHARE: Final = 0.25
"""Who comes so many seconds and this share of its delay late is still expected: OpenAI's clients
put a quarter of jitter on delays of their own."""

SAME_BURST_S: Final = 0.25
"""Equal requests that come so soon behind the first of them are others, not the same one coming
back: OpenAI's clients wait half a second at least."""

KEPT_AT_FIRST: Final = 0.8
"""Share of appointments that are believed to be kept before any is due."""

_LEARNING: Final = 0.02
"""An appointment moves that share by a fiftieth of the way. (Chosen.)"""


@dataclass(slots=True)
class Booking:
    """A request that was told when to come back.

    Attributes:
        due_s: when.
        told_s: when it was told so.
        again: it came in time once, and was sent away.
        number: by which it is known here, once it is booked.
    """

    fingerprint: int
    priority: int
    tenant: str
    work_s: float
    due_s: float
    told_s: float
    again: bool = False
    number: int = 0

    def is_due(self, now_s: float) -> bool:
        """Return whether it may come now."""
        return now_s >= self.due_s - EARLY_S

    def is_kept(self, now_s: float) -> bool:
        """Return whether it would be in time now."""
        return self.is_due(now_s) and now_s <= self.due_s + LATE_S

    @property
    def until_s(self) -> float:
        """When it is no longer expected."""
        return self.due_s + GRACE_S + GRACE_SHARE * (self.due_s - self.told_s)


@dataclass(slots=True)
class _Booked:
    """What a tenant has booked in a class."""

    share: float
    work_s: float = 0.0
    bookings: int = 0


class Appointments:
    """Who is expected when, and how much of the pool they will take."""

    def __init__(self, most: int = MOST_BOOKINGS) -> None:
        """Expect nobody."""
        self._most = most
        self._of: dict[int, dict[int, Booking]] = {}  # by fingerprint, then by number
        self._until = list[tuple[float, int, Booking]]()  # a heap; those who came are among them
        self._booked: defaultdict[int, dict[str, _Booked]] = defaultdict(dict)
        self._again_s: dict[int, float] = {}  # by class
        self._count = 0
        self._number = 0
        self.kept_share = KEPT_AT_FIRST

    def __len__(self) -> int:
        """Return how many are expected."""
        return self._count

    @property
    def classes(self) -> Collection[int]:
        """Return the classes of which somebody is expected."""
        return self._booked.keys()

    def expire(self, now_s: float) -> None:
        """Give up on those who did not come."""
        while self._until and self._until[0][0] < now_s:
            _, number, booking = heappop(self._until)
            if number in self._of.get(booking.fingerprint, {}):
                self._drop(booking)
                self._learn(kept=False)

    def find(self, fingerprint: int, now_s: float, retries: int | None) -> Booking | None:
        """Return the appointment that a request comes for, the earliest of equal ones.

        None if it has none, or is another request that is equal to those which have. A fingerprint
        of 0 is nobody's.
        """
        if not fingerprint or fingerprint not in self._of or retries == 0:
            return None
        booking = min(self._of[fingerprint].values(), key=lambda one: one.due_s)
        is_burst = now_s - booking.told_s < SAME_BURST_S
        if retries is None and is_burst and not booking.is_due(now_s):
            return None
        return booking

    def ahead_s(
        self, priority: int, tenant: str, share: float, work_s: float
    ) -> tuple[float, float]:
        """Return how much of the line those take who are expected before a newcomer.

        Those of better classes, whole, and those of its own: there, tenants share the line as
        `fair` would, so that the bookings of one do not send another's newcomers away.
        """
        better_s = 0.0
        for level, booked in self._booked.items():
            if level < priority:
                better_s += sum(one.work_s for one in booked.values())
        tenants = self._booked.get(priority, {})
        own_s = tenants[tenant].work_s if tenant in tenants else 0.0
        until = (own_s + work_s) / share
        others_s = (min(one.work_s, until * one.share) for n, one in tenants.items() if n != tenant)
        return better_s * self.kept_share, (own_s + sum(others_s)) * self.kept_share

    def again_s(self, priority: int) -> tuple[float, float]:
        """Return how much of it those take who came in time and were sent away once more.

        Those of better classes, and those of this one.
        """
        better_s = sum(work_s for level, work_s in self._again_s.items() if level < priority)
        return better_s, self._again_s.get(priority, 0.0)

    def book(self, booking: Booking, share: float) -> None:
        """Expect somebody who can be known again, if there is room."""
        if not booking.fingerprint or self._count >= self._most:
            return
        self._number += 1
        self._count += 1
        booking.number = self._number
        self._of.setdefault(booking.fingerprint, {})[self._number] = booking
        heappush(self._until, (booking.until_s, self._number, booking))
        booked = self._booked[booking.priority].setdefault(booking.tenant, _Booked(share))
        booked.share = share
        booked.work_s += booking.work_s
        booked.bookings += 1
        if booking.again:
            again_s = self._again_s.get(booking.priority, 0.0)
            self._again_s[booking.priority] = again_s + booking.work_s

    def strike(self, booking: Booking) -> None:
        """Strike out who came: it is let in, or booked anew."""
        self._drop(booking)
        self._tidy()
        if not booking.again:
            self._learn(kept=True)

    def _tidy(self) -> None:
        """Take those who came out of the heap, once they are most of it."""
        if len(self._until) > 2 * self._count + 64:
            expected = [one for equal in self._of.values() for one in equal.values()]
            self._until = [(one.until_s, one.number, one) for one in expected]
            heapify(self._until)

    def _drop(self, booking: Booking) -> None:
        equal = self._of[booking.fingerprint]
        del equal[booking.number]
        if not equal:
            del self._of[booking.fingerprint]
        if booking.again:
            self._again_s[booking.priority] -= booking.work_s
        tenants = self._booked[booking.priority]
        booked = tenants[booking.tenant]
        booked.work_s -= booking.work_s
        booked.bookings -= 1
        if not booked.bookings:
            del tenants[booking.tenant]
            if not tenants:
                del self._booked[booking.priority]
                self._again_s.pop(booking.priority, None)
        self._count -= 1

    def _learn(self, *, kept: bool) -> None:
        self.kept_share += _LEARNING * (float(kept) - self.kept_share)
