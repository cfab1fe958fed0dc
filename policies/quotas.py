"""What tenants may use: an exact ledger of requests and tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


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
    """Tokens of a tenant since the start: `reserved == settled + released + open`, always."""

    reserved: int = 0
    settled: int = 0
    released: int = 0
    open: int = 0
