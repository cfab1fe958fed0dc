"""One request watched from arrival to last byte: its figures, its span, its log line."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import StrEnum

from draftgate.backends.base import TokenUsage
from draftgate.backends.types import Delta, FinishReason, Phases, SpeculationOutcome, Task
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.placement import Placement
from draftgate.gateway.dispatch.run import Resume
from draftgate.gateway.errors import TooMany
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.logs import log
from draftgate.gateway.telemetry.metrics import Metrics
from draftgate.gateway.telemetry.outcomes import (
    count_outcome,
    decision_attributes,
    job_attributes,
    outcome_attributes,
    plan_attributes,
    resume_attributes,
)
from draftgate.gateway.telemetry.tracing import Attributes, AttributeValue, Span
from draftgate.policies.failover import Cause, GivenUp
from draftgate.policies.types import SpeculationPlan


class Ending(StrEnum):
    """How a request ended, for metrics and logs."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    FAILED = "failed"


class RequestWatch:
    """Counts what a request did. `end` must be called at the last byte; its first call counts."""

    def __init__(
        self,
        metrics: Metrics,
        span: Span,
        endpoint: str,
        operation: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin now.

        Args:
            endpoint: its path.
            operation: `gen_ai.operation.name`.
            clock: that of the spans.
        """
        self.span = span
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.outcome = SpeculationOutcome()
        self.plan: SpeculationPlan | None = None
        self.workers: list[str] = []  # their ids
        self.tenant: str | None = None
        self._metrics = metrics
        self._endpoint = endpoint
        self._operation = operation
        self._clock = clock
        self._arrival_s = clock()
        self._first_s: float | None = None
        self._last_s = self._arrival_s
        self._generated = metrics.amount(metric.GENERATION_TOKENS)
        self._recent = metrics.recent
        self._gaps = metrics.spread(metric.GAPS)
        self._latest_s: dict[int, float] = {}  # by choice
        self._begun_s: dict[int, float] = {}  # by choice, where the worker said when
        self._generates = False  # tokens
        self._n = 1  # choices of a prompt
        self._choices = 0  # of all prompts, once they are dispatched
        self._outputs = 0  # events of an upstream's
        self._resumes = 0
        self._finish_reasons: list[str] = []
        self._failure: tuple[Ending, int, BaseException] | None = None
        self._ended = False

    def parsed(self, job: Job, model: str, *, stream: bool) -> None:
        """Record what was asked for."""
        self._generates = job.task is Task.GENERATE
        self._n = job.n
        self._choices = job.n * len(job.prompts)
        self.prompt_tokens = sum(map(len, job.prompts))
        self.tenant = job.tenant or None
        if self.span.recording:
            self.span.set(
                {
                    "gen_ai.request.model": model,
                    "gen_ai.request.stream": stream,
                    "gen_ai.response.id": job.request_id,
                    "gen_ai.response.model": model,
                    **job_attributes(job),
                }
            )

    def forwarding(self, model: str, tenant: str, choices: int, *, stream: bool) -> None:
        """Record what was asked for of an upstream; without choices nothing is generated."""
        self._generates, self._choices = choices > 0, choices
        self.tenant = tenant or None
        self.span.set({"gen_ai.request.model": model, "gen_ai.request.stream": stream})

    def forwarded(self, worker_id: str, plan: SpeculationPlan | None) -> None:
        """Record which upstream answers, and what was decided about speculation, if anything."""
        self.workers, self.plan = [worker_id], plan
        if plan is not None and self.span.recording:
            self.span.set(plan_attributes(plan))

    def placed(self, placed: Placement) -> None:
        """Record where a prompt goes first; the plan of the first one stands in span and log."""
        tokens = len(placed.request.prompt_ids)
        self._metrics.observe(metric.PROMPT_LENGTH, tokens)
        self._metrics.observe(metric.TO_WORKER, self._clock() - self._arrival_s)
        self._metrics.add(metric.PROMPT_TOKENS, tokens)
        self._goes_to(placed)
        if self._generates:
            self._decided(placed)
        else:
            self.span.set({"draftgate.worker_id": ",".join(self.workers)})

    def resumed(self, resume: Resume) -> None:
        """Record that a prompt has lost its worker and goes on with another one."""
        self._resumes += 1
        self._goes_to(resume.placed)
        outcome = "same_class" if resume.same_numerics_class else "other_class"
        self._metrics.add(metric.RESUMES, 1, resume.cause.value, outcome)
        self.span.event("resume", resume_attributes(resume))
        log(
            logging.WARNING,
            "resumed",
            prompt=resume.index,
            cause=resume.cause.value,
            reason=resume.reason,
            from_worker=resume.lost.worker.worker_id,
            to_worker=resume.placed.worker.worker_id,
            kept_tokens=resume.kept_tokens,
            same_numerics_class=resume.same_numerics_class,
        )

    def given_up(self, cause: Cause, why: GivenUp) -> None:
        """Record that a prompt has lost its worker and does not go on."""
        self._metrics.add(metric.RESUMES, 1, cause.value, why.value)

    def _goes_to(self, placed: Placement) -> None:
        """Note where a prompt goes."""
        if placed.worker.worker_id not in self.workers:
            self.workers.append(placed.worker.worker_id)

    def _decided(self, placed: Placement) -> None:
        """Record what was decided about a prompt."""
        request, plan = placed.request, placed.request.speculation
        self._metrics.observe(metric.MAX_TOKENS, request.sampling.max_tokens)
        self._metrics.add(metric.DECISIONS, 1, plan.policy, plan.proposer or "none")
        if self.plan is None:
            self.plan = plan
            if self.span.recording:
                self.span.set(decision_attributes(placed))

    def observe(self, delta: Delta) -> None:
        """Record a delta as it passes to the client. Called for every one: keep it cheap."""
        now_s = self._clock()
        choice = delta.choice
        tokens = len(delta.token_ids)
        self.output_tokens += tokens
        self._generated.value += tokens
        self._recent.tokens += tokens
        latest_s = self._latest_s.get(choice)
        if latest_s is not None:
            self._gaps.observe(now_s - latest_s)
        self._latest_s[choice] = self._last_s = now_s
        if self._first_s is None and delta.text:
            self._first_s = now_s
            self._metrics.observe(metric.TTFT, now_s - self._arrival_s, self._operation)
            self._recent.first_token(now_s - self._arrival_s)
            self.span.event("first_token", at_s=now_s)
        if delta.phases is not None:
            self._phases(choice, delta.phases)
        if delta.finish_reason is not None:
            self._finished(delta, delta.finish_reason, now_s)

    def fail(self, ending: Ending, status: int, error: BaseException) -> None:
        """Note that the request ends badly; the client is told next, and `end` follows then."""
        self._failure = self._failure or (ending, status, error)

    def progressed(self, outputs: int) -> None:
        """Record that bytes of an upstream's answer pass to the client.

        Args:
            outputs: events of output so far.
        """
        if not self._generates:
            return
        self._last_s = self._clock()
        self._recent.tokens += outputs - self._outputs
        self._outputs = outputs
        if self._first_s is None:
            self._first_s = self._last_s
            ttft_s = self._first_s - self._arrival_s
            self._metrics.observe(metric.TTFT, ttft_s, self._operation)
            self._recent.first_token(ttft_s)
            self.span.event("first_token")

    def settled(self, usage: TokenUsage) -> None:
        """Record the tokens of an upstream's answer, once, when it is over."""
        self.prompt_tokens, self.cached_tokens, self.output_tokens = usage
        self._metrics.add(metric.PROMPT_TOKENS, usage.prompt)
        self._metrics.add(metric.CACHED_TOKENS, usage.cached)
        self._generated.value += usage.output
        self._recent.tokens += max(usage.output - self._outputs, 0)

    def end(self, ending: Ending, status: int, error: BaseException | None = None) -> None:
        """Record the end: the last byte, a cancel, or an error. What `fail` noted stands."""
        if self._ended:
            return
        self._ended = True
        if self._failure is not None:
            ending, status, error = self._failure
        seconds = self._clock() - self._arrival_s
        self._count_end(ending, seconds, error)
        if self.span.recording:
            self.span.set(self._figures(ending, status))
            if error is not None and status >= 500:
                self.span.fail(error)
        self.span.end()
        self._log_end(ending, status, seconds, error)

    def _phases(self, choice: int, phases: Phases) -> None:
        metrics = self._metrics
        metrics.observe(metric.WORKER_QUEUE, phases.scheduled_s - phases.queued_s)
        metrics.observe(metric.PREFILL, phases.first_token_s - phases.scheduled_s)
        self._begun_s.setdefault(choice, phases.first_token_s)  # a second time where it goes on

    def _finished(self, delta: Delta, reason: FinishReason, now_s: float) -> None:
        """Record a choice's last delta."""
        self._finish_reasons.append(reason.value)
        self._metrics.add(metric.CHOICES, 1, reason.value)
        if delta.choice % self._n == 0:  # a prompt's further choices read what the first did
            self.cached_tokens += delta.cached_tokens
            self._metrics.add(metric.CACHED_TOKENS, delta.cached_tokens)
        if delta.outcome is not None:
            self.outcome += delta.outcome
        begun_s = self._begun_s.get(delta.choice)
        if begun_s is not None:
            self._metrics.observe(metric.DECODE, now_s - begun_s)

    def _count_end(self, ending: Ending, seconds: float, error: BaseException | None) -> None:
        metrics = self._metrics
        wrong = "" if ending is Ending.FINISHED else ending.value
        if ending is not Ending.CANCELLED and error is not None:
            wrong = type(error).__name__
        metrics.add(metric.REQUESTS, 1, self._endpoint, ending.value)
        if isinstance(error, TooMany):
            metrics.add(metric.REFUSED, 1, error.kind)
        if self.tenant is not None:
            used = self.output_tokens + (self.prompt_tokens if self.workers else 0)
            metrics.add(metric.TENANT_TOKENS, used, self.tenant)
        metrics.observe(metric.DURATION, seconds, self._operation, wrong)
        unfinished = self._choices - len(self._finish_reasons)
        if unfinished > 0 and ending is not Ending.FINISHED:  # else an upstream knows why they did
            reason = "abort" if ending is Ending.CANCELLED else "error"
            metrics.add(metric.CHOICES, unfinished, reason)
        if self._generates:
            metrics.observe(metric.OUTPUT_LENGTH, self.output_tokens)
        tpot_s = self._tpot_s()
        if tpot_s is not None:
            metrics.observe(metric.TPOT, tpot_s, self._operation)
        self._recent.ended(tpot_s, self.output_tokens, self.outcome)
        count_outcome(metrics, self.outcome)

    def _tpot_s(self) -> float | None:
        """Return the mean gap between tokens of a choice."""
        gaps = self.output_tokens / max(self._choices, 1) - 1
        if self._first_s is None or gaps <= 0:
            return None
        return (self._last_s - self._first_s) / gaps

    def _ttft_s(self) -> float | None:
        return None if self._first_s is None else self._first_s - self._arrival_s

    def _figures(self, ending: Ending, status: int) -> Attributes:
        """Return what the span says of the end."""
        found: dict[str, AttributeValue] = {
            "http.response.status_code": status,
            "draftgate.ending": ending.value,
            "gen_ai.usage.input_tokens": self.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": self.cached_tokens,
            "gen_ai.usage.output_tokens": self.output_tokens,
        }
        if self.plan is not None:
            found.update(outcome_attributes(self.outcome))
        ttft_s = self._ttft_s()
        if ttft_s is not None:
            found["gen_ai.response.time_to_first_chunk"] = ttft_s
        if self._finish_reasons:
            found["gen_ai.response.finish_reasons"] = self._finish_reasons
        return found

    def _log_end(
        self, ending: Ending, status: int, seconds: float, error: BaseException | None
    ) -> None:
        log(
            logging.WARNING if ending is Ending.FAILED else logging.INFO,
            "request",
            endpoint=self._endpoint,
            status=status,
            ending=ending.value,
            seconds=seconds,
            ttft_s=self._ttft_s(),
            worker=",".join(self.workers) or None,
            resumes=self._resumes or None,
            tenant=self.tenant,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            proposer=None if self.plan is None else self.plan.proposer,
            drafted=self.outcome.num_drafted_tokens,
            accepted=self.outcome.num_accepted_tokens,
            error_type=None if error is None else type(error).__name__,
            param=getattr(error, "param", None),
            # A refusal may quote what the client sent: the client is told, the log is not.
            reason=str(error) if ending is Ending.FAILED else None,
        )
