"""Quotas of tenants: an exact ledger of requests and tokens.

A request reserves the maximum number of tokens that it may use. It settles the tokens that it used,
and the rest is released for immediate use. All counts are integers. For each tenant and at any
time,

    reserved == settled + released + open.

Limits are leaky buckets (`policies/leaky_bucket.py`). Released units leave a bucket as if they had
never been reserved.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from draftgate.policies.leaky_bucket import UNITS, LeakyBucket
from draftgate.policies.values import immutable

RETRY_GRACE_S: Final = 1e-3
"""Seconds added to the time until a request fits, so that it still fits if clocks are floats."""

_MOST_TENANTS: Final = 4096
"""Maximum number of tenants, a few megabytes. Beyond it, the least recently used tenants are
forgotten if they have no open reservations and their buckets are empty. A new tenant starts in that
state, so no information is lost."""

_FORGET_TRIES: Final = 8
"""Number of old tenants to check for each new tenant. It exceeds 1 so that the total falls."""


class Limit(StrEnum):
    """The unit that a quota limits."""

    REQUESTS = "requests"
    TOKENS = "tokens"

    def counted(self, number: int) -> str:
        """Return a number of units in words, such as `1 request`."""
        return f"{number} {self.removesuffix('s') if number == 1 else self}"


# A name of the module is found in a tenth of the time of a member of an enum.
_REQUESTS, _TOKENS = Limit


@immutable
class Quota:
    """The limits of a tenant.

    Attributes:
        requests_per_minute, tokens_per_minute: rates, or None for unlimited.
        burst_requests, burst_tokens: maximum burst, or None for a minute's worth.

    Raises:
        ValueError: a limit is not positive, or a burst has no rate.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    burst_requests: int | None = None
    burst_tokens: int | None = None

    def __post_init__(self) -> None:
        for limit, rate, burst in self.fields:
            if any(number is not None and number < 1 for number in (rate, burst)):
                raise ValueError(f"a quota of {limit} must be 1 or more")
            if rate is None and burst is not None:
                raise ValueError(f"a burst of {limit} needs {limit}_per_minute")

    @property
    def is_limited(self) -> bool:
        """Whether any limit exists."""
        return self.requests_per_minute is not None or self.tokens_per_minute is not None

    def limits(self) -> dict[Limit, tuple[int, int]]:
        """Return rate and burst of each limit."""
        return {limit: (rate, burst or rate) for limit, rate, burst in self.fields if rate}

    def share(self, parts: int, tokens: int) -> Quota:
        """Return an equal share of the quota for a request, of at least 1.

        The burst of the share holds the request if the whole quota does. The request then fits
        when nothing else is in use.

        Args:
            parts: the number of shares.
            tokens: the tokens that the request may use.
        """
        if parts == 1:
            return self

        def part(number: int | None) -> int | None:
            return None if number is None else max(1, number // parts)

        whole = self.burst_tokens or self.tokens_per_minute
        burst = None if whole is None else max(1, whole // parts, min(tokens, whole))
        return Quota(
            part(self.requests_per_minute),
            part(self.tokens_per_minute),
            part(self.burst_requests),
            burst,
        )

    @property
    def fields(self) -> tuple[tuple[Limit, int | None, int | None], ...]:
        """The rate and the burst of each limit, or None."""
        return (
            (_REQUESTS, self.requests_per_minute, self.burst_requests),
            (_TOKENS, self.tokens_per_minute, self.burst_tokens),
        )


UNLIMITED: Final = Quota()
"""No limits. The ledger still records the usage."""


@immutable
class QuotaReservation:
    """What a request may use of its tenant's quota.

    Attributes:
        tokens: the maximum number of tokens.
        quota: the quota of the tenant. The ledger uses the quota of the last reservation.
        requests: 1 for a request.
    """

    request_id: str
    tenant: str
    tokens: int
    quota: Quota = UNLIMITED
    requests: int = 1

    def amount(self, limit: Limit) -> int:
        """Return the reserved requests or tokens."""
        return self.requests if limit is _REQUESTS else self.tokens


class Settlement(NamedTuple):
    """What a request has used of its reservation.

    Attributes:
        tokens: the number of used tokens, which may exceed the reservation.
        requests: 1, or 0 for a request that the quota of requests ignores.
    """

    request_id: str
    tokens: int
    requests: int = 1


def release_of(request_id: str) -> Settlement:
    """Return the settlement of a request that has used nothing."""
    return Settlement(request_id, 0, 0)


@immutable
class Shortage:
    """The quota that is too small for a request.

    Attributes:
        limit: the exceeded limit.
        retry_after_s: seconds until the request fits if the tenant sends nothing else, or None
            if the request exceeds the size of the quota.
        requested, most: requested amount, and the size of the quota.
    """

    limit: Limit
    retry_after_s: float | None
    requested: int
    most: int


def shortage_of(reservation: QuotaReservation, limit: Limit, wait_us: int | None) -> Shortage:
    """Return the shortage of a reservation that has to wait for a limit, or never fits (None)."""
    retry_after_s = None if wait_us is None else wait_us / 1e6 + RETRY_GRACE_S
    return Shortage(
        limit, retry_after_s, reservation.amount(limit), reservation.quota.limits()[limit][1]
    )


@immutable
class QuotaLevel:
    """The state of a limit.

    Attributes:
        most: the maximum burst.
        remaining: requests or tokens that fit now, rounded down.
        reset_s: seconds until the whole burst fits.
    """

    most: int
    remaining: int
    reset_s: float


class Levels(NamedTuple):
    """Units of each limit that a tenant uses now, which are 0 without the limit."""

    requests: int = 0
    tokens: int = 0

    def of(self, quota: Quota) -> dict[Limit, QuotaLevel]:
        """Return the state of each limit of a quota."""
        found = {}
        for used, (limit, rate, burst) in zip(self, quota.fields, strict=True):
            if rate:
                most = burst or rate
                left = max(most * UNITS - used, 0) // UNITS
                found[limit] = QuotaLevel(most, left, used / rate / 1e6)
        return found


class Totals(NamedTuple):
    """Token counts of a tenant, with `reserved == settled + released + open`."""

    reserved: int = 0
    settled: int = 0
    released: int = 0
    open: int = 0


@dataclass(slots=True)
class _Account:
    """The state of a tenant.

    Attributes:
        reserved, settled, released: token counts (`Totals`).
        number: the number of the last reservation.
        open_numbers: the numbers of the open reservations, in increasing order.
        quota: the quota that the buckets limit.
    """

    buckets: dict[Limit, LeakyBucket] = field(default_factory=dict)
    reserved: int = 0
    settled: int = 0
    released: int = 0
    number: int = 0
    open_numbers: list[int] = field(default_factory=list)
    quota: Quota = UNLIMITED

    def drain(self, now_us: int) -> None:
        """Drain all buckets until a time."""
        for bucket in self.buckets.values():
            bucket.drain(now_us)

    def use(self, quota: Quota, now_us: int) -> None:
        """Drain all buckets until a time, and use a quota from then on.

        What the tenant has used of a limit stays in use. A new limit ignores earlier reservations.
        """
        self.drain(now_us)
        if quota is self.quota:
            return
        self.quota = quota
        old, self.buckets = self.buckets, {}
        for limit, (rate, most) in quota.limits().items():
            bucket = self.buckets[limit] = old.get(limit) or LeakyBucket(rate, most, now_us)
            bucket.rate, bucket.most = rate, most

    def close(self, number: int, reservation: QuotaReservation, used: Settlement) -> None:
        """End a reservation. Tokens beyond the reservation are reserved now."""
        excess = max(used.tokens - reservation.tokens, 0)
        unused = reservation.tokens + excess - used.tokens
        at = bisect_left(self.open_numbers, number)
        del self.open_numbers[at]
        above = self.open_numbers[at] if at < len(self.open_numbers) else self.number + 1
        for limit, bucket in self.buckets.items():
            if bucket.level:
                released = unused if limit is _TOKENS else reservation.requests - used.requests
                bucket.close(number, released * UNITS, above)
            if excess and limit is _TOKENS:
                bucket.add(self.number + 1, excess * UNITS)
        self.reserved += excess
        self.settled += used.tokens
        self.released += unused

    def is_idle(self, now_us: int) -> bool:
        """Return whether no reservation is open and all buckets are empty."""
        self.drain(now_us)
        return not self.open_numbers and not any(one.level for one in self.buckets.values())


@dataclass(slots=True)
class QuotaLedger:
    """The tokens and requests that tenants have reserved, used and released.

    A reservation or settlement takes O(log open reservations of the tenant), and so does the memory
    store in `gateway/state/`. The ledger treats time that decreases as unchanged time.
    """

    most_tenants: int = _MOST_TENANTS
    _accounts: OrderedDict[str, _Account] = field(default_factory=OrderedDict)
    _open: dict[str, tuple[int, QuotaReservation]] = field(default_factory=dict)
    _now_us: int = 0

    def reserve(self, reservation: QuotaReservation, now_s: float) -> Shortage | None:
        """Reserve what a request may use, or reserve nothing.

        A request that has a reservation keeps that reservation.

        Returns:
            None if the request fits, otherwise the shortage with the longest wait.

        Raises:
            ValueError: tokens are negative.
        """
        if reservation.tokens < 0:
            raise ValueError(f"cannot reserve {reservation.tokens} tokens")
        if reservation.request_id in self._open:
            return None
        account = self._account(reservation, now_s)
        shortage = _shortage(account, reservation)
        if shortage is None:
            self._add(account, reservation)
        return shortage

    def restore(self, reservation: QuotaReservation, now_s: float) -> None:
        """Reserve what a request may use, even beyond the quota.

        A request that has a reservation keeps that reservation.
        """
        if reservation.request_id not in self._open:
            self._add(self._account(reservation, now_s), reservation)

    def settle(self, used: Settlement, now_s: float) -> QuotaReservation | None:
        """End a reservation, charge what the request has used, and release the rest.

        Tokens beyond the reservation are reserved now and count against the quota.

        Returns:
            The reservation, or None if the request has none.

        Raises:
            ValueError: tokens are negative.
        """
        if used.tokens < 0:
            raise ValueError(f"cannot have used {used.tokens} tokens")
        if used.request_id not in self._open:
            return None
        number, reservation = self._open.pop(used.request_id)
        account = self._accounts[reservation.tenant]
        account.drain(self._advance(now_s))
        account.close(number, reservation, used)
        return reservation

    def charge(self, request_id: str, now_s: float) -> None:
        """End the reservation of a request, if it has one, and charge the reservation in full."""
        if request_id in self._open:
            _, reservation = self._open[request_id]
            self.settle(Settlement(request_id, reservation.tokens, reservation.requests), now_s)

    def holds(self, request_id: str) -> bool:
        """Return whether a request has a reservation."""
        return request_id in self._open

    def totals(self, tenant: str) -> Totals:
        """Return the totals of a tenant, which are zero for an unknown tenant."""
        account = self._accounts.get(tenant)
        if account is None:
            return Totals()
        reserved, settled, released = account.reserved, account.settled, account.released
        return Totals(reserved, settled, released, reserved - settled - released)

    def levels(self, tenant: str, now_s: float) -> Levels:
        """Return what a tenant uses now."""
        account = self._accounts.get(tenant)
        if account is None:
            return Levels()
        now_us = self._advance(now_s)
        requests, tokens = account.buckets.get(_REQUESTS), account.buckets.get(_TOKENS)
        return Levels(
            0 if requests is None else requests.level_at(now_us),
            0 if tokens is None else tokens.level_at(now_us),
        )

    def usage(self, now_s: float) -> Iterator[tuple[str, dict[Limit, int]]]:
        """Yield what each tenant uses of its limits now, rounded up to whole numbers."""
        now_us = self._advance(now_s)
        for tenant, account in self._accounts.items():
            account.drain(now_us)
            yield tenant, {limit: -(-one.level // UNITS) for limit, one in account.buckets.items()}

    def _advance(self, now_s: float) -> int:
        """Return the time in microseconds."""
        self._now_us = max(self._now_us, round(now_s * 1e6))
        return self._now_us

    def _account(self, reservation: QuotaReservation, now_s: float) -> _Account:
        """Return the account of a tenant, which uses the reservation's quota from now on."""
        now_us = self._advance(now_s)
        if reservation.tenant not in self._accounts:
            self._forget_idle()
            self._accounts[reservation.tenant] = _Account()
        self._accounts.move_to_end(reservation.tenant)
        account = self._accounts[reservation.tenant]
        if account.buckets or reservation.quota.is_limited:
            account.use(reservation.quota, now_us)
        return account

    def _add(self, account: _Account, reservation: QuotaReservation) -> None:
        account.number += 1
        account.open_numbers.append(account.number)
        for limit, bucket in account.buckets.items():
            amount = reservation.tokens if limit is _TOKENS else reservation.requests
            bucket.add(account.number, amount * UNITS)
        account.reserved += reservation.tokens
        self._open[reservation.request_id] = account.number, reservation

    def _forget_idle(self) -> None:
        """Forget some idle tenants if the ledger exceeds its maximum."""
        if len(self._accounts) < self.most_tenants:
            return
        for tenant in list(self._accounts)[:_FORGET_TRIES]:
            if self._accounts[tenant].is_idle(self._now_us):
                del self._accounts[tenant]
            else:
                self._accounts.move_to_end(tenant)


def _shortage(account: _Account, reservation: QuotaReservation) -> Shortage | None:
    """Return the shortage with the longest wait, or None."""
    longest: tuple[int, Limit] | None = None
    for limit, bucket in account.buckets.items():
        is_tokens = limit is _TOKENS
        wait_us = bucket.wait_us(reservation.tokens if is_tokens else reservation.requests)
        if wait_us is None:
            return shortage_of(reservation, limit, None)
        if wait_us > (longest[0] if longest else 0):
            longest = wait_us, limit
    return longest and shortage_of(reservation, longest[1], longest[0])
