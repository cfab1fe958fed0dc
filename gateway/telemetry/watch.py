"""One request watched from arrival to last byte: its figures, its span, its log line."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from enum import StrEnum

from backends.types import Delta, SpeculationOutcome
from gateway.dispatch import Placement
from gateway.telemetry.logs import log
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.tracing import Span
from policies.types import SpeculationPlan


class Ending(StrEnum):
    """How a request ended, for metrics and logs."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    FAILED = "failed"


class RequestWatch:
    """Counts what a request did. `end` must be called, and only its first call counts."""

    def __init__(
        self,
        metrics: Metrics,
        span: Span,
        endpoint: str,
        request_id: str,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begin now."""
        self.span = span
        self.request_id = request_id
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.outcome = SpeculationOutcome()
        self.plan: SpeculationPlan | None = None
        self.workers: str | None = None  # their ids
        self._metrics = metrics
        self._endpoint = endpoint
        self._clock = clock
        self._arrival_s = clock()
        self._first_s: float | None = None
        self._last_s = self._arrival_s
        self._n = 1  # choices of a prompt
        self._choices = 1
        self._finish_reasons: list[str] = []
        self._ended = False

    def placed(self, placements: Sequence[Placement]) -> None:
        """Record where some of a request's prompts go, about whose drafts nothing was decided."""
        tokens = sum(len(placed.request.prompt_ids) for placed in placements)
        self.prompt_tokens += tokens
        self._metrics.prompt(tokens)
        known = self.workers.split(",") if self.workers else []
        workers = [*known, *(placed.worker.worker_id for placed in placements)]
        self.workers = ",".join(dict.fromkeys(workers))
        self.span.set({"draftgate.worker_id": self.workers})

    def decided(self, placements: Sequence[Placement]) -> None:
        """Record what was decided; in span and log the first prompt's plan stands for all."""
        first = placements[0].request
        plan = first.speculation
        self.plan = plan
        self.workers = ",".join(dict.fromkeys(placed.worker.worker_id for placed in placements))
        self._n = first.n
        self._choices = first.n * len(placements)
        self.prompt_tokens = sum(len(placed.request.prompt_ids) for placed in placements)
        self._metrics.prompt(self.prompt_tokens)
        for placed in placements:
            decided = placed.request.speculation
            self._metrics.decided(decided.policy, decided.proposer)
        self.span.set(
            {
                "gen_ai.request.max_tokens": first.sampling.max_tokens,
                "gen_ai.request.temperature": first.sampling.temperature,
                "gen_ai.request.seed": str(first.sampling.seed),  # beyond an attribute's int64
                "gen_ai.request.choice.count": first.n,
                "draftgate.worker_id": self.workers,
                "draftgate.policy": plan.policy,
                "draftgate.speculation.mode": plan.mode.value,
                "draftgate.proposer": plan.proposer or "none",
                "draftgate.max_draft_tokens": plan.max_draft_tokens,
                "draftgate.reason": plan.reason,
                "draftgate.price": -1.0 if plan.price is None else plan.price,
            }
        )

    def observe(self, delta: Delta) -> None:
        """Record a delta as it passes to the client."""
        self._last_s = self._clock()
        if self._first_s is None and delta.text:
            self._first_s = self._last_s
            self._metrics.first_token(self._first_s - self._arrival_s)
            self.span.event("first_token")
        self.output_tokens += len(delta.token_ids)
        self._metrics.generated(len(delta.token_ids))
        if delta.finish_reason is not None:
            self._finish_reasons.append(delta.finish_reason.value)
            if delta.choice % self._n == 0:  # a prompt's further choices read what the first did
                self.cached_tokens += delta.cached_tokens
                self._metrics.cached(delta.cached_tokens)
        if delta.outcome is not None:
            self.outcome += delta.outcome
            self._metrics.speculated(delta.outcome)

    def end(self, ending: Ending, status: int, error: BaseException | None = None) -> None:
        """Record the end: the last byte, a cancel, or an error."""
        if self._ended:
            return
        self._ended = True
        seconds = self._clock() - self._arrival_s
        self._metrics.finished(self._endpoint, ending.value, seconds, self._tpot_s())
        self._end_span(ending, status, error)
        ttft_s = None if self._first_s is None else self._first_s - self._arrival_s
        log(
            logging.WARNING if ending is Ending.FAILED else logging.INFO,
            "request",
            id=self.request_id,
            endpoint=self._endpoint,
            status=status,
            ending=ending.value,
            seconds=seconds,
            ttft_s=ttft_s,
            worker=self.workers,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            proposer=None if self.plan is None else self.plan.proposer,
            drafted=self.outcome.num_drafted_tokens,
            accepted=self.outcome.num_accepted_tokens,
            reason=None if error is None else str(error) or type(error).__name__,
        )

    def _tpot_s(self) -> float | None:
        """Return the mean gap between tokens of a choice."""
        gaps = self.output_tokens / self._choices - 1
        if self._first_s is None or gaps <= 0:
            return None
        return (self._last_s - self._first_s) / gaps

    def _end_span(self, ending: Ending, status: int, error: BaseException | None) -> None:
        self.span.set(
            {
                "http.response.status_code": status,
                "gen_ai.usage.input_tokens": self.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": self.cached_tokens,
                "gen_ai.usage.output_tokens": self.output_tokens,
                "gen_ai.response.finish_reasons": ",".join(self._finish_reasons),
                "draftgate.ending": ending.value,
            }
        )
        if self.plan is not None:
            self._set_outcome()
        if error is not None and status >= 500:
            self.span.fail(type(error).__name__, str(error))
        self.span.end()

    def _set_outcome(self) -> None:
        self.span.set(
            {
                "draftgate.spec_steps": self.outcome.num_spec_steps,
                "draftgate.drafted_tokens": self.outcome.num_drafted_tokens,
                "draftgate.accepted_tokens": self.outcome.num_accepted_tokens,
                "draftgate.acceptance_histogram": str(list(self.outcome.acceptance_histogram)),
            }
        )
