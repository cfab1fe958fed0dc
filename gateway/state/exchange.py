"""What gateways tell each other through the store once per heartbeat, and its store in memory.

A gateway sends an `Update` and gets `News`: all entries that have changed since its last exchange.
An entry has a *revision*, which increases with each change in the store. The updates of a gateway
are numbered, so that an update that arrives twice counts once.

A store that has lost its memory has another `start`, and ignores the update. Each gateway then
sends the totals that it knows. The store uses the total with the most choices, and adds the tallies
that it gets meanwhile. Every store passes the tests in `tests/gateway/exchange_contract.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import takewhile
from typing import Final, NamedTuple, TypeVar

from draftgate.gateway.state.expiries import Expiries
from draftgate.policies.admission.appointments import BookingNote
from draftgate.policies.speculation.acceptance_history import (
    MOST_KEYS,
    NOTHING,
    Key,
    KeyTally,
    Tally,
)

K = TypeVar("K")

HISTORY_S: Final = 86400.0
"""Seconds after which the store forgets a history without new choices."""

SOURCE_S: Final = 3600.0
"""Seconds for which the store remembers the last number of a gateway.

A gateway repeats an update after an outage, which is usually shorter."""

MOST_NEWS: Final = 200
"""Maximum number of entries of each kind in the news of one exchange.

Such news take 1.6 ms of the server and 1.8 ms of the gateway's event loop (CPU times with Redis
6.2, AMD EPYC, 2026-11-23)."""


class Update(NamedTuple):
    """What a gateway tells the others.

    Attributes:
        source: an id of this run of the gateway.
        number: a number that increases with each new update. A repeated update keeps its number.
        start: the start of the store that the gateway knows, or 0.
        cursor: the revision up to which the gateway knows the entries.
        history: tallies of choices that the store does not know yet.
        restored: totals of an earlier memory of the store.
        bookings: new and closed bookings.
    """

    source: str
    number: int
    start: int
    cursor: int
    history: tuple[KeyTally, ...] = ()
    restored: tuple[KeyTally, ...] = ()
    bookings: tuple[BookingNote, ...] = ()


class News(NamedTuple):
    """What a gateway learns.

    Attributes:
        start: the time when the store's memory began, in microseconds. With another start than that
            of the update, the store has ignored the update.
        cursor: the revision up to which the gateway now knows the entries.
        more: whether further entries may have changed.
        history: the totals of all gateways for keys that have changed.
        bookings: the bookings of all gateways that have changed.
        expired_claims: number of claims on workers that have expired in the pool since the store's
            memory began.
    """

    start: int
    cursor: int = 0
    more: bool = False
    history: tuple[KeyTally, ...] = ()
    bookings: tuple[BookingNote, ...] = ()
    expired_claims: int = 0


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
        self._numbers: dict[str, int] = {}  # the last update of each gateway
        self._sources = Expiries()

    def exchange(self, update: Update) -> News:
        """Apply an update and return the news, as `Store.exchange` describes."""
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

    def _apply(self, update: Update, now_s: float) -> None:
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
