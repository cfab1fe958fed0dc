"""The time that drafts saved the requests of the last minutes, by tenant."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias

import msgspec

from draftgate.gateway.dispatch.decisions import Decision

PERIOD_S: Final = 300.0
"""Time in seconds for which an ended choice counts."""

BUCKET_S: Final = 5.0
"""Seconds whose choices are summed, and dropped at the same time."""

DraftSums: TypeAlias = dict[str, tuple[float, float, int]]
"""By tenant: the sums of `saved_s`, `decode_s` and `drafted_tokens` of `RecentDrafts`."""


class RecentDrafts(msgspec.Struct, frozen=True):
    """What drafts brought the choices that ended in the last `period_s` seconds.

    Cancelled and failed choices do not count, because their workers report no saved time. If a
    choice lost its worker or moved, only its time on the last worker counts.

    Attributes:
        period_s: length of the period.
        tenant: the tenant whose choices count, or None for the choices of all tenants.
        drafted_tokens: number of verified draft tokens.
        saved_s: seconds that drafts saved, summed over the choices, or a negative number if they
            cost time.
        decode_s: seconds from the first to the last token, summed over the choices.
        saved_share: `saved_s / (decode_s + saved_s)`, the saved share of the time that decoding
            would have taken without drafts, or None without choices. If it is -0.1, drafts made
            decoding 10% slower.
    """

    period_s: float
    tenant: str | None
    drafted_tokens: int
    saved_s: float
    decode_s: float
    saved_share: float | None


class DecisionList(msgspec.Struct):
    """The response of `/decisions`.

    Attributes:
        decisions: the latest decisions, newest first.
        drafts: what drafts brought the requests that ended in the last minutes.
    """

    decisions: list[Decision]
    drafts: RecentDrafts


def recent_drafts(processes: Iterable[DraftSums], tenant: str | None) -> RecentDrafts:
    """Return what drafts brought a tenant, or all tenants if it is None.

    Args:
        processes: the sums of each process of a node for each model.
    """
    found = [
        sums for process in processes for name, sums in process.items() if tenant in {None, name}
    ]
    saved_s, decode_s = sum(one[0] for one in found), sum(one[1] for one in found)
    plain_s = decode_s + saved_s
    share = saved_s / plain_s if plain_s > 0.0 else None
    return RecentDrafts(PERIOD_S, tenant, sum(one[2] for one in found), saved_s, decode_s, share)


class DraftTimes:
    """The sums of one process for one model, in memory that is bounded for a number of tenants."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without choices.

        Args:
            clock: a clock that returns seconds from any origin.
        """
        self._clock = clock
        self._buckets: deque[tuple[float, DraftSums]] = deque()  # with the begin of each

    def add(self, tenant: str, saved_s: float, decode_s: float, drafted_tokens: int) -> None:
        """Add choices that end now."""
        now_s = self._clock()
        if not self._buckets or now_s >= self._buckets[-1][0] + BUCKET_S:
            self._buckets.append((now_s, {}))
            self._drop_old()
        _add(self._buckets[-1][1], {tenant: (saved_s, decode_s, drafted_tokens)})

    def sums(self) -> DraftSums:
        """Return the sums over the choices of the last `PERIOD_S` seconds."""
        self._drop_old()
        found: DraftSums = {}
        for _, bucket in self._buckets:
            _add(found, bucket)
        return found

    def _drop_old(self) -> None:
        oldest_s = self._clock() - PERIOD_S
        while self._buckets and self._buckets[0][0] < oldest_s:
            self._buckets.popleft()


def _add(sums: DraftSums, further: Mapping[str, tuple[float, float, int]]) -> None:
    for tenant, (saved_s, decode_s, drafted) in further.items():
        before = sums.get(tenant, (0.0, 0.0, 0))
        sums[tenant] = before[0] + saved_s, before[1] + decode_s, before[2] + drafted
