"""The output of a prompt that may continue on another worker."""

from __future__ import annotations

from collections import defaultdict

from draftgate.backends.token_ids import compact
from draftgate.backends.types import (
    NO_OUTCOME,
    Delta,
    GenerationRequest,
    ResumedChoice,
    SpeculationOutcome,
    outcome_of,
)
from draftgate.policies.values import replace


class PartialOutput:
    """The output of a prompt's choices so far, from all workers that ran them."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._open = {choice.choice: compact(choice.output_ids) for choice in request.choices}
        self._drafts = defaultdict[int, list[tuple[int, int]]](list)  # of the present worker
        self._earlier = defaultdict[int, SpeculationOutcome](lambda: NO_OUTCOME)  # before it
        self._ended_tokens = 0

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended."""
        return not self._open

    @property
    def tokens(self) -> int:
        """Number of output tokens of all choices."""
        return self._ended_tokens + sum(map(len, self._open.values()))

    @property
    def open_choices(self) -> tuple[int, ...]:
        """The choices that have not ended."""
        return tuple(self._open)

    @property
    def lengths(self) -> list[int]:
        """Number of output tokens of each choice that has not ended."""
        return [len(ids) for ids in self._open.values()]

    def add(self, delta: Delta) -> None:
        """Add a delta.

        The caller must pass every delta, in order.
        """
        if delta.drafts:
            self._drafts[delta.choice] += delta.drafts
        if delta.finish_reason is None:
            self._open[delta.choice].extend(delta.token_ids)
        else:
            self._ended_tokens += len(self._open.pop(delta.choice)) + len(delta.token_ids)

    @property
    def unfinished(self) -> SpeculationOutcome:
        """The drafts of the present worker for the open choices."""
        return outcome_of([draft for choice in self._open for draft in self._drafts[choice]])

    def lose_worker(self) -> None:
        """Keep the drafts of the open choices, whose outcome the worker no longer reports."""
        for choice in self._open:
            self._earlier[choice] += outcome_of(self._drafts[choice])
        self._drafts.clear()

    def counted(self, delta: Delta) -> Delta:
        """Return a delta whose outcome, if any, includes the drafts of lost workers."""
        if delta.outcome is None or not self._earlier:
            return delta
        return delta._replace(outcome=self._earlier[delta.choice] + delta.outcome)

    def rest(self, request_id: str) -> GenerationRequest:
        """Return the request for the rest of an incomplete output.

        Args:
            request_id: a new id, because the old request may still exist on a worker.
        """
        begun = tuple(ResumedChoice(choice, tuple(ids)) for choice, ids in self._open.items())
        untouched = len(begun) == self._request.n and not any(one.output_ids for one in begun)
        resumed = () if untouched else begun
        return replace(self._request, request_id=request_id, resumed=resumed)
