"""Quotas of tenants: an exact ledger of requests and tokens.

A request reserves the maximum number of tokens that it may use. It settles the tokens that it used,
and the rest is released for immediate use. All counts are integers. For each tenant and at any
time,

    reserved == settled + released + open.

Limits are leaky buckets as meters (the generic cell rate algorithm: ATM Forum, Traffic Management
4.0, 1996). Unlike windows, buckets have no edges at which twice the limit would fit or a refund
would be lost. The state of a bucket is one time, the theoretical arrival time. The part after `now`
is in use, and drains at the quota's rate. The unit is 1 / rate nanoseconds, which keeps arithmetic
exact. A minute is rate x 60e9 units, and one request or token is 60e9 units.

Released units leave the bucket as if they had never been reserved. A reservation of n at t changes
the time F to max(F, t) + n. So F is the latest of t_i + n_i + n_(i+1) + ... over all reservations
i. If the j-th reservation releases m, F becomes

    max(F - m, F_j), where F_j is the F of only the reservations after the j-th.

The ledger keeps F_j for each open reservation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

MINUTE_NS: Final = 60_000_000_000

RETRY_GRACE_NS: Final = 1_000_000
"""Nanoseconds added to the time until a request fits, so that it still fits if clocks are floats.
"""

MOST_TENANTS: Final = 4096
"""Maximum number of tenants, a few megabytes. Beyond it, the least recently used tenants are
forgotten if they have no open reservations and their buckets are empty. A new tenant starts in
that state, so no information is lost."""

_FORGET_TRIES: Final = 8
"""Number of old tenants to check for each new tenant. It exceeds 1 so that the total falls."""


class Limit(StrEnum):
    """The unit that a quota limits."""

    REQUESTS = "requests"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
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
        for limit, rate, burst in self._limits():
            if any(number is not None and number < 1 for number in (rate, burst)):
                raise ValueError(f"a quota of {limit} must be 1 or more")
            if rate is None and burst is not None:
                raise ValueError(f"a burst of {limit} needs {limit}_per_minute")

    def buckets(self) -> dict[Limit, _Bucket]:
        """Return an empty bucket for each limit."""
        limits = self._limits()
        return {limit: _Bucket(rate, burst or rate) for limit, rate, burst in limits if rate}

    def _limits(self) -> tuple[tuple[Limit, int | None, int | None], ...]:
        return (
            (Limit.REQUESTS, self.requests_per_minute, self.burst_requests),
            (Limit.TOKENS, self.tokens_per_minute, self.burst_tokens),
        )


UNLIMITED: Final = Quota()
"""No limits. The ledger still records the usage."""


@dataclass(frozen=True, slots=True)
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


class Totals(NamedTuple):
    """Token counts of a tenant, with `reserved == settled + released + open`."""

    reserved: int = 0
    settled: int = 0
    released: int = 0
    open: int = 0


@dataclass(slots=True)
class _Bucket:
    """The leaky bucket of one quota.

    Attributes:
        rate: units per minute.
        most: size in units.
        full_at: time when the whole bucket is free again, in 1 / rate nanoseconds.
        behind: for each open reservation, the `full_at` of only the later reservations.
    """

    rate: int
    most: int
    full_at: int = 0
    behind: dict[str, int] = field(default_factory=dict)

    def change(self, rate: int, most: int, now_ns: int) -> None:
        """Change rate and size. The units in use stay in use, and drain at the new rate."""
        shift = now_ns * (rate - self.rate)
        self.rate, self.most = rate, most
        self.full_at += shift
        self.behind = {request_id: full_at + shift for request_id, full_at in self.behind.items()}

    def wait_ns(self, units: int, now_ns: int) -> int | None:
        """Return the nanoseconds until the units fit, or None if they never fit."""
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
        """Close a reservation and release some of its units."""
        if request_id not in self.behind:
            return  # the limit is younger than the reservation
        released, behind = units * MINUTE_NS, self.behind[request_id]
        for earlier, full_at in self.behind.items():
            if earlier == request_id:
                break
            self.behind[earlier] = max(full_at - released, behind)
        self.full_at = max(self.full_at - released, behind)
        del self.behind[request_id]


@dataclass(slots=True)
class _Account:
    buckets: dict[Limit, _Bucket]
    totals: Totals = field(default_factory=Totals)
    open_requests: int = 0

    def is_idle(self, now_ns: int) -> bool:
        """Return whether no reservation is open and all buckets are empty."""
        buckets = self.buckets.values()
        return not self.open_requests and all(b.full_at <= now_ns * b.rate for b in buckets)


@dataclass(slots=True)
class QuotaLedger:
    """The tokens and requests that tenants have reserved, used and released.

    The ledger treats time that decreases as unchanged time.

    Attributes:
        quotas: quotas by tenant name.
        default: quota of all other tenants.
    """

    quotas: Mapping[str, Quota] = field(default_factory=dict)
    default: Quota = UNLIMITED
    most_tenants: int = MOST_TENANTS
    _accounts: OrderedDict[str, _Account] = field(default_factory=OrderedDict)
    _open: dict[str, tuple[str, int]] = field(default_factory=dict)  # request -> (tenant, tokens)
    _now_ns: int = 0

    def reserve(self, tenant: str, request_id: str, tokens: int, now_s: float) -> Shortage | None:
        """Reserve a request and its maximum number of tokens, or reserve nothing.

        Returns:
            None if the request fits, otherwise the shortage with the longest wait.

        Raises:
            ValueError: the request has reserved already, or tokens are negative.
        """
        if request_id in self._open:
            raise ValueError(f"{request_id} has reserved already")
        if tokens < 0:
            raise ValueError(f"cannot reserve {tokens} tokens")
        self._now_ns = max(self._now_ns, round(now_s * 1e9))
        account = self._account_of(tenant)
        units = {Limit.REQUESTS: 1, Limit.TOKENS: tokens}
        shortage = self._shortage(account, units)
        if shortage is not None:
            return shortage
        for limit, bucket in account.buckets.items():
            bucket.add(units[limit], self._now_ns)
            bucket.behind[request_id] = 0
        reserved, settled, released, open_ = account.totals
        account.totals = Totals(reserved + tokens, settled, released, open_ + tokens)
        account.open_requests += 1
        self._open[request_id] = tenant, tokens
        return None

    def settle(self, request_id: str, used_tokens: int) -> None:
        """Record the usage of a request and release the rest. Further calls have no effect.

        Tokens beyond the reservation are reserved now and count against the quota.

        Raises:
            ValueError: tokens are negative.
        """
        if used_tokens < 0:
            raise ValueError(f"cannot have used {used_tokens} tokens")
        self._close(request_id, used_tokens, released_requests=0)

    def release(self, request_id: str) -> None:
        """Undo a reservation, so that the quota of requests ignores the request, too."""
        self._close(request_id, 0, released_requests=1)

    def change_quotas(self, quotas: Mapping[str, Quota], now_s: float) -> None:
        """Replace all quotas.

        What a tenant has used of a limit counts against its new limit. A new limit ignores what the
        tenant has used before.
        """
        self._now_ns = max(self._now_ns, round(now_s * 1e9))
        self.quotas = quotas
        for tenant, account in self._accounts.items():
            buckets = quotas.get(tenant, self.default).buckets()
            for limit, old in account.buckets.items():
                if limit in buckets:
                    old.change(buckets[limit].rate, buckets[limit].most, self._now_ns)
                    buckets[limit] = old
            account.buckets = buckets

    def totals(self, tenant: str) -> Totals:
        """Return the totals of a tenant, which are zero for an unknown tenant."""
        account = self._accounts.get(tenant)
        return Totals() if account is None else account.totals

    def _close(self, request_id: str, used: int, released_requests: int) -> None:
        if request_id not in self._open:
            return
        tenant, tokens = self._open.pop(request_id)
        account = self._accounts[tenant]
        excess = max(used - tokens, 0)
        unused = tokens + excess - used
        reserved, settled, released, open_ = account.totals
        account.totals = Totals(
            reserved + excess, settled + used, released + unused, open_ - tokens
        )
        account.open_requests -= 1
        units = {Limit.REQUESTS: released_requests, Limit.TOKENS: unused}
        for limit, bucket in account.buckets.items():
            bucket.close(request_id, units[limit])
            if excess and limit is Limit.TOKENS:
                bucket.add(excess, self._now_ns)

    def _shortage(self, account: _Account, units: Mapping[Limit, int]) -> Shortage | None:
        """Return the shortage with the longest wait, or None."""
        longest: tuple[int, Shortage] | None = None
        for limit, bucket in account.buckets.items():
            requested = units[limit]
            wait_ns = bucket.wait_ns(requested, self._now_ns)
            if wait_ns is None:
                return Shortage(limit, None, requested, bucket.most)
            if wait_ns > (longest[0] if longest else 0):
                retry_after_s = (wait_ns + RETRY_GRACE_NS) / 1e9
                longest = wait_ns, Shortage(limit, retry_after_s, requested, bucket.most)
        return longest and longest[1]

    def _account_of(self, tenant: str) -> _Account:
        if tenant not in self._accounts:
            self._forget_idle()
            self._accounts[tenant] = _Account(self.quotas.get(tenant, self.default).buckets())
        self._accounts.move_to_end(tenant)
        return self._accounts[tenant]

    def _forget_idle(self) -> None:
        """Forget some idle tenants if the ledger exceeds its maximum."""
        if len(self._accounts) < self.most_tenants:
            return
        for tenant in list(self._accounts)[:_FORGET_TRIES]:
            if self._accounts[tenant].is_idle(self._now_ns):
                del self._accounts[tenant]
            else:
                self._accounts.move_to_end(tenant)
