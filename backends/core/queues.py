"""Who runs, who waits, and whose blocks are taken when memory is short."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Container

from backends.core.kv_blocks import KvBlocks, OutOfBlocks
from backends.core.prefix_cache import PendingPrefixes
from backends.core.sequence import Sequence, SequenceState


class Queues:
    """The open sequences of a worker with their places and blocks.

    Attributes:
        waiting: the queue, in order of arrival: who was preempted stands ahead of who came later.
        running: the batch, oldest admission first.
        blocks: the memory they share.
    """

    def __init__(self, blocks: KvBlocks) -> None:
        """Start empty."""
        self.blocks = blocks
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._pending = PendingPrefixes()

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that ends, and free its blocks at once."""
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.move_to(SequenceState.FINISHED)
        self._give_back(sequence)

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
        self._pending.add(sequence.key, hashes[shared:])
        return True

    def make_room(self, sequence: Sequence, planned: Container[int]) -> bool:
        """Give the sequence blocks for all its tokens, preempting the youngest if need be.

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

    def prompt_is_computed(self, sequence: Sequence) -> None:
        """Note that nobody need wait for the sequence's prefix any more. Idempotent."""
        self._pending.drop(sequence.key)

    def _victim(self, planned: Container[int]) -> Sequence:
        """Return the youngest running sequence that is not part of the step yet."""
        return max((s for s in self.running if s.key not in planned), key=lambda s: s.key)

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks; it is computed anew, ahead of all that never ran."""
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.move_to(SequenceState.WAITING)
        sequence.num_computed = 0
        sequence.preemptions += 1
        # The queue is in order of arrival, so it stands behind older ones preempted before.
        at = bisect_left(self.waiting, sequence.key, key=lambda waiting: waiting.key)
        self.waiting.insert(at, sequence)

    def _give_back(self, sequence: Sequence) -> None:
        """Free the sequence's blocks; those with a known prefix stay cached."""
        self._pending.drop(sequence.key)
        self.blocks.release(sequence.block_table)
