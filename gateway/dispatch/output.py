"""The output of a prompt, which may continue on another worker."""

from __future__ import annotations

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


class PromptOutput:
    """The output of a prompt's choices so far, from all workers that ran them.

    Attributes:
        is_complete: whether every choice has ended.
        begun_s: time at which the first worker got the request, or None before.
        outcome: the sum of speculation of the choices that have ended.
    """

    is_complete = False
    begun_s: float | None = None
    outcome = NO_OUTCOME

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._open = {choice.choice: compact(choice.output_ids) for choice in request.choices}
        self._drafts: dict[int, list[tuple[int, int]]] = {}  # of the present worker, by choice
        self._earlier: dict[int, SpeculationOutcome] = {}  # before it, by choice
        self._ended_tokens = 0

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

    def add(self, delta: Delta) -> Delta:
        """Add a delta, and return it with the drafts of lost workers in its outcome, if any.

        The caller must pass every delta, in order.
        """
        choice = delta.choice
        if delta.drafts:
            self._drafts.setdefault(choice, []).extend(delta.drafts)
        if delta.finish_reason is None:
            self._open[choice].extend(delta.token_ids)
            return delta
        self._ended_tokens += len(self._open.pop(choice)) + len(delta.token_ids)
        self.is_complete = not self._open
        if delta.outcome is not None:
            if choice in self._earlier:
                delta = delta._replace(outcome=self._earlier[choice] + delta.outcome)
            assert delta.outcome is not None
            self.outcome += delta.outcome
        return delta

    @property
    def unfinished(self) -> SpeculationOutcome:
        """The drafts of the present worker for the open choices."""
        return outcome_of([d for choice in self._open for d in self._drafts.get(choice, ())])

    def lose_worker(self) -> None:
        """Keep the drafts of the open choices, whose outcome the worker no longer reports."""
        for choice in self._open:
            earlier = self._earlier.get(choice, NO_OUTCOME)
            self._earlier[choice] = earlier + outcome_of(self._drafts.get(choice, ()))
        self._drafts.clear()

    def rest(self, request_id: str) -> GenerationRequest:
        """Return the request for the rest of an incomplete output.

        Args:
            request_id: a new id, because the old request may still exist on a worker.
        """
        begun = tuple(ResumedChoice(choice, tuple(ids)) for choice, ids in self._open.items())
        untouched = len(begun) == self._request.n and not any(one.output_ids for one in begun)
        resumed = () if untouched else begun
        return replace(self._request, request_id=request_id, resumed=resumed)
