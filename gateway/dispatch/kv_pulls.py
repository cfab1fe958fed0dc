"""Transfers of KV blocks between workers, which also measure the bandwidth of the links."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from draftgate.backends.kv_transfer.format import KvFormat, format_refusal
from draftgate.backends.kv_transfer.transfer import Transfer, TransferEnd
from draftgate.gateway.fleet import FleetWorker
from draftgate.policies.kv_transfer import (
    LinkSpeed,
    PullDecision,
    PullReason,
    PullView,
    decide_pull,
)
from draftgate.policies.routing.types import PrefixPull
from draftgate.policies.values import immutable


class FetchCause(StrEnum):
    """The cause for which a worker may take KV blocks from another worker."""

    RESUMED = "resumed"
    """A prompt continues on the worker."""
    NEW = "new"
    """A new prompt goes to the worker, and another worker has cached its prefix."""
    MOVED = "moved"
    """A running prompt moves to the worker."""
    HOT = "hot"
    """The requests of a prefix take much of the capacity of all workers that have cached it."""


@immutable
class KvFetch:
    """The decision whether to fetch the KV blocks of a prefix, and the result.

    Attributes:
        source, sink: ids of the two workers.
        known_blocks: leading blocks that the destination held before.
        end: how the transfer ended, or None if the decision was to compute the prefix.
        blocks, num_bytes, chunks: what the destination stored.
        seconds: duration of the transfer.
    """

    cause: FetchCause
    source: str
    sink: str
    decision: PullDecision
    known_blocks: int
    end: TransferEnd | None = None
    blocks: int = 0
    num_bytes: int = 0
    chunks: int = 0
    seconds: float = 0.0

    def ended(
        self, end: TransferEnd, transfer: Transfer, block_bytes: int, seconds: float
    ) -> KvFetch:
        """Return the fetch after its transfer."""
        blocks, chunks = transfer.blocks, transfer.chunks
        num_bytes = blocks * block_bytes
        return replace(
            self, end=end, blocks=blocks, num_bytes=num_bytes, chunks=chunks, seconds=seconds
        )


@dataclass(slots=True)
class _Pull:
    """A transfer that is under way.

    Attributes:
        blocks: number of leading blocks that the destination will hold.
        last: hash of the last of them.
    """

    blocks: int
    last: bytes
    num_bytes: int
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class KvPulls:
    """Runs transfers, and knows the bandwidth of links and the queues of destinations.

    Attributes:
        now_s: its clock, in seconds.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        """Start without measurements.

        Args:
            now_s: clock in seconds.
        """
        self.now_s = now_s
        # By source, destination, and whether one of them serves requests.
        self._links: dict[tuple[str, str, bool], LinkSpeed] = {}
        self._under_way: dict[str, list[_Pull]] = {}  # by destination

    def view(
        self, source: FleetWorker, sink: FleetWorker, form: KvFormat, known: int, most: int
    ) -> PullView:
        """Return the policy's view of the blocks that a source holds and a destination lacks.

        Args:
            known: number of leading blocks that the destination holds.
            most: number of leading blocks that the source holds.
        """
        return PullView(
            (most - known) * form.block_tokens,
            known * form.block_tokens,
            (most - known) * form.block_bytes,
            sum([pull.num_bytes for pull in self._under_way.get(sink.worker_id, ())]),
            self._links.get(_link(source, sink), LinkSpeed()).at(self.now_s()),
            sink.backend.load(),
        )

    @property
    def measured(self) -> bool:
        """Whether a transfer has measured a link."""
        return bool(self._links)

    def bytes_per_s(self, source: FleetWorker, sink: FleetWorker) -> float:
        """Return the expected bandwidth between two workers, one of which serves requests."""
        link = self._links.get((source.worker_id, sink.worker_id, True), LinkSpeed())
        return link.at(self.now_s())

    def offer(
        self, source: FleetWorker, sink: FleetWorker, known: int, most: int
    ) -> PrefixPull | None:
        """Return the pull that a routing policy may count on, if it is faster than computing.

        The bandwidth must be known from a recent transfer.

        Args:
            known: number of leading blocks that the destination probably holds.
            most: number of leading blocks that the source probably holds.
        """
        speed, form = self._links.get(_link(source, sink)), sink.kv_format
        if speed is None or not speed.is_known(self.now_s()):
            return None
        if form is None or not can_supply(source, sink):
            return None
        view = self.view(source, sink, form, known, most)
        decision = decide_pull(view)
        if not decision.pulls:
            return None
        return PrefixPull(view.tokens, decision.pull_s, decision.compute_s)

    def arriving(self, sink: FleetWorker, hashes: Sequence[bytes]) -> asyncio.Event | None:
        """Return the event at the end of a transfer of a prefix of a chain to a worker, if any."""
        for pull in self._under_way.get(sink.worker_id, ()):
            if pull.blocks <= len(hashes) and hashes[pull.blocks - 1] == pull.last:
                return pull.ended
        return None

    async def run(
        self,
        fetch: KvFetch,
        source: FleetWorker,
        sink: FleetWorker,
        form: KvFormat,
        hashes: Sequence[bytes],
    ) -> KvFetch:
        """Pull blocks, for at most the time in which the destination would have computed them.

        The blocks of a move have no such limit.

        Args:
            fetch: the decision to pull.
            hashes: chain of the blocks that the destination will hold.

        Returns:
            The fetch with its result.
        """
        link, known = _link(source, sink), fetch.known_blocks
        num_bytes = (len(hashes) - known) * form.block_bytes
        if not num_bytes:
            return fetch
        most_s = None if fetch.decision.reason is PullReason.MOVE else fetch.decision.compute_s
        pull = _Pull(len(hashes), hashes[-1], num_bytes)
        under_way = self._under_way.setdefault(sink.worker_id, [])
        under_way.append(pull)
        transfer = Transfer(source.kv, sink.kv, hashes, known, urgent=source.leaving)
        begun_s = self.now_s()
        try:
            end = await transfer.run(most_s)
        finally:
            pull.ended.set()
            under_way.remove(pull)
        seconds = self.now_s() - begun_s
        # A late transfer without a block was slower than one block in this time.
        moved = max(transfer.blocks, int(end is TransferEnd.LATE))
        if moved and seconds > 0.0:
            speed = self._links.get(link, LinkSpeed())
            self._links[link] = speed.measured(moved * form.block_bytes, seconds, self.now_s())
        return fetch.ended(end, transfer, form.block_bytes, seconds)


def can_supply(source: FleetWorker, sink: FleetWorker) -> bool:
    """Return whether a worker may pull blocks from another worker."""
    return source is not sink and format_refusal(source.kv_format, sink.kv_format) is None


def _link(source: FleetWorker, sink: FleetWorker) -> tuple[str, str, bool]:
    busy = source.backend.load().running > 0 or sink.backend.load().running > 0
    return source.worker_id, sink.worker_id, busy
