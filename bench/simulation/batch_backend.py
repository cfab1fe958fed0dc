"""A worker of another node that is simulated by `batch_model`, as its gateways see it.

All gateways of a pool share the backend. Each of them has its own `PeerWorker`, as for a real node.
As over a link, gateways see the load of the last update. Deltas are delivered with the updates too,
except for first and last tokens, which arrive after their step, with an update. A stream that moves
gets the deltas of every step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from bench.simulation.batch_model import (
    BLOCK_TOKENS,
    BatchLimits,
    BatchSequence,
    BatchWorker,
    State,
)
from draftgate.backends.core.prefix_cache import extend_chain
from draftgate.backends.kv_transfer.exchange import HOLD_S, BlockCount
from draftgate.backends.kv_transfer.format import NO_BLOCKS, KvChunk, KvFormat, chunk_of
from draftgate.backends.kv_transfer.transfer import export_chunks
from draftgate.backends.sim.assembly import EXACT
from draftgate.backends.sim.kv_link import LOCAL_LINK
from draftgate.backends.sim.profile import Profile
from draftgate.backends.streams import DeltaStreams
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import (
    NO_OUTCOME,
    Delta,
    FinishReason,
    GenerationRequest,
    ModelCard,
    Pace,
    Phases,
)
from draftgate.policies.types import WorkerLoad

UPDATE_S: Final = 0.1
"""Longest interval of updates, as between nodes."""

MOVING_S: Final = 1.0
"""Time after an operation of a move in which every step delivers its deltas."""


@dataclass(slots=True)
class _Open:
    """A request that the worker runs.

    Attributes:
        first_block: hash of its first block.
        delivered: number of its output tokens that were delivered.
    """

    request_id: str
    first_block: bytes
    delivered: int = 0


class BatchBackend:
    """A `Backend` and `KvEndpoint` with the attributes of a `PeerBackend` that gateways use.

    Attributes:
        watermark: number of the last lease that the load includes.
        on_update: callbacks after each update.
        preemptions: number of preemptions so far.
    """

    recovers = False
    failure: str | None = None
    progress = 1.0

    def __init__(self, profile: Profile, tokenizer: Tokenizer) -> None:
        """Start without requests, on the running event loop.

        Args:
            profile: the simulated device and its model.
        """
        limits = limits_of(profile)
        self.card = card_of(profile)
        self.tokenizer = tokenizer
        self.watermark = 0
        self.on_update: list[Callable[[], None]] = []
        self.preemptions = 0
        self._loop = asyncio.get_running_loop()
        self._worker = BatchWorker(limits)
        self._load, self._updated_s = self._worker.load(), self._loop.time()
        self._last_lease = 0
        self._streams = DeltaStreams(self._cancel)
        self._sequences: dict[str, BatchSequence] = {}
        self._open: dict[int, _Open] = {}  # by the key of the sequence
        self._keys = count()
        self._imported: dict[bytes, float] = {}  # ends of the holds of blocks, in order
        self._first_blocks: dict[bytes, BatchSequence] = {}  # running sequences by first block
        self._moving_until_s = 0.0
        self._step: asyncio.TimerHandle | None = None

    @property
    def load_age_s(self) -> float:
        """Seconds since the last update. An idle worker continues to report the same load."""
        age_s = self._loop.time() - self._updated_s
        return age_s if self._step is not None else age_s % UPDATE_S

    async def start(self) -> None:
        """Do nothing."""

    async def stop(self) -> None:
        """Stop the steps."""
        if self._step is not None:
            self._step.cancel()

    def load(self) -> WorkerLoad:
        """Return the load of the last update."""
        return self._load

    def check(self, request: GenerationRequest) -> None:
        """Accept every request. The load generator sends none that is too long."""

    def generate(
        self, request: GenerationRequest, lease_number: int = 0
    ) -> AsyncGenerator[Delta, None]:
        """Queue a request with one choice."""
        (choice,) = request.choices
        stream = self._streams.open(request)
        kept = len(choice.output_ids)
        hashes = self._chain(request, choice.output_ids)
        sequence = BatchSequence(
            next(self._keys),
            len(request.prompt_ids) + kept,
            request.sampling.max_tokens - kept,
            self._take_imported(hashes),
            self._loop.time(),
            request.service.priority < 0,
        )
        self._sequences[request.request_id] = sequence
        self._first_blocks[hashes[0]] = sequence
        self._open[sequence.key] = _Open(request.request_id, hashes[0])
        self._last_lease = max(self._last_lease, lease_number)
        self._cut_run()
        self._worker.add(sequence)
        self._wake()
        return stream

    def set_pace(self, request_id: str, pace: Pace, tpot_s: float = 0.0) -> None:
        """Pause a request, or resume it."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        self._note_move()
        if pace is Pace.PAUSED:
            self._deliver([sequence])
            self._worker.pause(sequence)
        else:
            self._worker.resume(sequence)
            self._wake()

    def unread_tokens(self, request_id: str) -> int:
        """Return how many delivered tokens wait for their reader."""
        return self._streams.unread_tokens(request_id)

    async def held_blocks(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks were imported."""
        return next((i for i, one in enumerate(hashes) if one not in self._imported), len(hashes))

    async def begin_import(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks were imported."""
        self._note_move()
        return await self.held_blocks(hashes)

    def pull_blocks(
        self, hashes: Sequence[bytes], *, urgent: bool = False
    ) -> AsyncGenerator[KvChunk, None]:
        """Yield the blocks of a running sequence, each after its time on the link.

        A sequence that was preempted has no blocks. Only its first blocks identify it.
        """
        del urgent
        self._note_move()
        form = self.card.kv_format
        assert form is not None
        busy_until_s = self._loop.time()
        sequence = self._first_blocks.get(hashes[0]) if hashes else None

        async def export(part: tuple[bytes, ...]) -> KvChunk:
            nonlocal busy_until_s
            if sequence is not None and sequence.state is State.WAITING:
                return NO_BLOCKS
            now_s = self._loop.time()
            sent_s = len(part) * form.block_bytes / LOCAL_LINK.bytes_per_s
            busy_until_s = max(busy_until_s, now_s) + sent_s
            await asyncio.sleep(busy_until_s + LOCAL_LINK.latency_s - now_s)
            return chunk_of(part, memoryview(b""))

        return export_chunks(export, hashes, form.block_bytes)

    async def adopt_blocks(
        self, chunk: KvChunk, parent: bytes, *, urgent: bool = False
    ) -> BlockCount:
        """Hold blocks for the request that arrives with them, as far as memory is free."""
        del parent, urgent
        now_s = self._loop.time()
        while self._imported and next(iter(self._imported.values())) <= now_s:
            del self._imported[next(iter(self._imported))]
        free = self._worker.load().kv_blocks_free - len(self._imported)
        held = chunk.hashes[: max(free, 0)]
        self._imported.update(dict.fromkeys(held, now_s + HOLD_S))
        return BlockCount(len(held))

    def _chain(self, request: GenerationRequest, output_ids: Sequence[int]) -> list[bytes]:
        """Return the hashes of the full blocks of a request, and at least that of its first block.

        Output tokens are 0, so the first block of a short prompt is known.
        """
        hashes = list(request.block_hashes)
        tokens = [*request.prompt_ids, *output_ids]
        if len(tokens) < BLOCK_TOKENS:
            tokens += [0] * (BLOCK_TOKENS - len(tokens))
        extend_chain(hashes, request.cache_owner, tokens, BLOCK_TOKENS)
        return hashes

    def _take_imported(self, hashes: Sequence[bytes]) -> int:
        """Return the imported tokens of a request, whose blocks it takes."""
        if not self._imported:
            return 0
        taken = [self._imported.pop(one, None) for one in hashes]
        return BLOCK_TOKENS * sum(end_s is not None for end_s in taken)

    def _cancel(self, request_id: str) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._cut_run()
            self._worker.remove(sequence)
            self._forget(sequence)

    def _forget(self, sequence: BatchSequence) -> None:
        self.preemptions += sequence.preemptions
        request = self._open.pop(sequence.key)
        del self._sequences[request.request_id], self._first_blocks[request.first_block]

    def _note_move(self) -> None:
        self._cut_run()
        self._moving_until_s = self._loop.time() + MOVING_S

    def _cut_run(self) -> None:
        """Plan again after the present step, because something changes."""
        if self._step is None:
            return
        end_s = self._worker.cut(self._loop.time())
        if end_s is not None:
            self._step.cancel()
            self._step = self._loop.call_at(end_s, self._end_step)

    def _wake(self) -> None:
        if self._step is None:
            self._updated_s = self._loop.time() - self.load_age_s  # the last idle report
            self._begin_step()

    def _begin_step(self) -> None:
        now_s = self._loop.time()
        # Steps until the next update are planned together, unless each one delivers its deltas.
        moving = now_s < self._moving_until_s
        step_s = self._worker.plan(now_s, 0.0 if moving else self._updated_s + UPDATE_S - now_s)
        if step_s is None:
            self._step = None
            self._update()
        else:
            self._step = self._loop.call_at(now_s + step_s, self._end_step)

    def _end_step(self) -> None:
        now_s = self._loop.time()
        end = self._worker.complete()
        due = now_s - self._updated_s >= UPDATE_S
        if due or now_s < self._moving_until_s:
            self._deliver(self._sequences.values())
        elif end.first:
            self._deliver(end.first)
        for one in end.ended:
            self._finish(one)
        if due or end.first or end.ended:  # first tokens and ends are reported at once
            self._update()
        self._begin_step()

    def _update(self) -> None:
        """Report the load."""
        self._load, self._updated_s = self._worker.load(), self._loop.time()
        self.watermark = self._last_lease
        for notify in self.on_update:
            notify()

    def _deliver(self, sequences: Iterable[BatchSequence]) -> None:
        """Deliver the new tokens of sequences, except the last token of a sequence."""
        batch = []
        for one in sequences:
            tokens = self._new_tokens(one)
            if tokens and one.output > self._worker.generated(one):
                batch.append((self._open[one.key].request_id, self._delta(one, tokens)))
        self._streams.deliver(batch)

    def _finish(self, one: BatchSequence) -> None:
        delta = self._delta(one, self._new_tokens(one))
        delta = delta._replace(finish_reason=FinishReason.LENGTH, outcome=NO_OUTCOME)
        request_id = self._open[one.key].request_id
        self._forget(one)
        self._streams.deliver([(request_id, delta)])

    def _new_tokens(self, one: BatchSequence) -> int:
        return self._worker.generated(one) - self._open[one.key].delivered

    def _delta(self, one: BatchSequence, tokens: int) -> Delta:
        """Return the delta of new tokens, all of which are 0."""
        phases, request = None, self._open[one.key]
        if not request.delivered:
            now_s, scheduled_s = self._loop.time(), one.scheduled_s or one.queued_s
            phases = Phases(one.queued_s, scheduled_s, (), now_s)
        request.delivered += tokens
        return Delta(0, (0,) * tokens, "", phases=phases)


def card_of(profile: Profile) -> ModelCard:
    """Return the card of a worker with a profile."""
    name, tokens = f"sim:{profile.name}", profile.kv_bytes // profile.kv_token_bytes
    form = KvFormat(name, "uint8", BLOCK_TOKENS, 1, profile.kv_token_bytes)
    return ModelCard(
        *(profile.name, profile.source, tokens, name, 0, EXACT, tokens), kv_format=form
    )


def limits_of(profile: Profile) -> BatchLimits:
    """Return the limits of a worker with a profile."""
    return BatchLimits(profile.cost, profile.kv_bytes // profile.kv_token_bytes)
