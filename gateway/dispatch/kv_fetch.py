"""Fetching of the KV blocks of a resumed prompt from a worker that still holds them.

A prompt that resumes on another worker would be computed there again. Its old worker may still
live, and other workers may hold a part of its prefix. The new worker then pulls the blocks before
it gets the request, if this is predicted to be faster. The request itself stays the same. It finds
the blocks in the prefix cache, and the worker computes whatever is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Final

from draftgate.backends.core.prefix_cache import extend_chain
from draftgate.backends.errors import BackendFailed
from draftgate.backends.kv_transfer.format import KvFormat, refusal
from draftgate.backends.kv_transfer.transfer import Transfer
from draftgate.backends.types import GenerationRequest
from draftgate.gateway.dispatch.placement import Placement
from draftgate.gateway.dispatch.run import KvFetch, Run
from draftgate.gateway.fleet import Fleet, FleetWorker
from draftgate.gateway.offload import offload
from draftgate.gateway.telemetry.span_attributes import describe_kv_fetch
from draftgate.policies.kv_transfer import (
    LinkSpeed,
    PullDecision,
    PullReason,
    PullView,
    decide_pull,
)

ASK_S: Final = 0.25
"""Time in seconds to wait for the answers of workers that may hold a prefix. A worker answers after
a few of its steps. (Chosen, not tuned, 2026-11-23.)"""

_MOVE: Final = PullDecision(PullReason.MOVE)


class KvFetcher:
    """Fetches the prefixes of resumed prompts, and measures the links between workers."""

    def __init__(self, fleet: Fleet, now_s: Callable[[], float]) -> None:
        """Fetch from the workers of a fleet.

        Args:
            now_s: clock in seconds.
        """
        self._fleet = fleet
        self._now_s = now_s
        # By source, destination, and whether one of them serves requests.
        self._links: dict[tuple[str, str, bool], LinkSpeed] = {}
        self._queued_bytes: dict[str, int] = {}  # of transfers under way, by destination

    async def fetch(self, run: Run, placed: Placement) -> None:
        """Pull the prefixes of a placed request, as far as this is predicted to save time."""
        sink, form = placed.worker, placed.worker.kv_format
        sources = [one for one in self._fleet.open if can_supply(one, sink)]
        if form is None or not sources:
            return
        for hashes in await offload(_chains, placed.request, form.block_tokens):
            with run.span.child("kv.transfer") as span:
                fetched = await self._fetch_prefix(hashes, sources, sink, form)
                describe_kv_fetch(span, fetched)
            run.watch.fetched(fetched)

    async def copy(
        self, run: Run, request: GenerationRequest, source: FleetWorker, sink: FleetWorker
    ) -> list[KvFetch]:
        """Pull the prefixes of a request that runs on the source, one for each choice.

        The workers exchange blocks. The request may have grown during an earlier copy, whose blocks
        the destination holds.

        Raises:
            BackendFailed: the destination failed.
        """
        form, fetches = sink.kv_format, list[KvFetch]()
        assert form is not None
        for hashes in await offload(_chains, request, form.block_tokens):
            with run.span.child("kv.transfer") as span:
                known = await sink.kv.begin_import(hashes)
                fetched = KvFetch(source.worker_id, sink.worker_id, _MOVE, known)
                fetched = await self._pull(source, sink, hashes, fetched)
                describe_kv_fetch(span, fetched)
            run.watch.fetched(fetched)
            fetches.append(fetched)
        return fetches

    def bytes_per_s(self, source: FleetWorker, sink: FleetWorker) -> float:
        """Return the expected bandwidth between two workers, one of which serves requests."""
        link = self._links.get((source.worker_id, sink.worker_id, True), LinkSpeed())
        return link.at(self._now_s())

    async def _fetch_prefix(
        self, hashes: Sequence[bytes], sources: list[FleetWorker], sink: FleetWorker, form: KvFormat
    ) -> KvFetch:
        """Pull a prefix from the worker that holds most of it."""
        known, *held = await asyncio.gather(
            _answer(sink.kv.begin_import(hashes)),
            *(_answer(one.kv.held_blocks(hashes)) for one in sources),
        )
        most, source = max(zip(held, sources, strict=True), key=lambda pair: pair[0])
        busy = source.backend.load().running > 0 or sink.backend.load().running > 0
        place = source.worker_id, sink.worker_id, busy
        num_bytes = (most - known) * form.block_bytes
        view = PullView(
            (most - known) * form.block_tokens,
            known * form.block_tokens,
            num_bytes,
            self._queued_bytes.get(sink.worker_id, 0),
            self._links.get(place, LinkSpeed()).at(self._now_s()),
            sink.backend.load(),
        )
        decision = decide_pull(view)
        fetched = KvFetch(source.worker_id, sink.worker_id, decision, known)
        if not decision.pulls:
            return fetched
        return await self._pull(source, sink, hashes[:most], fetched, decision.compute_s)

    async def _pull(
        self,
        source: FleetWorker,
        sink: FleetWorker,
        hashes: Sequence[bytes],
        fetch: KvFetch,
        most_s: float | None = None,
    ) -> KvFetch:
        """Pull the rest of a chain, whose beginning the destination holds.

        Args:
            most_s: time after which the transfer ends, in seconds, or None for no limit.
        """
        form = sink.kv_format
        assert form is not None
        num_bytes = (len(hashes) - fetch.known_blocks) * form.block_bytes
        if not num_bytes:
            return fetch
        busy = source.backend.load().running > 0 or sink.backend.load().running > 0
        place = source.worker_id, sink.worker_id, busy
        transfer = Transfer(source.kv, sink.kv, hashes, fetch.known_blocks)
        begun_s = self._now_s()
        self._add_queued(sink, num_bytes)
        try:
            end = await transfer.run(most_s)
        finally:
            self._add_queued(sink, -num_bytes)
        seconds = self._now_s() - begun_s
        if transfer.blocks and seconds > 0.0:
            link, moved = self._links.get(place, LinkSpeed()), transfer.blocks * form.block_bytes
            self._links[place] = link.measured(moved, seconds, self._now_s())
        return fetch.ended(end, transfer, form.block_bytes, seconds)

    def _add_queued(self, sink: FleetWorker, num_bytes: int) -> None:
        left = self._queued_bytes.get(sink.worker_id, 0) + num_bytes
        self._queued_bytes[sink.worker_id] = left
        if not left:
            del self._queued_bytes[sink.worker_id]


def can_supply(source: FleetWorker, sink: FleetWorker) -> bool:
    """Return whether a worker can pull blocks from another worker."""
    return source is not sink and refusal(source.kv_format, sink.kv_format) is None


async def _answer(blocks: Coroutine[None, None, int]) -> int:
    """Return how many blocks a worker holds, or 0 without an answer in time."""
    try:
        async with asyncio.timeout(ASK_S):
            return await blocks
    except (BackendFailed, TimeoutError):
        return 0


def _chains(request: GenerationRequest, block_tokens: int) -> list[list[bytes]]:
    """Return the hash chain of each choice, without the last token, which is always computed."""
    found = []
    for choice in request.choices:
        hashes = list(request.block_hashes)
        tokens = [*request.prompt_ids, *choice.output_ids]
        extend_chain(hashes, request.tenant, tokens[:-1], block_tokens)
        found.append(hashes[: (len(tokens) - 1) // block_tokens])
    return found
