"""The exchange of news in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import takewhile
from typing import Final, NamedTuple, TypeVar

from draftgate.gateway.state.commands import ExchangeNews
from draftgate.gateway.state.expiries import Expiries
from draftgate.gateway.state.values import News
from draftgate.policies.admission.appointments import BookingNote
from draftgate.policies.speculation.acceptance_history import (
    MOST_KEYS,
    NOTHING,
    Key,
    Tally,
)

K = TypeVar("K")

HISTORY_S: Final = 86400.0
"""Seconds after which the store forgets a history without new choices."""

SOURCE_S: Final = 3600.0
"""Seconds for which the store remembers the last number of a gateway.

A gateway repeats an exchange after an outage, which is usually shorter."""

MOST_NEWS: Final = 200
"""Maximum number of entries of each kind in the news of one exchange.

Such news take 1.6 ms of the server and 1.8 ms of the gateway's event loop (CPU times with Redis
6.2, AMD EPYC, 2026-11-23)."""


class _History(NamedTuple):
    """The history of a key.

    Attributes:
        restored, added: the tally of an earlier memory of the store, and the tally since then.
        changed_s: time of the last change.
    """

    restored: Tally
    added: Tally
    revision: int
    changed_s: float

    @property
    def total(self) -> Tally:
        return self.restored.then(self.added)


class _Noted(NamedTuple):
    """A booking, as it was told at a time."""

    note: BookingNote
    revision: int
    at_s: float


_UNKNOWN: Final = _History(NOTHING, NOTHING, 0, 0.0)


class MemoryExchange:
    """The exchange of a memory store, which is the reference for every other implementation."""

    def __init__(self, clock: Callable[[], float], most_keys: int = MOST_KEYS) -> None:
        """Start empty.

        Args:
            clock: a monotonic clock, in seconds.
        """
        self._clock = clock
        self._most = most_keys
        self._start = 0
        self._revision = 0
        self._history = OrderedDict[Key, _History]()  # the latest change is last
        self._bookings = OrderedDict[str, _Noted]()  # by name, and the latest change is last
        self._booking_ends = Expiries()
        self._numbers: dict[str, int] = {}  # the last exchange of each gateway
        self._sources = Expiries()

    def exchange(self, update: ExchangeNews) -> News:
        """Apply what a gateway tells, and return the news."""
        now_s = self._clock()
        self._start = self._start or round(now_s * 1e6) + 1
        if update.start != self._start:
            return News(self._start)
        for source in self._sources.pop_due(now_s):
            del self._numbers[source]
        if update.number > self._numbers.get(update.source, 0):
            self._apply(update, now_s)
        self._numbers[update.source] = max(update.number, self._numbers.get(update.source, 0))
        self._sources.put(update.source, now_s + SOURCE_S)
        self._forget(now_s)
        return self._news(update.cursor, now_s)

    def _apply(self, update: ExchangeNews, now_s: float) -> None:
        for key, tally in update.history:
            known = self._history.get(key, _UNKNOWN)
            self._put(key, known.restored, known.added.then(tally), now_s)
        for key, total in update.restored:
            known = self._history.get(key, _UNKNOWN)
            if total.choices > known.restored.choices:
                self._put(key, total, known.added, now_s)
        for note in update.bookings:
            self._put_booking(note, now_s)

    def _put_booking(self, note: BookingNote, now_s: float) -> None:
        """Note a booking. A closed booking never opens again."""
        known = self._bookings.get(note.name)
        if note.ends_in_s < 0.0 or (known and (known.note.closed or not note.closed)):
            return
        self._revision += 1
        self._bookings[note.name] = _Noted(note, self._revision, now_s)
        self._bookings.move_to_end(note.name)
        self._booking_ends.put(note.name, now_s + note.ends_in_s)

    def _put(self, key: Key, restored: Tally, added: Tally, now_s: float) -> None:
        self._revision += 1
        self._history[key] = _History(restored, added, self._revision, now_s)
        self._history.move_to_end(key)

    def _forget(self, now_s: float) -> None:
        """Forget ended bookings, and histories that are old or least recently used."""
        for name in self._booking_ends.pop_due(now_s):
            del self._bookings[name]
        while self._history:
            key = next(iter(self._history))
            if (
                len(self._history) <= self._most
                and now_s - self._history[key].changed_s < HISTORY_S
            ):
                return
            del self._history[key]

    def _news(self, cursor: int, now_s: float) -> News:
        history, of_history = _changed(self._history, cursor, self._revision)
        bookings, of_bookings = _changed(self._bookings, cursor, self._revision)
        reached = min(of_history, of_bookings)
        return News(
            self._start,
            reached,
            reached < self._revision,
            tuple((key, self._history[key].total) for key in history),
            tuple(
                one.note.later(now_s - one.at_s)
                for one in map(self._bookings.__getitem__, bookings)
            ),
        )


def _changed(
    entries: OrderedDict[K, _History] | OrderedDict[K, _Noted], cursor: int, last: int
) -> tuple[list[K], int]:
    """Return the first keys that have changed after a revision.

    The second result is the revision up to which these are all changes, at most the last revision.
    """
    found = list(takewhile(lambda key: entries[key].revision > cursor, reversed(entries)))
    first = found[::-1][:MOST_NEWS]
    return first, last if len(first) == len(found) else entries[first[-1]].revision
