"""A job that was admitted, and where its prompts went."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence

from backends.types import Delta, GenerationRequest
from gateway.dispatch.admission import Entry
from gateway.dispatch.job import Job
from gateway.dispatch.placement import Placement
from gateway.telemetry.tracing import Span
from policies.types import Pace


class Run:
    """A job that was admitted.

    Attributes:
        requests: one for each prompt, sized.
        entry: its admission.
        placements: where each went; None while it waits.
        deltas: of all choices: choice c of prompt p is numbered `p * n + c`. They end with
            `BackendFailed` if a worker broke.
    """

    deltas: AsyncGenerator[Delta, None]

    def __init__(
        self,
        job: Job,
        requests: Sequence[GenerationRequest],
        entry: Entry,
        span: Span,
        on_placed: Callable[[Placement], None],
    ) -> None:
        """Begin with nothing placed."""
        self.job = job
        self.requests = requests
        self.entry = entry
        self.span = span
        self.placements: list[Placement | None] = [None] * len(self.requests)
        self._on_placed = on_placed

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
        """Let the workers go on like this with what was placed."""
        for placed in self.placements:
            if placed is not None:
                placed.worker.generating.pace(placed.request.request_id, pace)

    def place(self, index: int, placement: Placement) -> None:
        """Note where a prompt goes."""
        self.placements[index] = placement
        self._on_placed(placement)
