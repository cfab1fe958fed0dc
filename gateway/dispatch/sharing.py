"""The exchange of what the gateways of a pool have learned, once per heartbeat."""

from __future__ import annotations

import secrets
from collections import deque
from itertools import islice
from typing import Final

from draftgate.gateway.state.exchange import Update
from draftgate.gateway.state.store import Store
from draftgate.policies.speculation.acceptance_history import AcceptanceHistory, KeyTally

AT_ONCE: Final = 200
"""Tallies per exchange."""


class Sharing:
    """The exchange of one gateway.

    Without the store, the gateway uses what it knew before and what it learns itself.
    """

    def __init__(self, store: Store, history: AcceptanceHistory) -> None:
        """Start without knowledge of the others.

        Args:
            history: the history of this gateway, which gets the sums over all gateways.
        """
        self._store = store
        self._history = history
        self._source = secrets.token_hex(8)
        self._number = 0
        self._start = 0
        self._cursor = 0
        self._restoring = deque[KeyTally]()

    async def exchange(self) -> None:
        """Send what is new, and merge the news, until the store responds no more or has no more."""
        while await self._exchange_once():
            pass

    async def _exchange_once(self) -> bool:
        """Exchange once, and return whether more is left."""
        number = self._number + 1
        restored = tuple(islice(self._restoring, AT_ONCE))
        sent = tuple(self._history.take(AT_ONCE))
        update = Update(self._source, number, self._start, self._cursor, sent, restored)
        news = await self._store.exchange(update)
        if news is None:
            return False
        if news.start != self._start:
            self._start, self._cursor = news.start, 0
            self._restoring = deque(self._history.totals())
            return True
        self._number, self._cursor = number, news.cursor
        for _ in restored:
            self._restoring.popleft()
        self._history.confirm()
        self._history.merge(news.history)
        return news.more or bool(self._restoring) or len(sent) == AT_ONCE
