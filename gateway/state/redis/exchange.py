"""The arguments and the result of the script `exchange`.

docs/guide/cluster.md describes the keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from draftgate.gateway.state.exchange import HISTORY_S, MOST_NEWS, SOURCE_S, News, Update
from draftgate.policies.speculation.acceptance_history import (
    FORGETTING,
    MOST_KEYS,
    Key,
    KeyTally,
    Tally,
)

_KEY: Final = msgspec.json.Decoder(Key)


def update_arguments(update: Update) -> list[object]:
    """Return the arguments of an update."""
    args: list[object] = [update.source, update.number, update.start, update.cursor]
    args += (round(SOURCE_S * 1e6), round(HISTORY_S * 1e6), MOST_KEYS, MOST_NEWS, FORGETTING)
    args.append(len(update.history))
    for key, tally in (*update.history, *update.restored):
        args += (msgspec.json.encode(key), tally.choices, tally.accepted, tally.rejected)
    return args


def news_of(found: Sequence[Any]) -> News:
    """Return the news in the result of the script.

    Histories that this version cannot read are omitted.
    """
    start, *rest = found
    if not rest:
        return News(start)
    cursor, more, *fields = rest
    return News(start, cursor, bool(more), tuple(_histories(fields)))


def _histories(fields: Sequence[str]) -> Iterator[KeyTally]:
    for text, value in zip(*[iter(fields)] * 2, strict=True):
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
