"""The sequences of a worker: which of them run, wait, are paused or are preempted.

A paused sequence leaves the batch before the next step. It counts against no limit and blocks no
other sequence. Its blocks stay in the prefix cache until the memory is needed, because cached
blocks are evicted before any sequence is preempted. When it resumes, it takes its place in order of
arrival. It shares its blocks that are still cached, and recomputes at most one block if all of them
are.

An offline sequence is a line of a batch. While another prompt waits or is computed, offline
sequences leave the batch in the same way and wait after all others. A prompt therefore waits at
most for the step in progress, and later steps are as if there were no batches.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Container
from itertools import islice
from math import inf
from operator import attrgetter
from typing import Final

from draftgate.backends.core.kv_blocks import KvBlocks, OutOfBlocks
from draftgate.backends.core.prefix_cache import PendingPrefixes
from draftgate.backends.core.sequence import Sequence, SequenceState
from draftgate.backends.types import Pace
from draftgate.policies.ordering.fair import STARVATION_S
from draftgate.policies.speculation.weights import MOST_PRIORITY

_LEAST_RECENTLY_SERVED: Final = attrgetter("last_step", "order")
_ORDER: Final = attrgetter("order")
_PREFILL_ORDER: Final = attrgetter("is_document", "pace")

SPARING_STEPS: Final = 64
"""Number of steps by which a sparing sequence is ranked after its last service. All others precede
it while each is served at least every 64 steps, and otherwise take turns with it. At steps of 10 to
30 ms, a slow reader waits 1 to 2 s for a token. Proxies keep a silent connection for 30 s."""

OFFLINE_S: Final = 1e9
"""Age in seconds by which offline sequences are behind all others, about 30 years."""

CLASS_S: Final = STARVATION_S
"""Age in seconds that a priority class is worth. A request thus precedes those of the next lower
class, unless they are older by more, so that no class starves."""

LAST: Final = (inf, 0)
"""A place after all sequences, in the form of `Sequence.order`."""

LONGEST_HOLD_S: Final = 60.0
"""Maximum time in seconds for which blocks are held for the next request of a conversation. A tool
that takes longer, such as a test suite, leaves room for others. (Chosen, not tuned, 2026-11-30.)"""


def _sparing_last(sequence: Sequence) -> tuple[int, tuple[float, int]]:
    """Sort key of decodes when some sequences are sparing."""
    return sequence.last_step + SPARING_STEPS * (sequence.pace is Pace.SPARING), sequence.order


class Queues:
    """The open sequences of a worker and their blocks.

    Attributes:
        waiting: queue by `Sequence.order`, where a preempted sequence precedes later arrivals of
            its class.
        running: batch, oldest admission first.
        paused: sequences that wait for their reader, by key.
        leaving: paused sequences that run until the next step is planned, by key.
        num_sparing: number of sequences with pace `SPARING`.
        num_urgent: number of sequences above the usual priority class.
        num_offline: number of offline sequences.
        num_documents: number of documents to embed.
        prefill_tokens: number of tokens that running and waiting sequences must still feed, except
            decodes. For waiting sequences this includes tokens that may be cached.
        offline_tokens: part of these tokens that belongs to offline sequences.
        blocks: KV blocks of all sequences.
    """

    def __init__(self, blocks: KvBlocks) -> None:
        self.blocks = blocks
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.paused: dict[int, Sequence] = {}
        self.leaving: dict[int, Sequence] = {}
        self.num_sparing = self.num_urgent = self.num_offline = self.num_documents = 0
        self.prefill_tokens = self.offline_tokens = 0
        self._pending = PendingPrefixes()
        self._had_prompts = False  # `online_prompts` at the last step

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        priority = min(max(sequence.request.service.priority, -MOST_PRIORITY), MOST_PRIORITY)
        arrived_s = sequence.queued_s - sequence.request.age_s
        later_s = OFFLINE_S if sequence.offline else CLASS_S * priority
        sequence.order = arrived_s + later_s, sequence.key
        self._insert(sequence)
        self.num_urgent += sequence.request.service.priority < 0
        self.num_offline += sequence.offline
        self.num_documents += sequence.is_document
        self._set_prefill(sequence, sequence.pending_tokens)
        # Query the prefix now. The cache remembers the last query, so the next step gets its result
        # for free, and the work of a single call is halved.
        self.blocks.num_cached(sequence.sharable_hashes(self.blocks.block_size))

    def remove(self, sequence: Sequence, now_s: float) -> None:
        """Remove a sequence that ends, and free its blocks immediately.

        If its client will continue the conversation soon, the blocks are held for it.
        """
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self.leaving.pop(sequence.key, None)
        elif sequence.key in self.paused:
            del self.paused[sequence.key]
        else:
            self.waiting.remove(sequence)
        self.num_sparing -= sequence.pace is Pace.SPARING
        self.num_urgent -= sequence.request.service.priority < 0
        self.num_offline -= sequence.offline
        self.num_documents -= sequence.is_document
        self._set_prefill(sequence, 0)
        sequence.move_to(SequenceState.FINISHED)
        self._free_blocks(sequence)
        next_call_s = sequence.request.service.next_call_s
        if next_call_s is not None:
            until_s = now_s + min(next_call_s, LONGEST_HOLD_S)
            self.blocks.hold_some(sequence.hash_blocks(self.blocks.block_size), until_s)

    def set_pace(self, sequence: Sequence, pace: Pace) -> None:
        """Change the pace of an open sequence.

        A running sequence leaves the batch at the next `park`, because the step in progress still
        counts.
        """
        before, sequence.pace = sequence.pace, pace
        self.num_sparing += (pace is Pace.SPARING) - (before is Pace.SPARING)
        if sequence.state is SequenceState.RUNNING:
            if pace is Pace.PAUSED:
                self.leaving[sequence.key] = sequence
            else:
                self.leaving.pop(sequence.key, None)
        elif Pace.PAUSED in (before, pace) and before is not pace:
            if pace is Pace.PAUSED:
                self.waiting.remove(sequence)
            else:
                del self.paused[sequence.key]
            self._enqueue(sequence)

    @property
    def must_park(self) -> bool:
        """Whether `park` would remove a sequence."""
        return bool(self.leaving) or (
            self.online_prompts and any(sequence.offline for sequence in self.running)
        )

    def park(self) -> None:
        """Remove the paused sequences from the batch, and the offline ones while prompts wait.

        No step may be in progress.
        """
        for sequence in self.leaving.values():
            self._leave_batch(sequence)
        self.leaving.clear()
        if self.num_offline and self.online_prompts:
            for sequence in [each for each in self.running if each.offline]:
                self._leave_batch(sequence)

    @property
    def online_prompts(self) -> bool:
        """Whether a prompt waits or is computed that is not offline."""
        return self.prefill_tokens > self.offline_tokens

    def offline_waits(self) -> bool:
        """Return whether no offline sequence may join the next step. Call it once for each step.

        They also wait for one step after a prompt while others decode. The gateway sends a further
        prompt only when it gets the first token of a long one (`policies.capacity`), and this
        prompt must not wait for another step.
        """
        before, self._had_prompts = self._had_prompts, self.online_prompts
        return self._had_prompts or (before and bool(self.running))

    @property
    def online_load(self) -> tuple[int, int, int]:
        """The sequences that run, those that wait, and the free blocks, without offline sequences.

        The number of free blocks is an upper bound, because offline sequences may share blocks.
        """
        running, waiting = len(self.running) - len(self.leaving), len(self.waiting)
        free = self.blocks.num_free
        if not self.num_offline:
            return running, waiting, free
        offline = [sequence for sequence in self.running if sequence.offline]
        free += sum(len(sequence.block_table) for sequence in offline)
        waiting -= self.num_offline - len(offline)
        return running - len(offline), waiting, min(free, self.blocks.num_blocks)

    def decodes(self, now_s: float | None) -> list[Sequence]:
        """Return the decoding sequences, least recently served first, and sparing sequences later.

        Of sequences served together, the oldest is first. So the youngest, which gets its block
        last, is the one that is preempted if there is none.

        Args:
            now_s: time at which a client must be able to take a token, or None to include all. A
                sparing sequence that runs alone takes no time from others, and frees its memory
                earlier.
        """
        # A sequence that reaches its length with the pending token needs no further step.
        found = [
            s
            for s in self.running
            if len(s.token_ids) - s.num_computed == 1 and len(s.token_ids) < s.most_tokens
        ]
        if self.num_sparing and now_s is not None:
            found = [s for s in found if s.next_decode_s <= now_s]
        found.sort(key=_sparing_last if self.num_sparing else _LEAST_RECENTLY_SERVED)
        return found

    def prefills(self) -> tuple[Sequence, ...]:
        """Return the batch in the order in which prompts continue.

        The oldest admission is first, sparing sequences are later, and documents to embed are last.
        """
        if self.num_sparing or self.num_documents:
            return tuple(sorted(self.running, key=_PREFILL_ORDER))
        return tuple(self.running)

    @property
    def head_tokens(self) -> int:
        """Number of tokens of the next waiting sequence, or 0 if none but offline ones wait."""
        waits = self.waiting and not self.waiting[0].offline
        return len(self.waiting[0].token_ids) if waits else 0

    def next(self, most: int, *, with_offline: bool) -> tuple[Sequence, ...]:
        """Return the next waiting sequences, at most `most`, or only those that are not offline."""
        found = islice(self.waiting, most)
        return tuple(found if with_offline else [each for each in found if not each.offline])

    def next_blocks(self) -> int:
        """Return how many blocks the next waiting sequence needs, or 0 if it cannot run now."""
        if not self.waiting:
            return 0
        sequence = self.waiting[0]
        hashes = sequence.sharable_hashes(self.blocks.block_size)
        needed = self.blocks.needed(hashes, len(sequence.token_ids))
        return needed if needed <= self.blocks.num_free else 0

    def waiting_prompt_tokens(self, sequences: int, most: int) -> int:
        """Return the prompt tokens of the next waiting sequences, at least one of which must exist.

        Only the first sequence excludes cached tokens. A cache query takes as long for each of the
        other sequences, and few of them join the same step.

        Args:
            sequences: number of sequences that could be admitted.
            most: number of tokens at which to stop counting.
        """
        first = self.waiting[0]
        cached = self.blocks.num_cached(first.sharable_hashes(self.blocks.block_size))
        tokens = len(first.token_ids) - cached * self.blocks.block_size
        for sequence in islice(self.waiting, 1, sequences):
            if tokens >= most:
                break
            tokens += len(sequence.token_ids)
        return tokens

    def admit(self, sequence: Sequence) -> bool:
        """Let a waiting sequence run, with blocks for all its tokens, including cached tokens.

        Returns:
            False if the sequence should wait and later ones may pass it. A running prefill is
            computing its first uncached block, which the sequence can share soon.

        Raises:
            OutOfBlocks: not enough blocks are free, and nothing has changed.
        """
        hashes = sequence.sharable_hashes(self.blocks.block_size)
        cached = self.blocks.num_cached(hashes)
        if cached < len(hashes) and hashes[cached] in self._pending:
            return False
        shared = self.blocks.admit(sequence.block_table, hashes, len(sequence.token_ids))
        self.waiting.remove(sequence)
        sequence.move_to(SequenceState.RUNNING)
        self.running.append(sequence)
        sequence.known_blocks = shared
        sequence.num_computed = shared * self.blocks.block_size
        if sequence.last_step < 0:
            sequence.cached_tokens = min(sequence.num_computed, sequence.prompt_tokens)
        self.publish_pending(sequence)
        self._set_prefill(sequence, sequence.pending_tokens)
        return True

    def note_fed(self, sequence: Sequence, tokens: int) -> None:
        """Record that a step feeds this many pending tokens of a prefill."""
        left = sequence.pending_tokens - tokens
        # A single pending token is fed as a decode.
        self._set_prefill(sequence, left if left > 1 else 0)

    def extend_or_preempt(self, sequence: Sequence, planned: Container[int]) -> bool:
        """Give the sequence blocks for all its tokens, and preempt others if necessary.

        Offline sequences are preempted first, then sparing ones, then those of lower classes, and
        then younger ones (`Sequence.order`).

        Args:
            planned: keys of the sequences in the step, which cannot be preempted.

        Returns:
            False if the sequence itself was preempted, because all other running sequences are in
            this step.
        """
        if len(sequence.token_ids) <= len(sequence.block_table) * self.blocks.block_size:
            return True
        while True:
            try:
                self.blocks.extend(sequence.block_table, len(sequence.token_ids))
            except OutOfBlocks:
                candidates = (s for s in self.running if s.key not in planned)
                victim = max(candidates, key=lambda s: (s.offline, s.pace, s.order))
                self._leave_batch(victim)
                victim.preemptions += 1
                if victim is sequence:
                    return False
            else:
                return True

    def publish_pending(self, sequence: Sequence) -> None:
        """Announce the first unknown block of a running prefill, for sequences that need it."""
        size, block = self.blocks.block_size, sequence.known_blocks
        # Each sequence computes its last token itself.
        if block < (len(sequence.token_ids) - 1) // size:
            self._pending.advance(sequence.key, sequence.hash_blocks(size)[block])
        else:
            self._pending.drop(sequence.key)

    def withdraw_pending(self, sequence: Sequence) -> None:
        """Withdraw the block that a sequence has announced, if any, after the end of its prompt."""
        self._pending.drop(sequence.key)

    def _leave_batch(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks and queue it, so that its tokens are computed again."""
        self.running.remove(sequence)
        self._free_blocks(sequence)
        sequence.move_to(SequenceState.WAITING)
        sequence.num_computed = 0
        self._enqueue(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        if sequence.pace is Pace.PAUSED:
            self.paused[sequence.key] = sequence
            self._set_prefill(sequence, 0)
            return
        self._insert(sequence)
        self._set_prefill(sequence, sequence.pending_tokens)

    def _insert(self, sequence: Sequence) -> None:
        """Insert a sequence into the queue at its place."""
        waiting = self.waiting
        if not waiting or waiting[-1].order < sequence.order:
            waiting.append(sequence)  # the usual case: it is the last to arrive
        else:
            waiting.insert(bisect(waiting, sequence.order, key=_ORDER), sequence)

    def _set_prefill(self, sequence: Sequence, tokens: int) -> None:
        change = tokens - sequence.prefill_tokens
        self.prefill_tokens += change
        if sequence.offline:
            self.offline_tokens += change
        sequence.prefill_tokens = tokens

    def _free_blocks(self, sequence: Sequence) -> None:
        """Free the sequence's blocks. Blocks with a known prefix stay cached."""
        self._pending.drop(sequence.key)
        self.blocks.release(sequence.block_table)
