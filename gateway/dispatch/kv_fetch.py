"""Fetching the KV blocks of a prompt from another worker instead of computing them again.

A prompt that resumes on another worker can use the blocks of its old worker, if that one still
runs, or of a worker that has a part of its prefix cached. A new prompt can use the prefix cache of
another worker, for example one that is full. The worker pulls the blocks before it gets the
request, if this is predicted to be faster than computing them. The request itself stays the same.
It finds the blocks in the prefix cache, and the worker computes whatever is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Final

from draftgate.backends.core.prefix_cache import extend_chain
from draftgate.backends.errors import BackendFailed
from draftgate.backends.kv_transfer.format import KvFormat
from draftgate.backends.types import GenerationRequest
from draftgate.gateway.dispatch.kv_pulls import FetchCause, KvFetch, KvPulls, can_supply
from draftgate.gateway.dispatch.run import Run
from draftgate.gateway.dispatch.span_attributes import describe_kv_fetch
from draftgate.gateway.fleet import Fleet, FleetWorker
from draftgate.gateway.offload import offload
from draftgate.policies.kv_transfer import PullDecision, PullReason, decide_pull

ASK_S: Final = 0.25
"""Time in seconds to wait for the answers of workers that may hold a prefix. A worker answers after
a few of its steps. (Chosen, not tuned, 2026-11-23.)"""

_MOVE: Final = PullDecision(PullReason.MOVE)


class KvFetcher:
    """Fetches the prefixes of prompts before they are sent.

    Attributes:
        pulls: runs the transfers.
    """

    def __init__(self, fleet: Fleet, pulls: KvPulls) -> None:
        self._fleet = fleet
        self.pulls = pulls

    async def fetch_resumed(self, run: Run, request: GenerationRequest, sink: FleetWorker) -> None:
        """Pull the prefixes of a resumed request, as far as this is predicted to save time."""
        form, sources = sink.kv_format, self._sources(sink)
        if form is None or not sources:
            return
        for hashes in await offload(block_chains, request, form.block_tokens):
            await reported(run, self._fetch_prefix(hashes, sources, sink, form))

    async def fetch_new(
        self,
        run: Run,
        request: GenerationRequest,
        sink: FleetWorker,
        cached_blocks: Mapping[str, int],
    ) -> None:
        """Pull the prefix of a new request if another worker probably holds more of it.

        No worker is asked unless a pull is predicted to be faster than computing the prefix.

        Args:
            cached_blocks: leading blocks that workers probably held before the request was placed,
                by worker id, without workers that hold none.
        """
        hashes = request.block_hashes
        arriving = self.pulls.arriving(sink, hashes)
        if arriving is not None:
            await arriving.wait()  # for at most the time to compute its blocks
            return
        known = cached_blocks.get(sink.worker_id, 0)
        if known >= max(cached_blocks.values()):
            return
        form = sink.kv_format
        if form is None:
            return
        usable = (len(request.prompt_ids) - 1) // form.block_tokens
        source, most = None, min(known, usable)
        for one in self._sources(sink):
            blocks = min(cached_blocks.get(one.worker_id, 0), usable)
            if blocks > most:
                source, most = one, blocks
        if source is None:
            return
        await reported(run, self._fetch_cached(hashes[:most], source, sink, form, known))

    def _sources(self, sink: FleetWorker) -> list[FleetWorker]:
        """Return the workers from which a worker may pull blocks, also those that are leaving."""
        workers = self._fleet.workers
        return [one for one in workers if one.supplies_blocks and can_supply(one, sink)]

    async def copy(
        self, run: Run, request: GenerationRequest, source: FleetWorker, sink: FleetWorker
    ) -> list[KvFetch]:
        """Pull the prefixes of a request that runs on the source, one for each choice.

        The workers exchange blocks. The request may have grown during an earlier copy, whose blocks
        the destination holds.

        Raises:
            BackendFailed: the destination failed.
        """
        form = sink.kv_format
        assert form is not None
        chains = await offload(block_chains, request, form.block_tokens)
        return [await self.copy_prefix(run, hashes, source, sink) for hashes in chains]

    async def copy_prefix(
        self, run: Run, hashes: Sequence[bytes], source: FleetWorker, sink: FleetWorker
    ) -> KvFetch:
        """Pull a prefix without a decision, because the request moves anyway.

        Raises:
            BackendFailed: the destination failed.
        """
        return await reported(run, self._copy_prefix(hashes, source, sink))

    async def _copy_prefix(
        self, hashes: Sequence[bytes], source: FleetWorker, sink: FleetWorker
    ) -> KvFetch:
        form, known = sink.kv_format, await sink.kv.begin_import(hashes)
        assert form is not None
        fetch = KvFetch(FetchCause.MOVED, source.worker_id, sink.worker_id, _MOVE, known)
        return await self.pulls.run(fetch, source, sink, form, hashes)

    async def _fetch_cached(
        self,
        hashes: Sequence[bytes],
        source: FleetWorker,
        sink: FleetWorker,
        form: KvFormat,
        known: int,
    ) -> KvFetch:
        """Pull a prefix from the worker that probably holds it.

        The source is not asked first. The transfer ends at the first block that it does not hold.
        """
        decision = decide_pull(self.pulls.view(source, sink, form, known, len(hashes)))
        if not decision.pulls:
            return KvFetch(FetchCause.NEW, source.worker_id, sink.worker_id, decision, known)
        return await pull_if_faster(self.pulls, FetchCause.NEW, hashes, source, sink, form)

    async def _fetch_prefix(
        self, hashes: Sequence[bytes], sources: list[FleetWorker], sink: FleetWorker, form: KvFormat
    ) -> KvFetch:
        """Pull a prefix from the worker that holds most of it."""
        known, *held = await asyncio.gather(
            blocks_held(sink.kv.begin_import(hashes)),
            *(blocks_held(one.kv.held_blocks(hashes)) for one in sources),
        )
        most, source = max(zip(held, sources, strict=True), key=lambda pair: pair[0])
        cause = FetchCause.RESUMED
        return await pull_if_faster(self.pulls, cause, hashes[:most], source, sink, form, known)


async def reported(run: Run, fetching: Coroutine[None, None, KvFetch]) -> KvFetch:
    """Await a fetch for a request, and describe it in the request's trace and metrics."""
    with run.span.child("kv.transfer") as span:
        fetch = await fetching
        describe_kv_fetch(span, fetch)
    run.watch(fetch)
    return fetch


async def pull_if_faster(
    pulls: KvPulls,
    cause: FetchCause,
    hashes: Sequence[bytes],
    source: FleetWorker,
    sink: FleetWorker,
    form: KvFormat,
    known: int | None = None,
) -> KvFetch:
    """Pull the blocks of a chain that the destination lacks, unless computing them is faster.

    Args:
        known: leading blocks that the destination holds for the import, or None to ask it.
    """
    if known is None:
        known = await blocks_held(sink.kv.begin_import(hashes))
    decision = decide_pull(pulls.view(source, sink, form, known, len(hashes)))
    fetch = KvFetch(cause, source.worker_id, sink.worker_id, decision, known)
    return await pulls.run(fetch, source, sink, form, hashes) if decision.pulls else fetch


async def blocks_held(blocks: Coroutine[None, None, int]) -> int:
    """Return how many blocks a worker holds, or 0 without an answer in time."""
    try:
        async with asyncio.timeout(ASK_S):
            return await blocks
    except (BackendFailed, TimeoutError):
        return 0


def block_chains(request: GenerationRequest, block_tokens: int) -> list[list[bytes]]:
    """Return the hash chain of each choice, without the last token, which is always computed."""
    found = []
    for choice in request.choices:
        hashes = list(request.block_hashes)
        tokens = [*request.prompt_ids, *choice.output_ids]
        extend_chain(hashes, request.cache_owner, tokens[:-1], block_tokens)
        found.append(hashes[: (len(tokens) - 1) // block_tokens])
    return found
