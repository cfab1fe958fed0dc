"""What tenants may use: an exact ledger of requests and tokens.

A request reserves the tokens it may use at most, and settles what it used; the rest is released and
can be used at once. In whole numbers throughout, for each tenant at any instant,

    reserved == settled + released + open.

Limits are leaky buckets as meters (ATM Forum, Traffic Management 4.0, 1996: the generic cell rate
algorithm), so there are no windows at whose edge twice as much would fit, or into which a refund
could fall. A bucket is one instant, the theoretical arrival time: what is above `now` is in use,
and drains at the quota's rate. To stay exact it is counted in units of 1 / rate nanoseconds: a
minute is rate x 60e9 of them, and one request or token is 60e9.

What is released leaves the bucket as if it had never been reserved. A reservation of n at t makes
of the instant F the instant max(F, t) + n, so F is the latest of t_i + n_i + n_(i+1) + ... over all
of them. Taking m off the j-th leaves

    max(F - m, F_j), where F_j is what F would be of the reservations behind the j-th alone,

and that is kept for each reservation that is open.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

MINUTE_NS: Final = 60_000_000_000

RETRY_GRACE_NS: Final = 1_000_000
"""Added to the time until a request fits, so that it still does where clocks are read in floats."""

MOST_TENANTS: Final = 4096
"""Tenants that are remembered, a few megabytes. Beyond it those are forgotten that were not heard
of for longest, if nothing of theirs is open and their buckets are full: as if they were new."""

_LOOKED_AT: Final = 8
"""Old tenants that are looked at when there is a new one: more than one, so that they get fewer."""


class Limit(StrEnum):
    """What a quota counts."""

    REQUESTS = "requests"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class Quota:
    """What a tenant may use.

    Attributes:
        requests_per_minute, tokens_per_minute: None is no limit.
        burst_requests, burst_tokens: most at once; None is a minute's worth.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    burst_requests: int | None = None
    burst_tokens: int | None = None

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: a limit is not positive, or a burst has no limit to go with.
        """
        for limit, rate, burst in (
            (Limit.REQUESTS, self.requests_per_minute, self.burst_requests),
            (Limit.TOKENS, self.tokens_per_minute, self.burst_tokens),
        ):
            if any(number is not None and number < 1 for number in (rate, burst)):
                raise ValueError(f"a quota of {limit} must be 1 or more")
            if rate is None and burst is not None:
                raise ValueError(f"a burst of {limit} needs {limit}_per_minute")


UNLIMITED: Final = Quota()
"""No limits; what is used is booked all the same."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a request does not fit a quota.

    Attributes:
        limit: which quota.
        retry_after_s: after which this very request fits if nothing else is used; None if it is
            larger than the quota can ever hold.
        asked, most: what it asked for, and the most that the quota can hold.
    """

    limit: Limit
    retry_after_s: float | None
    asked: int
    most: int


class Totals(NamedTuple):
    """Tokens of a tenant since it is known: `reserved == settled + released + open`, always."""

    reserved: int = 0
    settled: int = 0
    released: int = 0
    open: int = 0


@dataclass(slots=True)
class _Bucket:
    """A leaky bucket of one quota.

    Attributes:
        rate: units a minute.
        most: units that it holds.
        full_at: when all of it is free again, in 1 / rate nanoseconds.
        behind: the same of what was added behind each open reservation alone, in their order.
    """

    rate: int
    most: int
    full_at: int = 0
    behind: dict[str, int] = field(default_factory=dict)

    def wait_ns(self, units: int, now_ns: int) -> int | None:
        """Return the nanoseconds until so many units fit, 0 if they do, None if they never will."""
        if units > self.most:
            return None
        used = max(self.full_at - now_ns * self.rate, 0)
        excess = used - (self.most - units) * MINUTE_NS
        return max(-(-excess // self.rate), 0)

    def add(self, units: int, now_ns: int) -> None:
        now, added = now_ns * self.rate, units * MINUTE_NS
        self.full_at = max(self.full_at, now) + added
        self.behind = {
            request_id: max(full_at, now) + added for request_id, full_at in self.behind.items()
        }

    def close(self, request_id: str, units: int) -> None:
        """Close a reservation and release so many of its units."""
        released, behind = units * MINUTE_NS, self.behind[request_id]
        for earlier, full_at in self.behind.items():
            if earlier == request_id:
                break
            self.behind[earlier] = max(full_at - released, behind)
        self.full_at = max(self.full_at - released, behind)
        del self.behind[request_id]


@dataclass(slots=True)
class _Account:
    requests: _Bucket | None
    tokens: _Bucket | None
    reserved: int = 0
    settled: int = 0
    released: int = 0
    open_tokens: int = 0
    open_requests: int = 0

    def is_fresh(self, now_ns: int) -> bool:
        """Return whether nothing is open and no quota is in use."""
        buckets = [bucket for bucket in (self.requests, self.tokens) if bucket is not None]
        return not self.open_requests and all(b.full_at <= now_ns * b.rate for b in buckets)


def _account(quota: Quota) -> _Account:
    requests, tokens = quota.requests_per_minute, quota.tokens_per_minute
    return _Account(
        None if requests is None else _Bucket(requests, quota.burst_requests or requests),
        None if tokens is None else _Bucket(tokens, quota.burst_tokens or tokens),
    )


@dataclass(slots=True)
class Ledger:
    """Who has reserved, used and given back how much. Time never goes back; if it does, it stands.

    Attributes:
        quotas: of tenants by name.
        default: of all others.
    """

    quotas: Mapping[str, Quota] = field(default_factory=dict)
    default: Quota = UNLIMITED
    most_tenants: int = MOST_TENANTS
    _accounts: OrderedDict[str, _Account] = field(default_factory=OrderedDict)
    _open: dict[str, tuple[str, int]] = field(default_factory=dict)  # tenant, tokens; by request
    _now_ns: int = 0

    def reserve(self, tenant: str, request_id: str, tokens: int, now_s: float) -> Shortage | None:
        """Reserve a request and the most tokens it may use: all of it, or nothing.

        Returns:
            None if it fits, else the quota that it has to wait for longest.

        Raises:
            ValueError: the request has reserved already, or tokens are negative.
        """
        if request_id in self._open:
            raise ValueError(f"{request_id} has reserved already")
        if tokens < 0:
            raise ValueError(f"cannot reserve {tokens} tokens")
        self._now_ns = max(self._now_ns, round(now_s * 1e9))
        account = self._account_of(tenant)
        shortage = self._shortage(account, tokens)
        if shortage is not None:
            return shortage
        for bucket, units in ((account.requests, 1), (account.tokens, tokens)):
            if bucket is not None:
                bucket.add(units, self._now_ns)
                bucket.behind[request_id] = 0
        account.reserved += tokens
        account.open_tokens += tokens
        account.open_requests += 1
        self._open[request_id] = tenant, tokens
        return None

    def settle(self, request_id: str, used_tokens: int) -> None:
        """Book what a request used and release the rest; once, further calls change nothing.

        What it used beyond its reservation is reserved now and counts against the quota.

        Raises:
            ValueError: tokens are negative.
        """
        if used_tokens < 0:
            raise ValueError(f"cannot have used {used_tokens} tokens")
        self._close(request_id, used_tokens, released_requests=0)

    def release(self, request_id: str) -> None:
        """Take a reservation back as if it had never been made: its request counts no more."""
        self._close(request_id, 0, released_requests=1)

    def totals(self, tenant: str) -> Totals:
        """Return what became of a tenant's tokens; zeros if it is not known."""
        account = self._accounts.get(tenant)
        if account is None:
            return Totals()
        return Totals(account.reserved, account.settled, account.released, account.open_tokens)

    def _close(self, request_id: str, used: int, released_requests: int) -> None:
        """Close a reservation, if it is open."""
        if request_id not in self._open:
            return
        tenant, tokens = self._open.pop(request_id)
        account = self._accounts[tenant]
        excess = max(used - tokens, 0)
        account.reserved += excess
        account.settled += used
        account.released += tokens + excess - used
        account.open_tokens -= tokens
        account.open_requests -= 1
        if account.requests is not None:
            account.requests.close(request_id, released_requests)
        if account.tokens is not None:
            account.tokens.close(request_id, tokens + excess - used)
            if excess:
                account.tokens.add(excess, self._now_ns)

    def _shortage(self, account: _Account, tokens: int) -> Shortage | None:
        """Return the quota that a request has to wait for longest, if any."""
        worst: Shortage | None = None
        longest_ns = 0
        for limit, bucket, asked in (
            (Limit.REQUESTS, account.requests, 1),
            (Limit.TOKENS, account.tokens, tokens),
        ):
            wait_ns = 0 if bucket is None else bucket.wait_ns(asked, self._now_ns)
            if bucket is None or wait_ns == 0:
                continue
            if wait_ns is None:
                return Shortage(limit, None, asked, bucket.most)
            if wait_ns > longest_ns:
                longest_ns = wait_ns
                worst = Shortage(limit, (wait_ns + RETRY_GRACE_NS) / 1e9, asked, bucket.most)
        return worst

    def _account_of(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            self._forget()
            account = self._accounts[tenant] = _account(self.quotas.get(tenant, self.default))
        self._accounts.move_to_end(tenant)
        return account

    def _forget(self) -> None:
        """Make room for a new tenant, if there are too many and one can go unnoticed."""
        if len(self._accounts) < self.most_tenants:
            return
        for tenant in list(self._accounts)[:_LOOKED_AT]:
            if self._accounts[tenant].is_fresh(self._now_ns):
                del self._accounts[tenant]
            else:
                self._accounts.move_to_end(tenant)
