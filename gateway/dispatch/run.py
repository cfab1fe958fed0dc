"""An admitted job and the placements of its prompts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol, TypeAlias

from draftgate.backends.streams import UnreadDeltas
from draftgate.backends.types import Delta, GenerationRequest
from draftgate.gateway.dispatch.admission import Entry
from draftgate.gateway.dispatch.flows import Hop
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.kv_pulls import KvFetch
from draftgate.gateway.dispatch.output import Output
from draftgate.gateway.dispatch.placement import Placement
from draftgate.gateway.tracing import Span
from draftgate.policies.moves import MoveEnd, MoveReason
from draftgate.policies.rescheduling.types import ChosenMove
from draftgate.policies.resilience.failover import Cause, GivenUp
from draftgate.policies.types import Pace
from draftgate.policies.values import immutable


@immutable
class Resume:
    """The continuation of a prompt on another worker.

    Attributes:
        index: index of the prompt.
        lost: the lost placement.
        placed: the new placement.
        cause: the cause of the loss.
        reason: the error message.
    """

    index: int
    lost: Placement
    placed: Placement
    cause: Cause
    reason: str

    @property
    def kept_tokens(self) -> int:
        """Output tokens that the prompt continues from, in all open choices."""
        return sum(len(choice.output_ids) for choice in self.placed.request.resumed)

    @property
    def same_numerics_class(self) -> bool:
        """Whether the text is guaranteed to equal that of an undisturbed run."""
        lost, placed = self.lost.worker.backend.card, self.placed.worker.backend.card
        known = lost.numerics_class is not None
        return known and lost.numerics_class == placed.numerics_class


@immutable
class Move:
    """The end of an attempt to move a running prompt to another worker.

    Attributes:
        index: index of the prompt.
        source, sink: ids of the workers. The destination is empty if none had room.
        stages: number of copies while the prompt ran on the source.
        blocks, num_bytes: what the destination stored in these stages.
        verified_tokens: number of tokens that both workers computed, in an exact numerics class.
        gap_s: time from the last token of the source to the first new token in seconds, or None if
            the prompt did not move.
        chosen: the choice of the rescheduling policy with its figures, or None if the source is
            leaving.
    """

    index: int
    reason: MoveReason
    end: MoveEnd
    source: str
    sink: str
    stages: int
    blocks: int
    num_bytes: int
    verified_tokens: int
    gap_s: float | None
    chosen: ChosenMove | None = None


@immutable
class NotResumed:
    """A prompt has lost its worker, or its turn, and cannot continue."""

    cause: Cause
    why: GivenUp


Event: TypeAlias = Placement | Resume | NotResumed | KvFetch | Move
"""What happens to a prompt: it gets its first worker, continues on another one or cannot, may fetch
the KV blocks of its prefix, or ends an attempt to move."""

Watch: TypeAlias = Callable[[Event], None]
"""A function that takes the events of a job, and returns at once."""


class Running(Protocol):
    """The prompts of a job (`prompt.Prompt`, `prompts.Prompts`)."""

    def wake(self) -> None:
        """Let `wait` return."""
        ...

    async def wait(self) -> bool:
        """Run, as `Run.wait`."""
        ...

    async def aclose(self) -> None:
        """Cancel the prompts that have not ended."""
        ...


def ignore(_: object) -> None:
    """Ignore a delta or an event."""


class Run:
    """An admitted job.

    Attributes:
        requests: a sized request for each prompt.
        entry: the admission of the job.
        watch: takes its events.
        placements: the latest placement of each prompt, or None before the first.
        outputs: the output of each prompt that has begun, by its index.
        resumes: the resumes of its prompts, in order.
        pace: the pace that its workers must keep.
        tpot_s: seconds in which its client can take one token of each choice, or 0 if unknown.
        path_reason: why its pace or its chunks follow the path to the client, or empty.
        hop: the place of the job in its flow, or None.
        sink: takes the deltas of all choices in the calls that deliver them, where choice c of
            prompt p has the number `p * n + c`. It is set before the first `wait`.
        unread: the deltas that the sink keeps for a slow client.
    """

    requests: Sequence[GenerationRequest]
    entry: Entry
    placements: list[Placement | None]
    sink: Callable[[Delta], None]
    unread: UnreadDeltas | None = None
    hop: Hop | None = None
    _running: Running
    _reader: AsyncGenerator[Delta, None] | None = None
    pace = Pace.FULL
    tpot_s = 0.0
    path_reason = ""

    def __init__(self, job: Job, span: Span, watch: Watch) -> None:
        self.job = job
        self.span = span
        self.watch = watch
        self.sink = ignore
        self.resumes: list[Resume] = []
        self.outputs: dict[int, Output] = {}

    @property
    def placed(self) -> list[Placement]:
        """The placements of all prompts.

        Raises:
            RuntimeError: a prompt has not been placed yet.
        """
        found = [placement for placement in self.placements if placement is not None]
        if len(found) < len(self.placements):
            raise RuntimeError("a prompt still waits for a worker")
        return found

    @property
    def unread_tokens(self) -> int:
        """Number of generated tokens that wait for the client."""
        return 0 if self.unread is None else self.unread.tokens

    def begin(self, running: Running) -> None:
        """Run the prompts of the job from the first `wait` on."""
        self.placements = [None] * len(self.requests)
        self._running = running

    def wake(self) -> None:
        """Let `wait` return, because the sink keeps deltas."""
        self._running.wake()

    async def wait(self) -> bool:
        """Run until all choices have ended, or until `wake` is called.

        Returns:
            Whether choices may be left.

        Raises:
            QueueTimeout: a prompt waited too long for its first worker.
            BackendFailed: a prompt has no worker and cannot continue.
            OutputCut: the grammar of a prompt allows no continuation of an incomplete output.
            Exception: the sink has raised this error.
        """
        return await self._running.wait()

    async def finished(self) -> None:
        """Run until all choices have ended. The errors are those of `wait`."""
        while await self._running.wait():
            pass

    @property
    def deltas(self) -> AsyncGenerator[Delta, None]:
        """The deltas for a reader that may be slow, which needs no `sink`.

        They end when all choices have ended, or with an error of `wait`.
        """
        if self._reader is None:
            self._reader = self._read()
        return self._reader

    async def _read(self) -> AsyncGenerator[Delta, None]:
        unread = self.unread = UnreadDeltas()

        def keep(delta: Delta) -> None:
            unread.put(delta)
            self.wake()

        self.sink, more = keep, True
        while more:
            more = await self.wait()
            while unread:
                yield unread.pop()

    async def aclose(self) -> None:
        """Cancel the prompts that have not ended."""
        try:
            await self._running.aclose()
        finally:
            # These end cycles of references, which only a collection would free.
            del self._running
            self._reader, self.sink = None, ignore

    def set_pace(self, pace: Pace, tpot_s: float = 0.0) -> None:
        """Set the pace of all sequences of the job, as `Backend.set_pace`."""
        self.pace, self.tpot_s = pace, tpot_s
        for placed in self.placements:
            if placed is not None:
                placed.worker.generating.set_pace(placed.request.request_id, pace, tpot_s)

    @property
    def num_choices(self) -> int:
        """Number of choices of all prompts."""
        return self.job.n * len(self.requests)

    @property
    def full_tps(self) -> float:
        """Tokens per second that its workers generate for it at full pace, or 0 if unknown."""
        placed = [placement for placement in self.placements if placement is not None]
        tpots_s = [placement.worker.backend.load().speed.tpot_s for placement in placed]
        return sum([self.job.n / tpot_s for tpot_s in tpots_s if tpot_s])

    def note_path(self, reason: str) -> None:
        """Record why the job follows the path to its client, also in its latest decisions."""
        self.path_reason = reason
        for placed in self.placements:
            if placed is not None and placed.decision is not None:
                placed.decision.path = reason

    def place(self, index: int, placement: Placement) -> None:
        """Record a placement.

        The first placement of a prompt charges the prompt and notifies the observer.
        """
        first = self.placements[index] is None
        self.placements[index] = placement
        if first:
            self.entry.prompt_tokens += len(placement.request.prompt_ids)
            if self.hop is not None:
                self.hop.start()
            self.watch(placement)

    def resume(self, resume: Resume) -> None:
        """Record that a prompt continues at its latest placement."""
        self.resumes.append(resume)
        self.watch(resume)
