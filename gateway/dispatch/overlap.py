"""The last part of a move, in which both workers run the stream.

The destination begins before the source stops, at an earlier position. It gets the tokens that the
source has added since then as drafts, and must accept them (`splice`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Self

from draftgate.backends.types import Delta, Pace
from draftgate.gateway.dispatch.hold import Hold
from draftgate.gateway.dispatch.migration import Migration
from draftgate.gateway.dispatch.prompt import Prompt
from draftgate.gateway.dispatch.splice import Splice
from draftgate.policies.moves import STALL_S, MoveEnd, may_switch


def is_exact(stream: Prompt, successor: Hold) -> bool:
    """Return whether both workers compute the same tokens, whatever else they run."""
    source, sink = stream.worker.backend.card, successor.placed.worker.backend.card
    # A traced response reports the steps of one worker for each token.
    same_class = source.capabilities.exact and source.numerics_class == sink.numerics_class
    return same_class and not stream.run.job.traced


async def boundary(hold: Hold) -> bool:
    """Wait until a reader has passed a delta on and waits for the next one.

    Returns:
        False if no delta arrived within `STALL_S`.
    """
    loop = asyncio.get_running_loop()
    while True:
        passed: asyncio.Future[None] = loop.create_future()
        hold.on_delta = partial(_wake, passed)
        try:
            async with asyncio.timeout(STALL_S):
                await passed
        except TimeoutError:
            return False
        finally:
            hold.on_delta = None
        if hold.waiting:
            return True


class Overlap:
    """A context that observes a stream on its source, until the destination continues it."""

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
        stream, source = self._stream, self._source
        successor, splice = self._successor, self._splice
        if stream.output.is_complete:
            return MoveEnd.ENDED
        paused = ended = False
        try:
            deltas = successor.send_early(splice.with_drafts(self._rest))
            async with aclosing(_read(successor, deltas)) as read:
                async for delta in read:
                    splice.add_sink(delta)
                    self._move.verified_tokens = splice.verified_tokens
                    if splice.differs:
                        return MoveEnd.REJECTED
                    ended = ended or delta.finish_reason is not None
                    if not may_switch(splice.verified_tokens, least, ended=ended):
                        continue
                    if splice.caught_up and source.waiting:
                        successor.continue_with(splice.continued(deltas))
                        stream.hand_over(successor, self._move.end)
                        return MoveEnd.MOVED
                    if not paused:
                        paused = True
                        source.set_pace(Pace.PAUSED)
            return MoveEnd.ENDED
        finally:
            if paused and stream.successor is not successor:
                source.set_pace(stream.run.pace, stream.run.tpot_s)

    def _observe(self, delta: Delta) -> None:
        self._splice.add_source(delta)
        self._move.note_delta()
        self._added.set()


async def _read(hold: Hold, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
    """Yield the deltas of a hold that the prompt does not read yet."""
    hold.waiting = True
    async for delta in deltas:
        hold.waiting = False
        hold.num_deltas += 1
        yield delta
        hold.waiting = True


def _wake(passed: asyncio.Future[None], _: Delta) -> None:
    if not passed.done():
        passed.set_result(None)
