"""The decision to copy a hot prefix to another worker before the workers that hold it are full.

A prefix is hot while its requests take half of the sequence capacity of every worker that holds it,
and at least two sequences. It is then copied to one more worker. The router sends requests to that
worker too, so the prefix is copied again only if its requests still take half of every holder.

Two rules keep the copies rare. A worker gets the same prefix again, for example after it has
evicted the copy, only when the requests of the prefix have taken at most an eighth of its holders
in the meantime. And all copies of a gateway together take a bounded bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

HOT_SHARE: Final = 0.5
"""Share of the sequences of each holder above which a prefix is copied. The copy of a long prefix
takes less time than a request, so half of the capacity is left until it is complete. (Chosen by
that reasoning, not tuned, 2026-11-23.)"""

COOL_SHARE: Final = 0.125
"""Share of the sequences of all holders at which a prefix is no longer hot: far below the share of
a prefix that was hot a moment ago and has just got a second holder, which is at least a quarter.
(Chosen by that reasoning, not tuned, 2026-11-23.)"""

BYTES_PER_S: Final = 32e6
"""Mean bandwidth of all copies of a gateway. It is 3% of the bandwidth that is expected of a link,
the share of a busy worker's time that transfers may take. (Chosen, not tuned, 2026-11-23.)"""


@dataclass(frozen=True, slots=True)
class PrefixHolder:
    """A worker that holds a prefix.

    Attributes:
        own: its sequences whose prompts have the prefix.
        sequences: maximum number of its sequences, or 0 if unknown.
    """

    own: int
    sequences: int


@dataclass(frozen=True, slots=True)
class ReplicaTarget:
    """A worker that could get a copy.

    Attributes:
        busy: its sequences.
        sequences: maximum number of its sequences, or 0 if unknown.
        free_bytes: KV memory that no sequence uses.
        pays: whether pulling the prefix takes less time than computing it (`decide_pull`).
    """

    worker_id: str
    busy: int
    sequences: int
    free_bytes: int
    pays: bool = True


@dataclass(frozen=True, slots=True)
class CopyBudget:
    """The bandwidth of copies: after a copy, the next one waits until its bytes have been earned.

    Attributes:
        next_s: earliest time of the next copy.
    """

    next_s: float = float("-inf")

    def allows(self, now_s: float) -> bool:
        """Return whether a copy may begin."""
        return now_s >= self.next_s

    def spent(self, num_bytes: int, now_s: float) -> CopyBudget:
        """Return the budget after the begin of a copy that it allows."""
        return CopyBudget(now_s + num_bytes / BYTES_PER_S)


def is_hot(holders: Sequence[PrefixHolder]) -> bool:
    """Return whether the requests of a prefix take a large share of every holder."""
    return all(is_filled(holder.own, holder.sequences) for holder in holders)


def is_filled(own: int, sequences: int) -> bool:
    """Return whether the requests of a prefix take a large share of one holder (`PrefixHolder`)."""
    return own > 1 and own >= HOT_SHARE * sequences > 0


def is_cool(holders: Sequence[PrefixHolder]) -> bool:
    """Return whether the requests of a prefix take a small share of its holders together."""
    own = sum(holder.own for holder in holders)
    return own <= COOL_SHARE * sum(holder.sequences for holder in holders)


def choose_target(targets: Sequence[ReplicaTarget], num_bytes: int) -> str | None:
    """Return the worker that gets a copy, or None if no worker has room for it.

    A worker that is itself half full would soon be as busy as the holders. A copy that takes more
    than half of the free memory would displace other prefixes.
    """
    usable = [
        target
        for target in targets
        if target.pays
        and target.busy < HOT_SHARE * target.sequences
        and 2 * num_bytes <= target.free_bytes
    ]
    if not usable:
        return None
    return min(
        usable, key=lambda target: (target.busy / target.sequences, target.worker_id)
    ).worker_id
