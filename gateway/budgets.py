"""The budgets of keys and teams, which hold for all gateways that share the store.

A request is charged when it ends, so requests in flight may exceed a budget, and no others. Each
gateway reports the totals that it has charged, and the store adds those of all gateways. While the
store does not respond, a gateway uses the last sums that it knows, and its own charges since then.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from contextvars import Context
from datetime import UTC, datetime
from typing import Final

import msgspec

from draftgate.gateway.accounts import PER_USD, Budget, Period
from draftgate.gateway.errors import QuotaExceeded
from draftgate.gateway.logs import log
from draftgate.gateway.state.commands import ExchangeSpending
from draftgate.gateway.state.store import Store

KEPT_S: Final = 86_400.0
"""Time for which the store keeps the spending of a period after its end."""


class OwnerUsage(msgspec.Struct):
    """What a key or a team has spent in the present period.

    Attributes:
        owner: `key NAME` or `team NAME`.
    """

    owner: str
    period: Period
    begins_at: datetime
    resets_at: datetime
    spent_usd: float
    budget_usd: float | None
    soft_budget_usd: float | None


class UsageReply(msgspec.Struct):
    """The response of `/usage`."""

    data: list[OwnerUsage]
    object: str = "list"


class Budgets:
    """The spending of keys and teams.

    Attributes:
        on_spent: a callback with the owner of a budget and its spending in USD.
    """

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        """Start without spending of this gateway.

        Args:
            clock: Unix time in seconds.
        """
        self.on_spent: Callable[[str, float], None] = _ignore
        self._store = store
        self._clock = clock
        self._source = secrets.token_hex(6)
        self._own: dict[str, int] = {}  # charges of this gateway, by account of the store
        self._others: dict[str, int] = {}  # those of all others, as last known
        self._warned: set[str] = set()
        self._unreported: set[Budget] = set()
        self._reporting: asyncio.Task[None] | None = None

    async def check(self, budgets: Sequence[Budget]) -> str | None:
        """Check the budgets of a request, and return a warning about soft budgets, or None.

        Raises:
            QuotaExceeded: a hard budget is used up. The error has the time of its reset.
        """
        warning = None
        for budget, spent in zip(budgets, await self._spent(budgets), strict=True):
            usd = spent / PER_USD
            if budget.hard_usd is not None and usd >= budget.hard_usd:
                raise self._exceeded(budget)
            if budget.soft_usd is not None and usd >= budget.soft_usd:
                warning = f"the {budget.owner} has spent {usd:.4g} of {budget.soft_usd:g} USD"
                self._warn(budget, warning)
        return warning

    def charge(self, budgets: Sequence[Budget], usd: float) -> None:
        """Charge the cost of a request that has ended, and report it soon."""
        if usd <= 0.0:
            return
        for budget in budgets:
            name = self._account(budget)
            self._own[name] = self._own.get(name, 0) + round(usd * PER_USD)
        self._unreported.update(budgets)
        if self._reporting is None:
            # An empty context keeps the id of this request out of the log lines of others.
            self._reporting = asyncio.create_task(self._report(), context=Context())

    async def usage(self, budgets: Sequence[Budget]) -> list[OwnerUsage]:
        """Return the spending of all gateways in the present periods."""
        now = self._now()
        return [
            OwnerUsage(
                budget.owner,
                budget.period,
                budget.period.begin(now),
                budget.period.end(now),
                spent / PER_USD,
                budget.hard_usd,
                budget.soft_usd,
            )
            for budget, spent in zip(budgets, await self._spent(budgets), strict=True)
        ]

    async def _report(self) -> None:
        """Report charges to the store, those of many requests in one call."""
        try:
            while self._unreported:
                budgets = list(self._unreported)
                self._unreported.clear()
                await self._spent(budgets)
        finally:
            self._reporting = None

    async def _spent(self, budgets: Sequence[Budget]) -> list[int]:
        """Report the totals of budgets, and return the spending of all gateways."""
        self._forget()
        names = [self._account(budget) for budget in budgets]
        owns = [self._own.get(name, 0) for name in names]
        totals = [
            (name, own, self._resets_in_s(budget) + KEPT_S)
            for name, own, budget in zip(names, owns, budgets, strict=True)
        ]
        sums = await self._store.call(ExchangeSpending(self._source, tuple(totals)))
        if sums is not None:
            for name, own, total in zip(names, owns, sums, strict=True):
                self._others[name] = total - own
        spent = [self._own.get(name, 0) + self._others.get(name, 0) for name in names]
        for budget, total in zip(budgets, spent, strict=True):
            self.on_spent(budget.owner, total / PER_USD)
        return spent

    def _account(self, budget: Budget) -> str:
        """Return the name of a budget in the store, which differs for each period."""
        return f"{budget.period}:{budget.period.begin(self._now()):%Y-%m-%d}:{budget.owner}"

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock(), UTC)

    def _resets_in_s(self, budget: Budget) -> float:
        now = self._now()
        return (budget.period.end(now) - now).total_seconds()

    def _forget(self) -> None:
        """Forget periods that have ended."""
        now = self._now()
        begins = {f"{period}:{period.begin(now):%Y-%m-%d}:" for period in Period}
        for known in (self._own, self._others):
            for name in [one for one in known if not any(map(one.startswith, begins))]:
                del known[name]

    def _exceeded(self, budget: Budget) -> QuotaExceeded:
        end = budget.period.end(self._now())
        return QuotaExceeded(
            f"the budget of the {budget.owner} of {budget.hard_usd:g} USD per {budget.period} is "
            f"used up; it resets at {end:%Y-%m-%dT%H:%M:%SZ}",
            self._resets_in_s(budget),
            "budget",
        )

    def _warn(self, budget: Budget, warning: str) -> None:
        """Log a warning about a soft budget once in its period."""
        name = self._account(budget)
        if name not in self._warned:
            self._warned = {one for one in self._warned if one in self._own} | {name}
            log(logging.WARNING, "a soft budget is exceeded", reason=warning)


def _ignore(_owner: str, _usd: float) -> None:
    """Ignore the spending of a budget."""
