"""The last part of a move, in which both workers run the stream.

The destination begins before the source stops, at an earlier position. It gets the tokens that the
source has added since then as drafts, and must accept them (`splice`).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Self

from draftgate.backends.types import Delta, Pace
from draftgate.gateway.dispatch.hold import Hold
from draftgate.gateway.dispatch.migration import Migration
from draftgate.gateway.dispatch.prompt import Prompt
from draftgate.gateway.dispatch.splice import Splice
from draftgate.policies.moves import STALL_S, MoveEnd, may_switch


def computes_same_tokens(stream: Prompt, successor: Hold) -> bool:
    """Return whether both workers compute the same tokens, whatever else they run."""
    source, sink = stream.worker.backend.card, successor.worker.backend.card
    # A traced response reports the steps of one worker for each token.
    same_class = source.capabilities.exact and source.numerics_class == sink.numerics_class
    return same_class and not stream.run.job.traced


async def boundary(hold: Hold) -> bool:
    """Wait for the next delta of a hold.

    Returns:
        False if no delta arrived within `STALL_S`.
    """
    arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    hold.on_delta = partial(_wake, arrived)
    try:
        async with asyncio.timeout(STALL_S):
            await arrived
    except TimeoutError:
        return False
    finally:
        hold.on_delta = None
    return True


class Overlap:
    """A context that observes a stream on its source, until the destination continues it."""

    _end: asyncio.Future[MoveEnd]  # of `switch`
    _least: int
    _running: int  # number of choices that the destination has not ended
    _ended = False  # whether it has ended a choice
    _paused = False  # whether the source waits for it

    def __init__(self, stream: Prompt, successor: Hold, move: Migration) -> None:
        self._stream = stream
        self._source = stream.hold
        self._successor = successor
        self._move = move
        self._added = asyncio.Event()

    def __enter__(self) -> Self:
        self._splice = Splice(self._stream.output.open_choices)
        self._rest = self._successor.rest
        self._source.on_delta = self._observe
        return self

    def __exit__(self, *_: object) -> None:
        self._source.on_delta = None

    async def source_tokens(self, least: int, most_s: float = STALL_S) -> bool:
        """Wait until the source has added a number of tokens, or has ended the stream.

        Returns:
            False if it adds nothing for `most_s`. It has probably preempted the stream after
            `STALL_S`.
        """
        while self._splice.source_tokens < least and not self._stream.output.is_complete:
            self._added.clear()
            try:
                async with asyncio.timeout(most_s):
                    await self._added.wait()
            except TimeoutError:
                return False
        return True

    async def switch(self, least: int) -> MoveEnd:
        """Begin on the destination, and hand the stream over when it has caught up.

        The destination gets the tokens of the source as drafts. The source pauses when they are
        verified.

        Args:
            least: number of tokens that the destination must compute too.
        """
        stream, successor = self._stream, self._successor
        if stream.output.is_complete:
            return MoveEnd.ENDED
        self._least = least
        self._end = asyncio.get_running_loop().create_future()
        request = self._splice.with_drafts(self._rest)
        self._running = len(request.choices)
        try:
            successor.send_early(request, self)
            return await self._end
        finally:
            if self._paused and stream.successor is not successor:
                self._source.set_pace(stream.run.pace, stream.run.tpot_s)

    def put(self, delta: Delta) -> None:
        """Compare a delta of the destination, and hand the stream over if it has caught up."""
        stream, splice = self._stream, self._splice
        splice.add_sink(delta)
        if self._end.done():
            return  # the prompt will continue on the destination, or the move ends
        self._move.verified_tokens = splice.verified_tokens
        self._running -= delta.finish_reason is not None
        self._ended = self._ended or delta.finish_reason is not None
        switches = may_switch(splice.verified_tokens, self._least, ended=self._ended)
        if splice.differs:
            self._end.set_result(MoveEnd.REJECTED)
        elif stream.output.is_complete:
            self._end.set_result(MoveEnd.ENDED)
        elif switches and splice.caught_up:
            self._end.set_result(MoveEnd.MOVED)
            self._successor.continue_with(splice)
            self._move.hand_over(self._successor)
        elif not self._running:
            self._end.set_result(MoveEnd.ENDED)
        elif switches and not self._paused:
            self._paused = True
            self._source.set_pace(Pace.PAUSED)

    def fail(self, error: Exception) -> None:
        """Fail, because the destination has failed."""
        if not self._end.done():
            self._end.set_exception(error)

    def _observe(self, delta: Delta) -> None:
        self._splice.add_source(delta)
        self._move.note_delta()
        self._added.set()


def _wake(arrived: asyncio.Future[None], _: Delta) -> None:
    if not arrived.done():
        arrived.set_result(None)
