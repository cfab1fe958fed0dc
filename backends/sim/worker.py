"""A worker without text: what a simulation of many requests needs of `backends.core.worker`.

Text costs more than everything else that is simulated, and nobody reads it. What clients would see
is kept in a `Ledger` instead: when tokens came, and how many.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import count

from draftgate.backends.core.admission import Admission
from draftgate.backends.core.scheduler import Scheduler
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import StepPlan, StepResult
from draftgate.backends.types import Delta, FinishReason, GenerationRequest, Pace
from draftgate.policies.types import WorkerLoad


@dataclass(slots=True)
class Deliveries:
    """What came for a request: each time at which tokens came, and how many tokens that were.

    Attributes:
        scheduled_s: when it first was in a step; None before.
    """

    scheduled_s: float | None = None
    at_s: array[float] = field(default_factory=lambda: array("d"))
    tokens: array[int] = field(default_factory=lambda: array("H"))


class Ledger:
    """The deliveries of all requests that run, by their ids. Shared by the workers of a cluster.

    Attributes:
        came: of each request that was submitted and not taken.
    """

    def __init__(self) -> None:
        self.came: dict[str, Deliveries] = {}

    def take(self, request_id: str) -> Deliveries:
        """Return what came for a request, and forget it: it has ended."""
        return self.came.pop(request_id)


class TextlessWorker:
    """Requests and their choices on top of a scheduler.

    A choice gives two deltas: that it has begun, and its last, with all its tokens. Without text
    there are no stop strings and no grammars, and its deltas tell nothing of steps.
    """

    def __init__(self, scheduler: Scheduler, admission: Admission, ledger: Ledger) -> None:
        """Start empty; nobody else may use the scheduler."""
        self._scheduler = scheduler
        self.admission = admission
        self._ledger = ledger
        self._keys = count()
        self._requests: dict[str, list[Sequence]] = {}  # open requests and their open choices
        self._unscheduled: set[str] = set()  # open requests that were in no step yet

    def submit(self, request: GenerationRequest, now_s: float) -> None:
        """See `StepWorker`."""
        sequences = [Sequence.for_choice(next(self._keys), request, c) for c in request.choices]
        self._requests[request.request_id] = sequences
        self._unscheduled.add(request.request_id)
        self._ledger.came[request.request_id] = Deliveries()
        for sequence in sequences:
            self._scheduler.add(sequence, now_s)

    def cancel(self, request_id: str) -> None:
        """See `StepWorker`."""
        self._unscheduled.discard(request_id)
        for sequence in self._requests.pop(request_id, ()):
            self._scheduler.finish(sequence, FinishReason.ABORT)

    def set_pace(self, request_id: str, pace: Pace) -> None:
        """See `StepWorker`."""
        for sequence in self._requests.get(request_id, ()):
            self._scheduler.set_pace(sequence, pace)

    def load(self) -> WorkerLoad:
        """See `StepWorker`."""
        return self._scheduler.load()

    def plan(self, now_s: float) -> StepPlan | None:
        """See `StepWorker`."""
        plan = self._scheduler.plan(now_s)
        if plan is not None and self._unscheduled:
            self._note_scheduled(plan, now_s)
        return plan

    def complete(self, plan: StepPlan, result: StepResult, now_s: float) -> list[tuple[str, Delta]]:
        """See `StepWorker`; of each choice only that it has begun, and its last delta."""
        news, came = [], self._ledger.came
        for sequence, tokens, *_ in self._scheduler.apply(plan, result, now_s):
            request_id = sequence.request.request_id
            deliveries = came[request_id]
            if not deliveries.at_s:
                news.append((request_id, Delta(sequence.choice, (), "")))
            deliveries.at_s.append(now_s)
            deliveries.tokens.append(len(tokens))
            if sequence.finish_reason is not None:
                self._forget(sequence)
                news.append((request_id, _last_delta(sequence)))
        return news

    def _note_scheduled(self, plan: StepPlan, now_s: float) -> None:
        for work in plan.work:
            request_id = work.sequence.request.request_id
            if request_id in self._unscheduled:
                self._unscheduled.remove(request_id)
                self._ledger.came[request_id].scheduled_s = now_s

    def _forget(self, sequence: Sequence) -> None:
        request_id = sequence.request.request_id
        open_choices = self._requests[request_id]
        open_choices.remove(sequence)
        if not open_choices:
            del self._requests[request_id]


def _last_delta(sequence: Sequence) -> Delta:
    return Delta(
        sequence.choice,
        tuple(sequence.token_ids[sequence.prompt_tokens :]),
        "",
        finish_reason=sequence.finish_reason,
        outcome=sequence.outcome(),
        cached_tokens=sequence.cached_tokens,
    )
