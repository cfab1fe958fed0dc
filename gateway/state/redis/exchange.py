"""The arguments and the result of the script `exchange`.

docs/guide/cluster.md describes the keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from draftgate.gateway.state.commands import ExchangeNews
from draftgate.gateway.state.memory.exchange import HISTORY_S, MOST_NEWS, SOURCE_S
from draftgate.gateway.state.values import News
from draftgate.policies.admission.appointments import BookingNote
from draftgate.policies.speculation.acceptance_history import (
    FORGETTING,
    MOST_KEYS,
    Key,
    KeyTally,
    Tally,
)


class _BookingFields(NamedTuple):
    """The fields of a booking that the script does not read."""

    fingerprint: int
    priority: int
    tenant: str
    work_s: float
    again: bool
    share: float
    model: str = ""


_KEY: Final = msgspec.json.Decoder(Key)
_FIELDS: Final = msgspec.json.Decoder(_BookingFields)
_BOOKING_VALUES: Final = 5


def exchange_arguments(update: ExchangeNews, _caller: object) -> list[bytes | str | int | float]:
    """Return the arguments of an exchange."""
    args: list[bytes | str | int | float] = [
        update.source,
        update.number,
        update.start,
        update.cursor,
    ]
    args += (_us(SOURCE_S), _us(HISTORY_S), MOST_KEYS, MOST_NEWS, FORGETTING)
    args += (len(update.history), len(update.restored))
    for key, tally in (*update.history, *update.restored):
        args += (msgspec.json.encode(key), tally.choices, tally.accepted, tally.rejected)
    for one in update.bookings:
        fields = _BookingFields(
            one.fingerprint,
            one.priority,
            one.tenant,
            one.work_s,
            one.again,
            one.share,
            one.model,
        )
        args += (one.name, _us(one.due_in_s), _us(one.booked_ago_s), _us(one.ends_in_s))
        args += (int(one.closed), msgspec.json.encode(fields))
    return args


def news_of(_command: object, found: Sequence[Any]) -> News:
    """Return the news in the result of the script.

    Entries that this version cannot read are omitted.
    """
    start, *rest = found
    if not rest:
        return News(start)
    cursor, more, expired_claims, histories, *values = rest
    until = 2 * histories
    history, bookings = _histories(values[:until]), _bookings(values[until:])
    return News(start, cursor, bool(more), tuple(history), tuple(bookings), expired_claims)


def _histories(values: Sequence[str]) -> Iterator[KeyTally]:
    for text, value in zip(*[iter(values)] * 2, strict=True):
        _, *numbers = value.split()
        try:
            key = _KEY.decode(text)
        except msgspec.MsgspecError:
            continue
        restored, added = (
            Tally(int(choices), float(accepted), float(rejected))
            for choices, accepted, rejected in zip(*[iter(numbers)] * 3, strict=True)
        )
        yield key, restored.then(added)


def _bookings(values: Sequence[str]) -> Iterator[BookingNote]:
    rows = zip(*[iter(values)] * _BOOKING_VALUES, strict=True)
    for name, due_in_us, booked_ago_us, closed, text in rows:
        try:
            one = _FIELDS.decode(text)
        except msgspec.MsgspecError:
            continue
        yield BookingNote(
            name,
            one.fingerprint,
            one.priority,
            one.tenant,
            one.work_s,
            int(due_in_us) / 1e6,
            int(booked_ago_us) / 1e6,
            one.again,
            one.share,
            closed == "1",
            one.model,
        )


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
