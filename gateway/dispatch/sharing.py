"""The exchange of what the gateways of a pool have learned, with each heartbeat and after refusals.

A refused request gets an appointment after the bookings of all gateways. Until they exchange their
bookings, two gateways that refuse requests at the same time promise the same time of the pool.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final

from draftgate.gateway.state.commands import ExchangeNews
from draftgate.gateway.state.store import Store
from draftgate.policies.admission.appointments import Appointments
from draftgate.policies.speculation.acceptance_history import AcceptanceHistory, KeyTally

_AT_ONCE: Final = 100
"""Tallies, and bookings, per exchange.

Such an update takes 3 ms of the server, a sixth of the deadline (CPU time with Redis 6.2, AMD
EPYC, 2026-11-23)."""


SOON_S: Final = 0.05
"""Seconds from a refusal to the exchange.

Two gateways at 24 times the capacity lost 3% of the goodput with 0.05 and 5% with a second, after
which the pool was idle for 15 s while clients waited for their appointments (simulated,
tests/policies/overload_servers.py, ten seeds, 2026-11-23). Shorter times cost the store more
calls."""


class Sharing:
    """The exchange of one gateway about one model.

    Without the store, the gateway uses what it knew before and what it learns itself. The tallies
    of drafts name their model, so the exchanges of all models get all of them. A booking concerns
    only the workers of its model.

    Attributes:
        history: the acceptance of earlier requests.
        expired_claims: number of claims on workers that have expired in the pool.
    """

    def __init__(
        self,
        store: Store,
        history: AcceptanceHistory,
        appointments: Appointments,
        now_s: Callable[[], float],
        model: Callable[[], str] = lambda: "",
    ) -> None:
        """Start without knowledge of the others.

        Args:
            history: the history of this gateway, which gets the sums over all gateways.
            appointments: the bookings of this gateway, which gets those of all gateways.
            now_s: the clock of the bookings.
            model: a function that returns the name of the model in the pool.
        """
        self.expired_claims = 0
        self._store = store
        self.history = history
        self._appointments = appointments
        self._now_s = now_s
        self._model = model
        self._source = secrets.token_hex(8)
        self._number = 0
        self._start = 0
        self._cursor = 0
        self._restoring = deque[KeyTally]()
        self._refused = asyncio.Event()

    def note_refusal(self) -> None:
        """Note that a request was refused, so that `pause` exchanges soon."""
        self._refused.set()

    async def pause(self, seconds: float) -> None:
        """Wait for the next heartbeat, and exchange soon after refusals meanwhile."""
        end_s = self._now_s() + seconds
        while (left_s := end_s - self._now_s()) > 0.0:
            try:
                async with asyncio.timeout(left_s):
                    await self._refused.wait()
            except TimeoutError:
                return
            await asyncio.sleep(min(SOON_S, left_s))
            self._refused.clear()
            await self.exchange()

    async def exchange(self) -> None:
        """ExchangeNews until nothing new is left, or the store does not respond."""
        while await self._exchange_once():
            pass

    async def _exchange_once(self) -> bool:
        """Send what is new, merge what the store returns, and return whether more is left."""
        number = self._number + 1
        restored = tuple(islice(self._restoring, _AT_ONCE))
        sent = tuple(self.history.take(_AT_ONCE))
        taken = self._appointments.take(self._now_s(), _AT_ONCE, self._source)
        model = self._model()
        notes = tuple([note._replace(model=model) for note in taken])
        exchange = ExchangeNews(
            self._source, number, self._start, self._cursor, sent, restored, notes
        )
        news = await self._store.call(exchange)
        if news is None:
            return False
        if news.start != self._start:
            self._start, self._cursor = news.start, 0
            self._restoring = deque(self.history.totals())
            self._appointments.restore()
            return True
        self._number, self._cursor = number, news.cursor
        self.expired_claims = news.expired_claims
        for _ in restored:
            self._restoring.popleft()
        self.history.confirm()
        self.history.merge(news.history)
        self._appointments.confirm()
        bookings = [note for note in news.bookings if note.model == model]
        self._appointments.merge(bookings, self._now_s())
        return news.more or bool(self._restoring) or _AT_ONCE in {len(sent), len(notes)}
