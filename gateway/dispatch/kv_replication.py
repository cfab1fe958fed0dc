"""Copies of hot prefixes, which the gateway makes before the workers that hold them are full."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from draftgate.backends.kv_transfer.format import KvFormat
from draftgate.backends.types import GenerationRequest
from draftgate.gateway.dispatch.kv_fetch import pull_if_faster, reported
from draftgate.gateway.dispatch.kv_pulls import FetchCause, KvFetch, can_supply
from draftgate.gateway.dispatch.routing import Router
from draftgate.gateway.dispatch.run import Run
from draftgate.gateway.fleet import Fleet, FleetWorker
from draftgate.policies.kv_transfer import decide_pull
from draftgate.policies.replication import (
    CopyBudget,
    PrefixHolder,
    ReplicaTarget,
    choose_target,
    is_cool,
    is_filled,
    is_hot,
)


class PrefixUse(NamedTuple):
    """A running request with a prefix that workers had cached.

    Attributes:
        prefix: hash of the last block of the prefix.
        sequences: number of choices.
    """

    prefix: bytes
    worker: FleetWorker
    sequences: int


@dataclass(slots=True)
class _Prefix:
    """A prefix of running requests.

    Attributes:
        own: running sequences, by worker id.
        copied: ids of the workers that got a copy since the prefix was last cool.
    """

    own: dict[str, int] = field(default_factory=dict)
    copied: set[str] = field(default_factory=set)


class Replicator:
    """Counts the running requests of each prefix, and copies hot prefixes to other workers."""

    def __init__(self, fleet: Fleet, router: Router, now_s: Callable[[], float]) -> None:
        """Copy between the workers of a fleet.

        Args:
            router: chooses the workers of requests, and learns about copies.
            now_s: clock in seconds.
        """
        self._fleet = fleet
        self._history = router.history
        self._pulls = router.pulls
        self._now_s = now_s
        self._budget = CopyBudget()
        self._prefixes: dict[bytes, _Prefix] = {}
        self._copies = set[asyncio.Task[KvFetch]]()

    def begin(
        self,
        run: Run,
        request: GenerationRequest,
        worker: FleetWorker,
        cached_blocks: Mapping[str, int],
    ) -> PrefixUse:
        """Count a request that is sent, and copy its prefix if that is hot now.

        Args:
            cached_blocks: leading blocks that workers probably held before the request was placed,
                by worker id, without workers that hold none.
        """
        load = worker.backend.load()
        most = (len(request.prompt_ids) - 1) // load.kv_block_tokens
        most = min(most, max(cached_blocks.values()))
        use = PrefixUse(request.block_hashes[most - 1], worker, request.n)
        prefix = self._prefixes.get(use.prefix)
        if prefix is None:
            prefix = self._prefixes[use.prefix] = _Prefix()
        own = prefix.own[worker.worker_id] = prefix.own.get(worker.worker_id, 0) + use.sequences
        if is_filled(own, load.max_sequences):  # usually it is not
            blocks = {**cached_blocks, worker.worker_id: most}
            self._copy(run, prefix, request.block_hashes[:most], blocks, request.adapter)
        return use

    def end(self, use: PrefixUse) -> None:
        """Stop counting a request."""
        prefix = self._prefixes[use.prefix]
        prefix.own[use.worker.worker_id] -= use.sequences
        if not any(prefix.own.values()):
            del self._prefixes[use.prefix]
        elif prefix.copied:
            using = [one for one in self._fleet.workers if one.worker_id in prefix.own]
            if is_cool([_holder(prefix, one) for one in using]):
                prefix.copied.clear()

    def _copy(
        self,
        run: Run,
        prefix: _Prefix,
        hashes: Sequence[bytes],
        blocks: Mapping[str, int],
        adapter: str,
    ) -> None:
        """Start a copy of a prefix, if all of its holders are busy with it.

        Only workers with the adapter of its requests get a copy.
        """
        now_s, workers = self._now_s(), self._fleet.open
        holders = [one for one in workers if blocks.get(one.worker_id, 0) >= len(hashes)]
        hot = holders and is_hot([_holder(prefix, one) for one in holders])
        if not hot or not self._budget.allows(now_s):
            return
        source = min(holders, key=lambda one: one.backend.load().running)
        form = source.kv_format
        if form is None:
            return
        others = {
            one.worker_id: one
            for one in workers
            if one not in holders and one.worker_id not in prefix.copied
            if can_supply(source, one) and one.offers(adapter)
        }
        num_bytes = len(hashes) * form.block_bytes
        targets = [self._target(source, one, blocks, len(hashes), form) for one in others.values()]
        chosen = choose_target(targets, num_bytes)
        if chosen is None:
            return
        sink = others[chosen]
        self._budget = self._budget.spent(num_bytes, now_s)
        prefix.copied.add(chosen)
        # From now on, the router sends requests to the new holder, where they wait for the copy.
        self._history.record(chosen, hashes, sink.backend.load().kv_blocks_total)
        # The copy takes at most the time in which the destination would compute the prefix.
        pull = pull_if_faster(self._pulls, FetchCause.HOT, hashes, source, sink, form)
        copy = asyncio.create_task(reported(run, pull))
        self._copies.add(copy)
        copy.add_done_callback(self._copies.discard)

    def _target(
        self,
        source: FleetWorker,
        sink: FleetWorker,
        blocks: Mapping[str, int],
        most: int,
        form: KvFormat,
    ) -> ReplicaTarget:
        load, known = sink.backend.load(), blocks.get(sink.worker_id, 0)
        view = self._pulls.view(source, sink, form, known, most)
        return ReplicaTarget(
            sink.worker_id,
            load.running + load.waiting,
            load.max_sequences,
            load.kv_blocks_free * form.block_bytes,
            pays=decide_pull(view).pulls,
        )


def _holder(prefix: _Prefix, worker: FleetWorker) -> PrefixHolder:
    return PrefixHolder(prefix.own.get(worker.worker_id, 0), worker.backend.load().max_sequences)
