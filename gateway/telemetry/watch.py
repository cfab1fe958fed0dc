"""The observation of one request, for its metrics, span and log line."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from draftgate.backends.base import TokenUsage
from draftgate.backends.types import NO_OUTCOME, Delta, SpeculationOutcome, Task, outcome_of
from draftgate.gateway.dispatch.decisions import Decision
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.run import (
    Event,
    Fallback,
    Preempted,
    Prefill,
    PrefillEnd,
    Resume,
)
from draftgate.gateway.dispatch.span_attributes import (
    decision_attributes,
    job_attributes,
    plan_attributes,
    resume_attributes,
)
from draftgate.gateway.errors import Overloaded, QueueTimeout, TooMany
from draftgate.gateway.logs import log
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.answer_scan import AnswerScan
from draftgate.gateway.telemetry.ending import CANCELLED, FINISHED, Ending
from draftgate.gateway.telemetry.request_facts import MOST_STEPS, RequestFacts
from draftgate.gateway.telemetry.request_series import RequestSeries
from draftgate.gateway.tracing import Span
from draftgate.policies.resilience.failover import Cause
from draftgate.policies.types import ANYTIME, ServiceLevel, SpeculationPlan


class RequestWatch(RequestFacts):
    """An observer of one request, from its arrival to its last byte.

    The caller must call `end`, and only the first call counts. Most of what it observes is counted
    in the metrics later (`RequestSeries.fold`).
    """

    _service = ANYTIME
    _adapter = ""  # the name of its LoRA adapter
    _decode_s = 0.0  # on the last worker, of the finished choices
    _generates = False
    _n = 1  # choices per prompt
    _choices = 0  # choices of all prompts, 0 before dispatch
    _output_events = 0  # output events of an upstream
    _failure: tuple[Ending, int, BaseException | None] | None = None
    _refusal: str | None = None  # the kind of a `TooMany`

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
        super().__init__(clock)
        self.span = span
        self.endpoint = endpoint
        self._series = series
        self._operation = operation
        self._drafts: dict[int, list[tuple[int, int]]] = defaultdict(list)  # of the open choices

    def sent(self, client_id: str, account: str) -> None:
        """Record the `x-request-id` of the request, and the account that sent it."""
        self.client_id, self.account = client_id, account
        self.tenant = account or None

    def use(self, series: RequestSeries) -> None:
        """Record the request in the metrics of its model."""
        self._series = series

    def parsed(self, job: Job, model: str, *, stream: bool) -> None:
        """Record the parameters of the request."""
        self._generates = job.task is Task.GENERATE
        self._n = job.n
        self._choices = job.n * len(job.prompts)
        self.prompt_tokens = sum(map(len, job.prompts))
        self.tenant = job.tenant or None
        self.request_id = job.request_id
        if self.fallback is None:
            self.model = model
        self._service = job.service
        if job.adapter:
            self._adapter = model
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
        if self.fallback is None:
            self.model = model
        self._service = service
        if self.span.recording:
            self.span.set({"gen_ai.request.model": model, "gen_ai.request.stream": stream})

    def forwarded(self, worker_id: str, plan: SpeculationPlan | None) -> None:
        """Record the upstream that responds, and the speculation plan, if any."""
        self._add_worker(worker_id)
        self.plan = plan
        if plan is not None and self.span.recording:
            self.span.set(plan_attributes(plan))

    def __call__(self, event: Event) -> None:
        """Record an event of the dispatcher."""
        match event:
            case Decision():
                self._placed(event)
            case Resume():
                self._resumed(event)
            case SpeculationOutcome():  # of an upstream, by its own report
                self.outcome += event
            case _:
                if isinstance(event, Fallback):
                    self.fallback = event
                elif isinstance(event, Prefill) and event.end is PrefillEnd.COMPUTED:
                    self.prefill_worker = event.worker_id
                elif isinstance(event, Preempted):
                    self.preemptions += 1
                    self._add_worker(event.source)
                self._series.record(event)

    def _placed(self, decision: Decision) -> None:
        """Record the first worker of a prompt.

        Span and log show the plan of the first prompt.
        """
        request, plan = decision.request, decision.plan
        waited_s = self.clock() - self.arrival_s
        self._series.placed.append((request.prompt_tokens, waited_s))
        if self.waited_s is None:
            self.waited_s = waited_s
        self._add_worker(decision.worker_id)
        if self._generates:
            self._series.plans.append((request.max_tokens, plan))
            if self.plan is None:
                self.plan = plan
                if self.span.recording:
                    self.span.set(decision_attributes(decision))

    def _resumed(self, resume: Resume) -> None:
        """Record that a prompt lost its worker and continues on another worker."""
        self.resumes += 1
        self._add_worker(resume.source)
        self._add_worker(resume.sink)
        outcome = "same_class" if resume.same_numerics_class else "other_class"
        self._series.metrics.add(metric.RESUMES, 1, resume.cause.value, outcome)
        if self.span.recording:
            self.span.event("resume", resume_attributes(resume))
        log(
            logging.INFO if resume.cause in {Cause.MOVED, Cause.PREEMPTED} else logging.WARNING,
            "resumed",
            prompt=resume.index,
            cause=resume.cause.value,
            reason=resume.reason,
            from_worker=resume.source,
            to_worker=resume.sink,
            kept_tokens=resume.kept_tokens,
            same_numerics_class=resume.same_numerics_class,
        )

    def observe(self, delta: Delta) -> None:
        """Record a delta on its way to the client."""
        self.observe_text(delta)
        choice, phases, series = delta.choice, delta.phases, self._series
        if phases is not None:
            series.phases.append(phases)
            self.phases.setdefault(choice, []).append(phases)
        if delta.finish_reason is None:
            return
        self.finish_reasons.append(delta.finish_reason)
        self._keep_steps(self._drafts.pop(choice, ()))
        if delta.outcome is not None:
            self.outcome += delta.outcome
        # The other choices of a prompt share the KV of the first choice.
        cached = 0 if choice % self._n else delta.cached_tokens
        self.cached_tokens += cached
        series.cached_tokens.value += cached
        runs, decode_s = self.phases.get(choice), None
        if runs:
            decode_s = self.latest_s[choice] - runs[0].first_token_s
            # Only the last worker reports the time that drafts saved.
            self._decode_s += self.latest_s[choice] - runs[-1].first_token_s
        series.finished.append((delta.finish_reason, decode_s))

    def observe_text(self, delta: Delta) -> None:
        """Record a delta of nothing but tokens and text, as `observe` does.

        This method must be cheap, because it runs for every delta.
        """
        now_s = self.clock()
        choice, tokens, series = delta.choice, len(delta.token_ids), self._series
        self.output_tokens += tokens
        series.new_tokens += tokens
        latest_s = self.latest_s.get(choice)
        if latest_s is not None:
            series.new_gaps_s.append(now_s - latest_s)
        self.latest_s[choice] = now_s
        if delta.drafts:
            self._drafts[choice] += delta.drafts
        if self.ttft_s is None and delta.text:
            self._first_output(now_s)

    def progressed(self, output_events: int) -> None:
        """Record that events of an upstream's stream pass to the client.

        A response that is not streamed has no TTFT, because the upstream does not report it.

        Args:
            output_events: number of events with output so far, at least 1.
        """
        if not self._generates:
            return
        self.last_s = self.clock()
        self._series.new_events += output_events - self._output_events
        self._output_events = output_events
        if self.ttft_s is None:
            self._first_output(self.last_s)

    def answered(self, answer: AnswerScan) -> None:
        """Record the id, the model and the finish reasons of an upstream's response."""
        self.finish_reasons += answer.finish_reasons
        if answer.response_id is not None:
            self.responds(answer.response_id)
        if answer.model is not None and self.span.recording:
            self.span.set({"gen_ai.response.model": answer.model})

    def settled(self, usage: TokenUsage) -> None:
        """Record the tokens of an upstream's response, once, after its end."""
        self.prompt_tokens, self.cached_tokens, self.output_tokens = usage
        series = self._series
        series.prompt_tokens.value += usage.prompt
        series.cached_tokens.value += usage.cached
        series.generation_tokens.value += usage.output
        series.new_events += max(usage.output - self._output_events, 0)

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
        if self.ending is not None:
            return
        if self._failure is not None:
            ending, status, error = self._failure
            self._failure = None  # frees what the traceback refers to
        self.ending, self.status = ending, status
        for drafts in self._drafts.values():  # the output of unfinished choices counts as well
            self.outcome += outcome_of(drafts)
            self._keep_steps(drafts)
        self._drafts.clear()
        self.seconds = self.clock() - self.arrival_s
        if error is not None:
            self.note_error(ending, error)
            if isinstance(error, TooMany):
                self._refusal = error.kind
        self._series.add_ended(self._count)
        if self.span.recording:
            self.span.set(self.end_attributes())
            if error is not None and status >= 500:
                self.span.fail(error)
            self.span.end()
        self.log_end(error)

    def _count(self) -> None:
        """Count the request, which has ended, in the metrics."""
        metrics, series, ending = self._series.metrics, self._series, self.ending
        assert ending is not None
        ended = str(ending)
        error_type = "" if ending is FINISHED else ended
        if ending is not CANCELLED and self.error is not None:
            error_type = self.error.__name__
        metrics.add(metric.REQUESTS, 1, self.endpoint, ended)
        if self._adapter:
            metrics.add(metric.ADAPTER_REQUESTS, 1, self._adapter, ended)
        if self._refusal is not None:
            metrics.add(metric.REFUSED, 1, self._refusal)
        # Most responses of an upstream are not streamed, and so have unknown times.
        unknown = self.ttft_s is None and ending is FINISHED and self._generates
        tpot_s = None if unknown else self.tpot_s()
        met = None if unknown else ending.meets(self._service, self.ttft_s, tpot_s)
        if met is not None:
            series.recent.add_judged(met=met)
        elif self.error is not None and issubclass(self.error, Overloaded | QueueTimeout):
            series.recent.add_judged(met=False)
        if self.tenant is not None:
            self._count_tenant(self.tenant, ending, met)
        metrics.observe(metric.DURATION, self.seconds, self._operation, error_type)
        unfinished = self._choices - len(self.finish_reasons)
        # Those of a finished request at an upstream are unknown here.
        if unfinished > 0 and ending is not FINISHED:
            reason = "abort" if ending is CANCELLED else "error"
            metrics.add(metric.CHOICES, unfinished, reason)
        if self._generates:
            series.output_length.observe(self.output_tokens)
        if tpot_s is not None:
            metrics.observe(metric.TPOT, tpot_s, self._operation)
        series.recent.add_ended(tpot_s, self.output_tokens, self.outcome)
        if self._decode_s or self.outcome is not NO_OUTCOME:
            series.count_speculation(self.outcome, self.tenant or "", self._decode_s)

    def _keep_steps(self, drafts: Sequence[tuple[int, int]]) -> None:
        """Keep the first steps of a choice for its record."""
        self.steps += drafts[: MOST_STEPS - len(self.steps)]

    def _add_worker(self, worker_id: str) -> None:
        if worker_id not in self.workers:
            self.workers.append(worker_id)

    def _first_output(self, now_s: float) -> None:
        ttft_s = self.ttft_s = now_s - self.arrival_s
        self._series.first_outputs.append((self._operation, ttft_s))
        if self.span.recording:
            self.span.event("first_token", at_s=now_s)

    def _count_tenant(self, tenant: str, ending: Ending, met: bool | None) -> None:
        """Count the tokens, latency, refusal and SLO of a tenant's request."""
        metrics, prompt_tokens = self._series.metrics, self.prompt_tokens if self.workers else 0
        metrics.add(metric.TENANT_TOKENS, prompt_tokens + self.output_tokens, tenant)
        if self._refusal is not None:
            metrics.add(metric.TENANT_REFUSED, 1, tenant, self._refusal)
        if self.ttft_s is not None:
            metrics.observe(metric.TENANT_TTFT, self.ttft_s, tenant)
        if ending is FINISHED:
            metrics.observe(metric.TENANT_DURATION, self.seconds, tenant)
        if met is not None:
            metrics.add(metric.TENANT_SLO, 1, tenant, "met" if met else "missed")

    def tpot_s(self) -> float | None:
        """Return the mean time between the tokens of a choice.

        It is None if all tokens arrived at the same time, because nothing was measured.
        """
        gaps = self.output_tokens / max(self._choices, 1) - 1
        if self.ttft_s is None or gaps <= 0:
            return None
        seconds = max(self.latest_s.values(), default=self.last_s) - self.arrival_s - self.ttft_s
        return seconds / gaps if seconds > 0 else None
