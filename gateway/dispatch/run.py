"""A job that was admitted, and where its prompts went."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from draftgate.backends.types import Delta, GenerationRequest
from draftgate.gateway.dispatch.admission import Entry
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.placement import Placement
from draftgate.gateway.telemetry.tracing import Span
from draftgate.policies.resilience.failover import Cause, GivenUp
from draftgate.policies.types import Pace


@dataclass(frozen=True, slots=True)
class Resume:
    """A prompt that another worker goes on with.

    Attributes:
        index: of the prompt.
        lost: where it was.
        placed: where it goes on, from the tokens that it has.
        cause: how its worker was lost.
        reason: the same in words.
    """

    index: int
    lost: Placement
    placed: Placement
    cause: Cause
    reason: str

    @property
    def kept_tokens(self) -> int:
        """Tokens of output that it goes on from, of all choices that had not ended."""
        return sum(len(choice.output_ids) for choice in self.placed.request.resumed)

    @property
    def same_numerics_class(self) -> bool:
        """Whether the text is promised to be that of a worker which was not lost."""
        lost, placed = self.lost.worker.backend.card, self.placed.worker.backend.card
        known = lost.numerics_class is not None
        return known and lost.numerics_class == placed.numerics_class


class Watch(Protocol):
    """Who is told where the prompts of a job go."""

    def placed(self, placed: Placement) -> None:
        """A prompt has had its turn, and goes to its first worker."""
        ...

    def resumed(self, resume: Resume) -> None:
        """A prompt has lost its worker, and goes on with another one."""
        ...

    def given_up(self, cause: Cause, why: GivenUp) -> None:
        """A prompt has lost its worker, and does not go on."""
        ...


class _Nobody:
    """Watches nothing."""

    def placed(self, placed: Placement) -> None:
        """See `Watch`."""

    def resumed(self, resume: Resume) -> None:
        """See `Watch`."""

    def given_up(self, cause: Cause, why: GivenUp) -> None:
        """See `Watch`."""


UNWATCHED: Final[Watch] = _Nobody()


class Run:
    """A job that was admitted.

    Attributes:
        requests: one for each prompt, sized.
        entry: its admission.
        watch: is told where its prompts go.
        placements: where each is, or was last; None while it waits for its first turn.
        resumes: those of its prompts that went on elsewhere, in turn.
        pace: how far its workers go on.
        deltas: of all choices: choice c of prompt p is numbered `p * n + c`. They end once all have
            ended, or with `BackendFailed` if a worker was lost and no other one could go on.
    """

    deltas: AsyncGenerator[Delta, None]

    def __init__(
        self,
        job: Job,
        requests: Sequence[GenerationRequest],
        entry: Entry,
        span: Span,
        watch: Watch,
    ) -> None:
        """Begin with nothing placed."""
        self.job = job
        self.requests = requests
        self.entry = entry
        self.span = span
        self.watch = watch
        self.placements: list[Placement | None] = [None] * len(self.requests)
        self.resumes: list[Resume] = []
        self.pace = Pace.FULL

    @property
    def placed(self) -> list[Placement]:
        """Where its prompts went; each has its place once it has a delta.

        Raises:
            RuntimeError: one still waits.
        """
        found = [placement for placement in self.placements if placement is not None]
        if len(found) < len(self.placements):
            raise RuntimeError("a prompt still waits for a worker")
        return found

    @property
    def unread_tokens(self) -> int:
        """Tokens that were generated and nobody has read."""
        return sum(
            placed.worker.generating.unread_tokens(placed.request.request_id)
            for placed in self.placements
            if placed is not None
        )

    def set_pace(self, pace: Pace) -> None:
        """Let the workers go on like this."""
        self.pace = pace
        for placed in self.placements:
            if placed is not None:
                placed.worker.generating.set_pace(placed.request.request_id, pace)

    def place(self, index: int, placement: Placement) -> None:
        """Note where a prompt goes. It is charged, and told, the first time."""
        first = self.placements[index] is None
        self.placements[index] = placement
        if first:
            self.entry.prompt_tokens += len(placement.request.prompt_ids)
            self.watch.placed(placement)

    def resume(self, resume: Resume) -> None:
        """Note that a prompt goes on where it was placed last."""
        self.resumes.append(resume)
        self.watch.resumed(resume)
