"""A worker without text, for simulations of many requests.

Rendering text would cost more than all other parts of the simulation. `DeliveryLog` records the
times and token counts of deliveries, which suffice for latency metrics.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from draftgate.backends.core.accounting import Emission, StepDetails, VerifiedDraft, count_draft
from draftgate.backends.core.scheduler import Scheduler
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import StepPlan, StepResult
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import Delta, GenerationRequest


@dataclass(slots=True)
class Deliveries:
    """The token deliveries of a request.

    Attributes:
        scheduled_s: start of its first step, or None before that step.
        at_s: time of each delivery.
        tokens: number of tokens of each delivery.
    """

    scheduled_s: float | None = None
    at_s: array[float] = field(default_factory=lambda: array("d"))
    tokens: array[int] = field(default_factory=lambda: array("H"))


class DeliveryLog:
    """The deliveries of requests, shared by the workers of a simulation.

    Attributes:
        deliveries: deliveries by id of every request that was submitted and not popped.
    """

    def __init__(self) -> None:
        self.deliveries: dict[str, Deliveries] = {}

    def pop(self, request_id: str) -> Deliveries:
        """Return and forget the deliveries of a request that has ended."""
        return self.deliveries.pop(request_id)


class TextlessWorker(WorkerCore):
    """A worker that reports two deltas for each choice: at its beginning and at its end.

    The second delta has all tokens. The worker supports neither stop strings nor grammars, and its
    deltas have no details of steps.
    """

    def __init__(
        self, scheduler: Scheduler, tokenizer: Tokenizer, max_model_len: int, log: DeliveryLog
    ) -> None:
        super().__init__(scheduler, tokenizer, max_model_len)
        self._log = log
        self._unscheduled: set[str] = set()  # open requests that no step has contained

    def submit(
        self, request: GenerationRequest, now_s: float | None = None, adapter_slot: int = 0
    ) -> None:
        """See `WorkerCore`."""
        self._unscheduled.add(request.request_id)
        self._log.deliveries[request.request_id] = Deliveries()
        super().submit(request, now_s, adapter_slot)

    def _prepare(self, sequence: Sequence) -> None:
        """Create no text."""

    def cancel(self, request_id: str) -> None:
        """See `WorkerCore`."""
        self._unscheduled.discard(request_id)
        super().cancel(request_id)

    def plan(self, now_s: float | None = None) -> StepPlan | None:
        """See `WorkerCore`."""
        plan = super().plan(now_s)
        self._log_scheduled(plan, now_s)
        return plan

    def plan_ahead(self, plan: StepPlan, now_s: float | None = None) -> StepPlan | None:
        """See `WorkerCore`."""
        following = super().plan_ahead(plan, now_s)
        self._log_scheduled(following, now_s)
        return following

    def _log_scheduled(self, plan: StepPlan | None, now_s: float | None) -> None:
        """Record the first step of each request."""
        if plan is not None and self._unscheduled:
            for work in plan.work:
                request_id = work.sequence.request.request_id
                if request_id in self._unscheduled:
                    self._unscheduled.remove(request_id)
                    self._log.deliveries[request_id].scheduled_s = now_s

    def complete(
        self, plan: StepPlan, result: StepResult, now_s: float | None = None
    ) -> list[tuple[str, Delta]]:
        """See `WorkerCore`."""
        assert now_s is not None, "deliveries need a clock"
        deltas, log = [], self._log.deliveries
        for sequence, tokens, _, draft, _ in self.apply(plan, result, now_s):
            request_id = sequence.request.request_id
            deliveries = log[request_id]
            if not deliveries.at_s:
                deltas.append((request_id, Delta(sequence.choice, (), "")))
            deliveries.at_s.append(now_s)
            deliveries.tokens.append(len(tokens))
            if draft is not None:
                count_draft(sequence, draft, len(tokens))
            if sequence.finish_reason is not None:
                self._forget(sequence)
                deltas.append((request_id, _last_delta(sequence)))
        return deltas


class TokenWorker(WorkerCore):
    """A worker without text that reports the tokens of every step, as moves of requests need."""

    def _prepare(self, sequence: Sequence) -> None:
        """Create no text."""

    def render(self, emissions: list[Emission]) -> list[tuple[str, Delta]]:
        """See `WorkerCore`."""
        return [
            (sequence.request.request_id, self._tokens(sequence, token_ids, draft, details))
            for sequence, token_ids, _, draft, details in emissions
            if sequence.request.request_id in self._requests
        ]

    def _tokens(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        draft: VerifiedDraft | None,
        details: StepDetails | None,
    ) -> Delta:
        drafts = count_draft(sequence, draft, len(token_ids))
        phases = None if details is None else details.phases
        if sequence.finish_reason is None:
            return Delta(sequence.choice, token_ids, "", phases=phases, drafts=drafts)
        self._forget(sequence)
        return Delta(
            sequence.choice,
            token_ids,
            "",
            finish_reason=sequence.finish_reason,
            outcome=sequence.outcome(),
            cached_tokens=sequence.cached_tokens,
            phases=phases,
            drafts=drafts,
        )


def _last_delta(sequence: Sequence) -> Delta:
    return Delta(
        sequence.choice,
        tuple(sequence.token_ids[sequence.prompt_tokens :]),
        "",
        finish_reason=sequence.finish_reason,
        outcome=sequence.outcome(),
        cached_tokens=sequence.cached_tokens,
    )
