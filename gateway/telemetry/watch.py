"""The observation of one request, for its metrics, span and log line."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from enum import StrEnum

from draftgate.backends.base import TokenUsage
from draftgate.backends.types import NO_OUTCOME, Delta, FinishReason, Phases, Task, outcome_of
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.kv_pulls import KvFetch
from draftgate.gateway.dispatch.placement import Placement
from draftgate.gateway.dispatch.run import Move, Resume
from draftgate.gateway.dispatch.span_attributes import (
    decision_attributes,
    job_attributes,
    outcome_attributes,
    plan_attributes,
    resume_attributes,
)
from draftgate.gateway.errors import Overloaded, QueueTimeout, TooMany
from draftgate.gateway.logs import is_logged, log, log_fields
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.answer_scan import AnswerScan
from draftgate.gateway.telemetry.request_series import RequestSeries
from draftgate.gateway.tracing import Attributes, AttributeValue, Span
from draftgate.policies.moves import MoveEnd
from draftgate.policies.resilience.failover import Cause, GivenUp
from draftgate.policies.types import ANYTIME, ServiceLevel, SpeculationPlan


class Ending(StrEnum):
    """The way a request ended, in metrics and logs."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    FAILED = "failed"


class RequestWatch:
    """An observer of one request, from its arrival to its last byte.

    The caller must call `end`, and only the first call counts.

    Attributes:
        workers: ids of the workers that ran the request, in order.
        plan: the speculation plan of its first prompt.
        outcome: the outcome of speculation, summed over the choices that have finished, and after
            the end over all choices.
    """

    def __init__(
        self,
        series: RequestSeries,
        span: Span,
        endpoint: str,
        operation: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Record a request that arrives now.

        Args:
            endpoint: path of the endpoint.
            operation: `gen_ai.operation.name`.
            clock: the clock of the spans.
        """
        self.span = span
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.outcome = NO_OUTCOME
        self.plan: SpeculationPlan | None = None
        self.workers: list[str] = []
        self.tenant: str | None = None
        self._service = ANYTIME
        self._adapter = ""  # the name of its LoRA adapter
        self.use(series)
        self._endpoint = endpoint
        self._operation = operation
        self._clock = clock
        self._arrival_s = clock()
        self._last_s = self._arrival_s  # time of the last output of an upstream
        self._ttft_s: float | None = None
        self._latest_s: dict[int, float] = {}  # time of the last output, by choice
        self._drafts = defaultdict[int, list[tuple[int, int]]](list)  # of the open choices
        # Times of the first token on each of its workers, by choice, as the workers record them.
        self._first_tokens_s = defaultdict[int, list[float]](list)
        self._decode_s = 0.0  # on the last worker, of the finished choices
        self._generates = False
        self._n = 1  # choices per prompt
        self._choices = 0  # choices of all prompts, 0 before dispatch
        self._output_events = 0  # output events of an upstream
        self._resumes = 0
        self._finish_reasons: list[str] = []
        self._failure: tuple[Ending, int, BaseException | None] | None = None
        self._ended = False

    def use(self, series: RequestSeries) -> None:
        """Record the request in the metrics of its model."""
        self._series = series
        self._metrics = series.metrics
        self._recent = series.metrics.recent

    def parsed(self, job: Job, model: str, *, stream: bool) -> None:
        """Record the parameters of the request."""
        self._generates = job.task is Task.GENERATE
        self._n = job.n
        self._choices = job.n * len(job.prompts)
        self.prompt_tokens = sum(map(len, job.prompts))
        self.tenant = job.tenant or None
        self._service = job.service
        self._adapter = model if job.adapter else ""
        if self.span.recording:
            self.span.set(
                {
                    "gen_ai.request.model": model,
                    "gen_ai.request.stream": stream,
                    "gen_ai.response.model": model,
                    **job_attributes(job),
                }
            )

    def responds(self, response_id: str) -> None:
        """Record the id of the response, as the client gets it."""
        if self.span.recording:
            self.span.set({"gen_ai.response.id": response_id})

    def forwarding(
        self, model: str, tenant: str, service: ServiceLevel, choices: int, *, stream: bool
    ) -> None:
        """Record the parameters of a request for an upstream.

        Args:
            service: its latency targets.
            choices: number of choices, or 0 for an embedding request.
        """
        self._generates, self._choices = choices > 0, choices
        self.tenant = tenant or None
        self._service = service
        self.span.set({"gen_ai.request.model": model, "gen_ai.request.stream": stream})

    def forwarded(self, worker_id: str, plan: SpeculationPlan | None) -> None:
        """Record the upstream that responds, and the speculation plan, if any."""
        self.workers, self.plan = [worker_id], plan
        if plan is not None and self.span.recording:
            self.span.set(plan_attributes(plan))

    def placed(self, placed: Placement) -> None:
        """Record the first worker of a prompt.

        Span and log show the plan of the first prompt.
        """
        request, plan = placed.request, placed.request.speculation
        tokens = len(request.prompt_ids)
        series = self._series
        series.prompt_length.observe(tokens)
        series.to_worker.observe(self._clock() - self._arrival_s)
        series.prompt_tokens.value += tokens
        self._add_worker(placed)
        if not self._generates:
            self.span.set({"draftgate.worker_id": ",".join(self.workers)})
            return
        series.max_tokens.observe(request.sampling.max_tokens)
        self._metrics.add(metric.DECISIONS, 1, plan.policy, plan.proposer or "none")
        if self.plan is None:
            self.plan = plan
            if self.span.recording:
                self.span.set(decision_attributes(placed))

    def resumed(self, resume: Resume) -> None:
        """Record that a prompt lost its worker and continues on another worker."""
        self._resumes += 1
        self._add_worker(resume.placed)
        outcome = "same_class" if resume.same_numerics_class else "other_class"
        self._metrics.add(metric.RESUMES, 1, resume.cause.value, outcome)
        self.span.event("resume", resume_attributes(resume))
        log(
            logging.INFO if resume.cause is Cause.MOVED else logging.WARNING,
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
        """Record that a prompt lost its worker and is not resumed."""
        self._metrics.add(metric.RESUMES, 1, cause.value, why.value)

    def fetched(self, fetch: KvFetch) -> None:
        """Record whether the KV blocks of a prefix were fetched."""
        end = "none" if fetch.end is None else fetch.end.value
        self._metrics.add(metric.KV_FETCHES, 1, fetch.cause.value, fetch.decision.reason.value, end)
        self._metrics.add(metric.KV_FETCHED, fetch.num_bytes)

    def moved(self, move: Move) -> None:
        """Record the end of a move."""
        self._metrics.add(metric.MOVES, 1, move.reason.value, move.end.value)
        if move.gap_s is not None:
            self._metrics.observe(metric.MOVE_GAP, move.gap_s)
        if move.end is MoveEnd.REJECTED:
            log(
                logging.ERROR,
                "a worker computed other tokens than the source of a move",
                prompt=move.index,
                from_worker=move.source,
                to_worker=move.sink,
                verified_tokens=move.verified_tokens,
            )

    def observe(self, delta: Delta) -> None:
        """Record a delta on its way to the client."""
        self.observe_text(delta)
        if delta.phases is not None:
            self._observe_phases(delta.choice, delta.phases)
        if delta.finish_reason is not None:
            self._finish_choice(delta, delta.finish_reason, self._latest_s[delta.choice])

    def observe_text(self, delta: Delta) -> None:
        """Record a delta of nothing but tokens and text, as `observe` does.

        This method must be cheap, because it runs for every delta.
        """
        now_s = self._clock()
        choice, tokens, series = delta.choice, len(delta.token_ids), self._series
        self.output_tokens += tokens
        series.new_tokens += tokens
        latest_s = self._latest_s.get(choice)
        if latest_s is not None:
            series.new_gaps_s.append(now_s - latest_s)
        self._latest_s[choice] = now_s
        if delta.drafts:
            self._drafts[choice] += delta.drafts
        if self._ttft_s is None and delta.text:
            self._first_output(now_s)

    def progressed(self, output_events: int) -> None:
        """Record that events of an upstream's stream pass to the client.

        A response that is not streamed has no TTFT, because the upstream does not report it.

        Args:
            output_events: number of events with output so far, at least 1.
        """
        if not self._generates:
            return
        self._last_s = self._clock()
        self._recent.tokens += output_events - self._output_events
        self._output_events = output_events
        if self._ttft_s is None:
            self._first_output(self._last_s)

    def answered(self, answer: AnswerScan) -> None:
        """Record the id, the model and the finish reasons of an upstream's response."""
        self._finish_reasons += answer.finish_reasons
        if answer.response_id is not None:
            self.responds(answer.response_id)
        if answer.model is not None:
            self.span.set({"gen_ai.response.model": answer.model})

    def settled(self, usage: TokenUsage) -> None:
        """Record the tokens of an upstream's response, once, after its end."""
        self.prompt_tokens, self.cached_tokens, self.output_tokens = usage
        self._series.prompt_tokens.value += usage.prompt
        self._series.cached_tokens.value += usage.cached
        self._series.generation_tokens.value += usage.output
        self._recent.tokens += max(usage.output - self._output_events, 0)

    def fail(self, ending: Ending, status: int, error: BaseException | None) -> None:
        """Keep the first failure for `end`, which is called after the client has been informed."""
        self._failure = self._failure or (ending, status, error)

    def end(self, ending: Ending, status: int, error: BaseException | None = None) -> None:
        """Record the end of the request.

        The request ends with its last byte, a cancel or an error. A failure kept by `fail` takes
        precedence.

        Args:
            status: the HTTP status.
        """
        if self._ended:
            return
        self._ended = True
        if self._failure is not None:
            ending, status, error = self._failure
        for drafts in self._drafts.values():  # the output of unfinished choices counts as well
            self.outcome += outcome_of(drafts)
        seconds = self._clock() - self._arrival_s
        self._count_end(ending, seconds, error)
        if self.span.recording:
            self.span.set(self._end_attributes(ending, status))
            if error is not None and status >= 500:
                self.span.fail(error)
        self.span.end()
        self._log_end(ending, status, seconds, error)

    def _add_worker(self, placed: Placement) -> None:
        if placed.worker.worker_id not in self.workers:
            self.workers.append(placed.worker.worker_id)

    def _first_output(self, now_s: float) -> None:
        self._ttft_s = now_s - self._arrival_s
        self._metrics.observe(metric.TTFT, self._ttft_s, self._operation)
        self._recent.add_ttft(self._ttft_s)
        self.span.event("first_token", at_s=now_s)

    def _observe_phases(self, choice: int, phases: Phases) -> None:
        self._series.worker_queue.observe(phases.scheduled_s - phases.queued_s)
        self._series.prefill.observe(phases.first_token_s - phases.scheduled_s)
        self._first_tokens_s[choice].append(phases.first_token_s)

    def _finish_choice(self, delta: Delta, reason: FinishReason, now_s: float) -> None:
        self._finish_reasons.append(reason.value)
        self._metrics.add(metric.CHOICES, 1, reason.value)
        # The other choices of a prompt share the KV of the first choice.
        if delta.choice % self._n == 0:
            self.cached_tokens += delta.cached_tokens
            self._series.cached_tokens.value += delta.cached_tokens
        self._drafts.pop(delta.choice, None)
        if delta.outcome is not None:
            self.outcome += delta.outcome
        first_tokens_s = self._first_tokens_s.get(delta.choice)
        if first_tokens_s:
            self._series.decode.observe(now_s - first_tokens_s[0])
            # Only the last worker reports the time that drafts saved.
            self._decode_s += now_s - first_tokens_s[-1]

    def _count_end(self, ending: Ending, seconds: float, error: BaseException | None) -> None:
        metrics = self._metrics
        error_type = "" if ending is Ending.FINISHED else ending.value
        if ending is not Ending.CANCELLED and error is not None:
            error_type = type(error).__name__
        metrics.add(metric.REQUESTS, 1, self._endpoint, ending.value)
        if self._adapter:
            metrics.add(metric.ADAPTER_REQUESTS, 1, self._adapter, ending.value)
        if isinstance(error, TooMany):
            metrics.add(metric.REFUSED, 1, error.kind)
        tpot_s = self._tpot_s()
        met: bool | None = None
        if ending is Ending.FAILED:
            met = False if self._service.has_targets else None
        # A response of an upstream that was not streamed has unknown times.
        elif ending is Ending.FINISHED and not (self._generates and self._ttft_s is None):
            met = self._service.are_met(self._ttft_s, tpot_s)
        if met is not None:
            self._recent.add_judged(met=met)
        elif isinstance(error, Overloaded | QueueTimeout):
            self._recent.add_judged(met=False)
        if self.tenant is not None:
            self._count_tenant(self.tenant, ending, seconds, met, error)
        metrics.observe(metric.DURATION, seconds, self._operation, error_type)
        unfinished = self._choices - len(self._finish_reasons)
        # The finish reasons of a finished request at an upstream are unknown here.
        if unfinished > 0 and ending is not Ending.FINISHED:
            reason = "abort" if ending is Ending.CANCELLED else "error"
            metrics.add(metric.CHOICES, unfinished, reason)
        if self._generates:
            self._series.output_length.observe(self.output_tokens)
        if tpot_s is not None:
            metrics.observe(metric.TPOT, tpot_s, self._operation)
        self._recent.add_ended(tpot_s, self.output_tokens, self.outcome)
        self._series.count_speculation(self.outcome, self.tenant or "", self._decode_s)

    def _count_tenant(
        self,
        tenant: str,
        ending: Ending,
        seconds: float,
        met: bool | None,
        error: BaseException | None,
    ) -> None:
        """Count the tokens, latency, refusal and SLO of a tenant's request."""
        metrics = self._metrics
        used = self.output_tokens + (self.prompt_tokens if self.workers else 0)
        metrics.add(metric.TENANT_TOKENS, used, tenant)
        if isinstance(error, TooMany):
            metrics.add(metric.TENANT_REFUSED, 1, tenant, error.kind)
        if self._ttft_s is not None:
            metrics.observe(metric.TENANT_TTFT, self._ttft_s, tenant)
        if ending is Ending.FINISHED:
            metrics.observe(metric.TENANT_DURATION, seconds, tenant)
        if met is not None:
            metrics.add(metric.TENANT_SLO, 1, tenant, "met" if met else "missed")

    def _tpot_s(self) -> float | None:
        """Return the mean time between the tokens of a choice.

        It is None if all tokens arrived at the same time, because nothing was measured.
        """
        gaps = self.output_tokens / max(self._choices, 1) - 1
        if self._ttft_s is None or gaps <= 0:
            return None
        last_s = max(self._latest_s.values(), default=self._last_s)
        seconds = last_s - self._arrival_s - self._ttft_s
        return seconds / gaps if seconds > 0 else None

    def _end_attributes(self, ending: Ending, status: int) -> Attributes:
        found: dict[str, AttributeValue] = {
            "http.response.status_code": status,
            "draftgate.ending": ending.value,
            "gen_ai.usage.input_tokens": self.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": self.cached_tokens,
            "gen_ai.usage.output_tokens": self.output_tokens,
        }
        if self.plan is not None:
            found.update(outcome_attributes(self.outcome))
        if self._ttft_s is not None:
            found["gen_ai.response.time_to_first_chunk"] = self._ttft_s
        if self._finish_reasons:
            found["gen_ai.response.finish_reasons"] = self._finish_reasons
        return found

    def _log_end(
        self, ending: Ending, status: int, seconds: float, error: BaseException | None
    ) -> None:
        level = logging.WARNING if ending is Ending.FAILED else logging.INFO
        if not is_logged(level):
            return
        plan = self.plan
        fields = {
            "endpoint": self._endpoint,
            "status": status,
            "ending": ending.value,
            "seconds": seconds,
            "ttft_s": self._ttft_s,
            "worker": ",".join(self.workers) or None,
            "resumes": self._resumes or None,
            "tenant": self.tenant,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "proposer": None if plan is None else plan.proposer,
            "drafted": self.outcome.num_drafted_tokens,
            "accepted": self.outcome.num_accepted_tokens,
        }
        if error is not None:
            fields["error_type"] = type(error).__name__
            fields["param"] = getattr(error, "param", None)
            if ending is Ending.FAILED:
                # The message of a rejection may quote the request, which no log may contain.
                fields["reason"] = str(error)
        log_fields(level, "request", fields)
