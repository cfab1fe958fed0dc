"""A prompt that may move to another worker while it runs, and the report of its move."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count
from typing import Final

from draftgate.backends.errors import StreamMoved
from draftgate.backends.types import Delta, GenerationRequest, Pace
from draftgate.gateway.dispatch.attempt import Attempt
from draftgate.gateway.dispatch.decisions import MoveRecord
from draftgate.gateway.dispatch.kv_pulls import KvFetch
from draftgate.gateway.dispatch.partial_output import PartialOutput
from draftgate.gateway.dispatch.placement import Placer
from draftgate.gateway.dispatch.queue import Waiting
from draftgate.gateway.dispatch.run import Move, Run
from draftgate.gateway.dispatch.span_attributes import describe_move
from draftgate.gateway.fleet import FleetWorker
from draftgate.policies.moves import MoveEnd, MoveReason
from draftgate.policies.rescheduling.types import ChosenMove

_MOVED: Final = "the stream moved to another worker"


class Stream:
    """A prompt of a job, which runs on one worker after another.

    Attributes:
        output: the output so far.
        waiting: the place of its first dispatch in the queue.
        attempt: the attempt that runs the prompt, while it is registered for moves.
        successor: the attempt at which an interrupted prompt continues.
        copied: whether the present move of the prompt has copied its blocks.
        hands_over: whether its present move hands the output over to another worker.
        failures, moves: number of its moves that failed, and of those that succeeded without the
            handovers.
        moved_s: time of its last move or handover.
        retry_s: earliest time of its next move.
    """

    attempt: Attempt

    def __init__(self, run: Run, index: int, waiting: Waiting) -> None:
        self.run = run
        self.index = index
        self.waiting = waiting
        self.output = PartialOutput(run.requests[index])
        self.successor: Attempt | None = None
        self.copied = self.hands_over = False
        self.failures = self.moves = 0
        self.retry_s = 0.0
        self.moved_s = -math.inf
        self._numbers = count(1)
        self._move: Migration | None = None

    @property
    def worker(self) -> FleetWorker:
        """The worker of the present attempt."""
        return self.attempt.placed.worker

    @property
    def tokens(self) -> int:
        """Number of tokens of prompt and output, of all choices that run."""
        return len(self.run.requests[self.index].prompt_ids) + sum(self.output.lengths)

    @property
    def is_read_slowly(self) -> bool:
        """Whether the client reads slowly, so that the gateway has not read all deltas."""
        return self.run.pace is not Pace.FULL

    def rest(self) -> GenerationRequest:
        """Return the request for the rest of the output, with a new id."""
        request_id = self.run.requests[self.index].request_id
        return self.output.rest(f"{request_id}.{next(self._numbers)}")

    def hand_over(self, successor: Attempt, move: Migration) -> None:
        """Let the reader continue with a prepared attempt.

        A reader that waits for a delta is interrupted. Any other reader notices at its next delta.
        """
        self.successor, self._move = successor, move
        successor.on_delta = self._observe_first
        self.attempt.reading.interrupt(StreamMoved(_MOVED))

    def check_moved(self) -> None:
        """Raise `StreamMoved` if the reader must continue with a successor."""
        if self.successor is not None:
            raise StreamMoved(_MOVED)

    def _observe_first(self, delta: Delta) -> None:
        """End the move with the first new token of the destination."""
        if self._move is not None and (delta.token_ids or delta.finish_reason is not None):
            self.end_move(MoveEnd.MOVED)

    def end_move(self, end: MoveEnd) -> None:
        """Record the end of the move whose successor got the stream, once."""
        move, self._move = self._move, None
        if move is not None:
            if end is MoveEnd.MOVED:
                self.moves, self.moved_s = self.moves + (not move.hands_over), move.now_s()
            move.end(end)

    def take_successor(self) -> Attempt | None:
        """Return the successor for the rest of the output, once, or None without one."""
        successor, self.successor = self.successor, None
        if successor is not None:
            successor.extend()
        return successor

    async def close(self) -> None:
        """Release a successor that did not get the stream."""
        self.end_move(MoveEnd.ENDED)
        if self.successor is not None:
            await self.successor.abandon()


class Migration:
    """A move, from its choice to the first new token of the destination.

    Attributes:
        stages: number of copies so far.
        verified_tokens: number of tokens that both workers have computed.
        sink: id of the destination, or empty while it is unknown.
        chosen: the choice of the policy, or None if the source is leaving.
        now_s: clock in seconds.
    """

    def __init__(
        self,
        stream: Stream,
        chosen: ChosenMove | None,
        placer: Placer,
        now_s: Callable[[], float],
    ) -> None:
        """Begin the span of a move.

        Args:
            placer: records the move.
        """
        self.stages = self.verified_tokens = 0
        self.sink = "" if chosen is None else chosen.sink
        self.chosen = chosen
        self.now_s = now_s
        self._stream = stream
        self._placer = placer
        self._source = stream.attempt.placed
        self._blocks = self._bytes = 0
        self._last_s: float | None = None  # time of the last delta of the source
        self._span = stream.run.span.child("migrate")

    @property
    def hands_over(self) -> bool:
        """Whether the source computes only the prompt."""
        return self.chosen is not None and self.chosen.reason is MoveReason.PHASES

    def add_stage(self, fetches: list[KvFetch]) -> None:
        """Add a stage, with the transfers of all choices."""
        self.stages += 1
        self._blocks += sum(fetch.blocks for fetch in fetches)
        self._bytes += sum(fetch.num_bytes for fetch in fetches)

    def note_delta(self) -> None:
        """Record the time of a delta of the source, which may be the last one."""
        self._last_s = self.now_s()

    def end(self, end: MoveEnd) -> None:
        """Report the move."""
        gap_s = None
        if end is MoveEnd.MOVED and self._last_s is not None:
            gap_s = self.now_s() - self._last_s
        reason = MoveReason.DRAIN if self.chosen is None else self.chosen.reason
        move = Move(
            *(self._stream.index, reason, end, self._source.worker.worker_id, self.sink),
            *(self.stages, self._blocks, self._bytes, self.verified_tokens, gap_s),
            chosen=self.chosen,
        )
        run = self._stream.run
        self._placer.record_move(run.job, move.index, self._source, _record(move))
        describe_move(self._span, move)
        self._span.end()
        run.watch.moved(move)


def _record(move: Move) -> MoveRecord:
    """Return the record of a move in the decision about its source."""
    ends = (move.source, move.sink, move.reason.value, move.end)
    copied = (move.stages, move.blocks, move.num_bytes, move.gap_s)
    chosen = move.chosen
    if chosen is None:
        return MoveRecord(*ends, *copied)
    figures = (chosen.policy, chosen.gain, chosen.threshold, chosen.explanation)
    return MoveRecord(*ends, *copied, *figures)
