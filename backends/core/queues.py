"""Who runs, who waits, who is paused, and whose blocks are taken when memory is short.

A paused sequence leaves the batch before the next step. It takes no seat and holds up nobody. Its
blocks stay in the prefix cache until somebody needs the memory: cached ones are taken before
anybody is preempted. When it goes on it takes its place in the order of arrival, and shares what is
still there, so it computes no more than a block again if all of it is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Container

from draftgate.backends.core.kv_blocks import KvBlocks, OutOfBlocks
from draftgate.backends.core.prefix_cache import PendingPrefixes
from draftgate.backends.core.sequence import Sequence, SequenceState
from draftgate.backends.types import Pace


class Queues:
    """The open sequences of a worker with their places and blocks.

    Attributes:
        waiting: the queue, in order of arrival: who was preempted stands ahead of who came later.
        running: the batch, oldest admission first.
        paused: those that wait until they are told to go on, by key.
        leaving: those that were paused and run until the next step is planned, by key.
        num_sparing: how many sequences there are of pace `SPARING`.
        prefill_tokens: tokens that are still to be fed to those who run or wait, but for decodes;
            of those who wait, also what may be cached.
        blocks: the memory they share.
    """

    def __init__(self, blocks: KvBlocks) -> None:
        """Start empty."""
        self.blocks = blocks
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.paused: dict[int, Sequence] = {}
        self.leaving: dict[int, Sequence] = {}
        self.num_sparing = 0
        self.prefill_tokens = 0
        self._pending = PendingPrefixes()

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(sequence)
        self._owe(sequence, sequence.pending_tokens)
        # Looked up now, and found at once when the next step asks: halves what one turn has to do.
        self.blocks.num_cached(sequence.sharable_hashes(self.blocks.block_size))

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that ends, and free its blocks at once."""
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self.leaving.pop(sequence.key, None)
        elif sequence.key in self.paused:
            del self.paused[sequence.key]
        else:
            self.waiting.remove(sequence)
        self.num_sparing -= sequence.pace is Pace.SPARING
        self._owe(sequence, 0)
        sequence.move_to(SequenceState.FINISHED)
        self._give_back(sequence)

    def pace(self, sequence: Sequence, pace: Pace) -> None:
        """Change how far an open sequence goes on.

        What is in the batch leaves it with the next `park`: the step under way still counts.
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

    def park(self) -> None:
        """Take those who were paused out of the batch. No step may be under way."""
        for sequence in self.leaving.values():
            self._leave(sequence)
        self.leaving.clear()

    def admit(self, sequence: Sequence) -> bool:
        """Make a waiting sequence run, with blocks for all its tokens and what is cached of them.

        Returns:
            False if it should wait, and may be passed: a running prefill is computing the first of
            its blocks that is not cached, and soon that is there to be shared.

        Raises:
            OutOfBlocks: not enough blocks are free; nothing has changed.
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
        self.goes_on_computing(sequence)
        self._owe(sequence, sequence.pending_tokens)
        return True

    def feed(self, sequence: Sequence, tokens: int) -> None:
        """Note that a step feeds so many pending tokens of a prefill."""
        left = sequence.pending_tokens - tokens
        self._owe(sequence, left if left > 1 else 0)  # a single one is fed as a decode

    def make_room(self, sequence: Sequence, planned: Container[int]) -> bool:
        """Give the sequence blocks for all its tokens, preempting others if need be.

        The youngest one goes first, of those that are sparing if there are any.

        Args:
            planned: keys of the sequences in the step, which nobody preempts.

        Returns:
            False if it had to be preempted itself: whatever else runs is in this step.
        """
        if len(sequence.token_ids) <= len(sequence.block_table) * self.blocks.block_size:
            return True
        while True:
            try:
                self.blocks.extend(sequence.block_table, len(sequence.token_ids))
            except OutOfBlocks:
                victim = self._victim(planned)
                self._preempt(victim)
                if victim is sequence:
                    return False
            else:
                return True

    def goes_on_computing(self, sequence: Sequence) -> None:
        """Note which block of a running prefill others may wait for: the first not known yet."""
        size, block = self.blocks.block_size, sequence.known_blocks
        if block < (len(sequence.token_ids) - 1) // size:  # each computes the last token itself
            self._pending.advance(sequence.key, sequence.hash_blocks(size)[block])
        else:
            self._pending.drop(sequence.key)

    def prompt_is_computed(self, sequence: Sequence) -> None:
        """Note that nobody need wait for the sequence's prefix any more. Idempotent."""
        self._pending.drop(sequence.key)

    def _victim(self, planned: Container[int]) -> Sequence:
        """Return who goes next of the running sequences that are not part of the step yet."""
        return max((s for s in self.running if s.key not in planned), key=lambda s: (s.pace, s.key))

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks; it is computed anew, ahead of all that never ran."""
        self._leave(sequence)
        sequence.preemptions += 1

    def _leave(self, sequence: Sequence) -> None:
        """Move a running sequence to where it waits, without its blocks."""
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.move_to(SequenceState.WAITING)
        sequence.num_computed = 0
        self._enqueue(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        """Put a waiting sequence where it belongs: among the paused, or into the queue."""
        if sequence.pace is Pace.PAUSED:
            self.paused[sequence.key] = sequence
            self._owe(sequence, 0)
            return
        # The queue is in order of arrival, so it stands behind older ones preempted before.
        at = bisect_left(self.waiting, sequence.key, key=lambda waiting: waiting.key)
        self.waiting.insert(at, sequence)
        self._owe(sequence, sequence.pending_tokens)

    def _owe(self, sequence: Sequence, tokens: int) -> None:
        """Note how many tokens are still to be fed to a sequence."""
        self.prefill_tokens += tokens - sequence.prefill_tokens
        sequence.prefill_tokens = tokens

    def _give_back(self, sequence: Sequence) -> None:
        """Free the sequence's blocks; those with a known prefix stay cached."""
        self._pending.drop(sequence.key)
        self.blocks.release(sequence.block_table)
