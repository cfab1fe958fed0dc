"""What keys have used of each model, by day and by month.

Each gateway counts the requests that it has served, and writes its counts of a day and of a month
to the store a few seconds later. The store keeps those of all gateways, and the reader adds them.
A store that has lost its memory gets the counts of the present month again.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import Context
from datetime import UTC, date, datetime
from typing import Final, TypeAlias

import msgspec

from draftgate.gateway.accounts import PER_USD, Account, Period
from draftgate.gateway.state.commands import ListUsage, PutUsage
from draftgate.gateway.state.store import Store, StoreError

KEPT: Final = {Period.DAY: 62, Period.MONTH: 13}
"""Number of periods of each kind that the store keeps, with the present one."""

_LONGEST_S: Final = {Period.DAY: 86_400.0, Period.MONTH: 31 * 86_400.0}

REPORT_S: Final = 5.0
"""Seconds for which a gateway collects counts before it writes them. (Chosen, not tuned.)"""

MOST_ROWS: Final = 2000
"""Rows of a gateway and a day beyond which a key has one row for all further models."""

_Row: TypeAlias = tuple[str, str, str]
"""The names of a key, its team (or an empty name) and a model."""

_Counts: TypeAlias = dict[_Row, list[int]]
"""Requests, tokens of prompts, of them cached, tokens of outputs, requests with a known cost, and
their cost in billionths of a USD."""

_NUMBERS: Final = 6

_decoder: Final = msgspec.json.Decoder(list[tuple[_Row, list[int]]])


class UsageRow(msgspec.Struct):
    """What a key has used of a model in a period.

    Attributes:
        begins_at: the begin of the period in UTC.
        team: the team of the key at the time of its requests, or an empty name.
        requests: number of requests that have run.
        cached_tokens: tokens of the prompts that were in a cache.
        unpriced_requests: number of requests without a known price.
        cost_usd: the cost of the others, or None if there are none.
    """

    period: Period
    begins_at: datetime
    key: str
    team: str
    model: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    unpriced_requests: int
    cost_usd: float | None


class UsageHistory(msgspec.Struct):
    """The response of `/usage/history`."""

    data: list[UsageRow]
    object: str = "list"


class Usage:
    """The usage of a gateway, and of all gateways that share its store."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        """Start without usage of this gateway.

        Args:
            clock: Unix time in seconds.
        """
        self._store = store
        self._clock = clock
        self._source = secrets.token_hex(6)
        self._days: dict[date, _Counts] = {}  # of the present month
        self._today = date.min  # while a report is due
        self._new: list[tuple[Account, str, tuple[int, int, int], float | None]] = []
        self._unreported: set[date] = set()
        self._reporting: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()  # later counts must not be written first

    def count(
        self, account: Account, model: str, tokens: tuple[int, int, int], usd: float | None
    ) -> None:
        """Count a request that has run, and report it soon.

        Args:
            tokens: of its prompt, of them cached, and of its output.
            usd: its cost, or None without a price.
        """
        self._new.append((account, model, tokens, usd))
        if self._reporting is None:
            self._begin()

    async def report(self) -> None:
        """Write the counts that the store does not have yet.

        Raises:
            StoreError: the store does not respond.
        """
        async with self._writing:
            self._fold()
            while self._unreported:
                day = max(self._unreported)
                self._unreported.discard(day)
                try:
                    await self._report(day)
                except StoreError:
                    self._unreported.add(day)
                    raise
        present = _month(self._now().date())
        self._days = {day: one for day, one in self._days.items() if _month(day) >= present}

    async def rows(self, period: Period, last: int) -> list[UsageRow]:
        """Return the usage of all gateways in the latest periods, the present one first.

        Raises:
            StoreError: the store does not respond.
        """
        await self.report()
        now, found = self._now(), []
        for _ in range(last):
            begin = period.begin(now)
            texts = await self._store.call(ListUsage(_name(period, begin.date())))
            sums = _sum(dict(_decoder.decode(text)) for text in texts)
            found += [_shown(period, begin, row, counts) for row, counts in sorted(sums.items())]
            now = begin.fromtimestamp(begin.timestamp() - 1.0, UTC)
        return found

    def _begin(self) -> None:
        """Let a task report the requests until then, at the latest at the end of the day."""
        now = self._now()
        self._today = now.date()
        wait_s = min(REPORT_S, (Period.DAY.end(now) - now).total_seconds())
        # An empty context keeps the id of this request out of the log lines of others.
        self._reporting = asyncio.create_task(self._report_soon(wait_s), context=Context())

    def _fold(self) -> None:
        """Add the new requests to the counts of their day."""
        some, self._new = self._new, []
        if not some:
            return
        self._unreported.add(self._today)
        day = self._days.setdefault(self._today, {})
        for account, model, (prompt, cached, output), usd in some:
            row = (account.name, account.team or "", model)
            if row not in day and len(day) >= MOST_ROWS:
                row = (*row[:2], "")
            counts = day.setdefault(row, [0] * _NUMBERS)
            counts[0] += 1
            counts[1] += prompt
            counts[2] += cached
            counts[3] += output
            if usd is not None:
                counts[4] += 1
                counts[5] += round(usd * PER_USD)

    async def _report_soon(self, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        self._fold()
        self._reporting = None  # later requests are reported again
        with suppress(StoreError):  # the report of the next request has these counts, too
            await self.report()

    async def _report(self, day: date) -> None:
        month = _month(day)
        of_month = [counts for one, counts in self._days.items() if _month(one) == month]
        await self._put(Period.DAY, day, self._days[day])
        await self._put(Period.MONTH, month, _sum(of_month))

    async def _put(self, period: Period, begin: date, counts: _Counts) -> None:
        text = msgspec.json.encode(list(counts.items())).decode()
        ttl_s = KEPT[period] * _LONGEST_S[period]
        await self._store.call(PutUsage(self._source, _name(period, begin), text, ttl_s))

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock(), UTC)


def _month(day: date) -> date:
    return day.replace(day=1)


def _name(period: Period, begin: date) -> str:
    """Return the name of a period in the store."""
    return f"{period}:{begin}"


def _sum(parts: Iterable[_Counts]) -> _Counts:
    total: _Counts = {}
    for counts in parts:
        for row, numbers in counts.items():
            before: Sequence[int] = total.get(row, [0] * _NUMBERS)
            total[row] = [a + b for a, b in zip(before, numbers, strict=True)]
    return total


def _shown(period: Period, begin: datetime, row: _Row, counts: Sequence[int]) -> UsageRow:
    requests, prompt, cached, output, priced, cost = counts
    usd = cost / PER_USD if priced else None
    return UsageRow(period, begin, *row, requests, prompt, cached, output, requests - priced, usd)
