"""The observation of one request, for its metrics, span and log line."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable

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
    outcome_attributes,
    plan_attributes,
    resume_attributes,
)
from draftgate.gateway.errors import Overloaded, QueueTimeout, TooMany
from draftgate.gateway.logs import is_logged, log, log_fields
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.answer_scan import AnswerScan
from draftgate.gateway.telemetry.ending import CANCELLED, FAILED, FINISHED, Ending
from draftgate.gateway.telemetry.request_series import RequestSeries
from draftgate.gateway.tracing import Attributes, AttributeValue, Span
from draftgate.policies.resilience.failover import Cause
from draftgate.policies.types import ANYTIME, ServiceLevel, SpeculationPlan


class RequestWatch:
    """An observer of one request, from its arrival to its last byte.

    The caller must call `end`, and only the first call counts. Most of what it observes is counted
    in the metrics later (`RequestSeries.fold`).

    Attributes:
        workers: ids of the workers that ran the request, in order.
        plan: the speculation plan of its first prompt.
        outcome: the outcome of speculation, summed over the choices that have finished, and after
            the end over all choices.
        cost_usd: the cost of an upstream's response in USD, or None without a known cost.
    """

    prompt_tokens = cached_tokens = output_tokens = 0
    outcome = NO_OUTCOME
    plan: SpeculationPlan | None = None
    tenant: str | None = None
    cost_usd: float | None = None
    _service = ANYTIME
    _adapter = ""  # the name of its LoRA adapter
    _ttft_s: float | None = None
    _decode_s = 0.0  # on the last worker, of the finished choices
    _generates = False
    _n = 1  # choices per prompt
    _choices = 0  # choices of all prompts, 0 before dispatch
    _output_events = 0  # output events of an upstream
    _resumes = _preemptions = 0
    _fallback: Fallback | None = None
    _prefill_worker: str | None = None  # which computed the prompt for another upstream
    _failure: tuple[Ending, int, BaseException | None] | None = None
    _ending: Ending | None = None  # once it has ended
    _seconds = 0.0  # from its arrival to its end
    _error: type[BaseException] | None = None
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
        self.span = span
        self.workers: list[str] = []
        self._series = series
        self._endpoint = endpoint
        self._operation = operation
        self._clock = clock
        self._arrival_s = self._last_s = clock()  # time of the last output of an upstream
        self._latest_s: dict[int, float] = {}  # time of the last output, by choice
        self._drafts: dict[int, list[tuple[int, int]]] = defaultdict(list)  # of the open choices
        # Times of the first token on each of its workers, by choice, as the workers record them.
        self._first_tokens_s: dict[int, list[float]] = {}
        self._finish_reasons: list[str] = []

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
                    self._fallback = event
                elif isinstance(event, Prefill) and event.end is PrefillEnd.COMPUTED:
                    self._prefill_worker = event.worker_id
                elif isinstance(event, Preempted):
                    self._preemptions += 1
                    self._add_worker(event.source)
                self._series.record(event)

    def _placed(self, decision: Decision) -> None:
        """Record the first worker of a prompt.

        Span and log show the plan of the first prompt.
        """
        request, plan = decision.request, decision.plan
        self._series.placed.append((request.prompt_tokens, self._clock() - self._arrival_s))
        self._add_worker(decision.worker_id)
        if self._generates:
            self._series.plans.append((request.max_tokens, plan))
            if self.plan is None:
                self.plan = plan
                if self.span.recording:
                    self.span.set(decision_attributes(decision))

    def _resumed(self, resume: Resume) -> None:
        """Record that a prompt lost its worker and continues on another worker."""
        self._resumes += 1
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
            self._first_tokens_s.setdefault(choice, []).append(phases.first_token_s)
        if delta.finish_reason is None:
            return
        self._finish_reasons.append(delta.finish_reason)
        self._drafts.pop(choice, None)
        if delta.outcome is not None:
            self.outcome += delta.outcome
        # The other choices of a prompt share the KV of the first choice.
        cached = 0 if choice % self._n else delta.cached_tokens
        self.cached_tokens += cached
        series.cached_tokens.value += cached
        firsts_s, decode_s = self._first_tokens_s.get(choice), None
        if firsts_s:
            decode_s = self._latest_s[choice] - firsts_s[0]
            # Only the last worker reports the time that drafts saved.
            self._decode_s += self._latest_s[choice] - firsts_s[-1]
        series.finished.append((delta.finish_reason, decode_s))

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
        self._series.new_events += output_events - self._output_events
        self._output_events = output_events
        if self._ttft_s is None:
            self._first_output(self._last_s)

    def answered(self, answer: AnswerScan) -> None:
        """Record the id, the model and the finish reasons of an upstream's response."""
        self._finish_reasons += answer.finish_reasons
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
        if self._ending is not None:
            return
        if self._failure is not None:
            ending, status, error = self._failure
            self._failure = None  # frees what the traceback refers to
        self._ending = ending
        for drafts in self._drafts.values():  # the output of unfinished choices counts as well
            self.outcome += outcome_of(drafts)
        self._seconds = self._clock() - self._arrival_s
        if error is not None:
            self._error = type(error)
            if isinstance(error, TooMany):
                self._refusal = error.kind
        self._series.add_ended(self._count)
        if self.span.recording:
            self.span.set(self._end_attributes(ending, status))
            if error is not None and status >= 500:
                self.span.fail(error)
            self.span.end()
        self._log_end(ending, status, error)

    def _count(self) -> None:
        """Count the request, which has ended, in the metrics."""
        metrics, series, ending = self._series.metrics, self._series, self._ending
        assert ending is not None
        ended = str(ending)
        error_type = "" if ending is FINISHED else ended
        if ending is not CANCELLED and self._error is not None:
            error_type = self._error.__name__
        metrics.add(metric.REQUESTS, 1, self._endpoint, ended)
        if self._adapter:
            metrics.add(metric.ADAPTER_REQUESTS, 1, self._adapter, ended)
        if self._refusal is not None:
            metrics.add(metric.REFUSED, 1, self._refusal)
        # Most responses of an upstream are not streamed, and so have unknown times.
        unknown = self._ttft_s is None and ending is FINISHED and self._generates
        tpot_s = None if unknown else self._tpot_s()
        met = None if unknown else ending.meets(self._service, self._ttft_s, tpot_s)
        if met is not None:
            series.recent.add_judged(met=met)
        elif self._error is not None and issubclass(self._error, Overloaded | QueueTimeout):
            series.recent.add_judged(met=False)
        if self.tenant is not None:
            self._count_tenant(self.tenant, ending, met)
        metrics.observe(metric.DURATION, self._seconds, self._operation, error_type)
        unfinished = self._choices - len(self._finish_reasons)
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

    def _add_worker(self, worker_id: str) -> None:
        if worker_id not in self.workers:
            self.workers.append(worker_id)

    def _first_output(self, now_s: float) -> None:
        ttft_s = self._ttft_s = now_s - self._arrival_s
        self._series.first_outputs.append((self._operation, ttft_s))
        if self.span.recording:
            self.span.event("first_token", at_s=now_s)

    def _count_tenant(self, tenant: str, ending: Ending, met: bool | None) -> None:
        """Count the tokens, latency, refusal and SLO of a tenant's request."""
        metrics, prompt_tokens = self._series.metrics, self.prompt_tokens if self.workers else 0
        metrics.add(metric.TENANT_TOKENS, prompt_tokens + self.output_tokens, tenant)
        if self._refusal is not None:
            metrics.add(metric.TENANT_REFUSED, 1, tenant, self._refusal)
        if self._ttft_s is not None:
            metrics.observe(metric.TENANT_TTFT, self._ttft_s, tenant)
        if ending is FINISHED:
            metrics.observe(metric.TENANT_DURATION, self._seconds, tenant)
        if met is not None:
            metrics.add(metric.TENANT_SLO, 1, tenant, "met" if met else "missed")

    def _tpot_s(self) -> float | None:
        """Return the mean time between the tokens of a choice.

        It is None if all tokens arrived at the same time, because nothing was measured.
        """
        gaps = self.output_tokens / max(self._choices, 1) - 1
        if self._ttft_s is None or gaps <= 0:
            return None
        seconds = (
            max(self._latest_s.values(), default=self._last_s) - self._arrival_s - self._ttft_s
        )
        return seconds / gaps if seconds > 0 else None

    def _end_attributes(self, ending: Ending, status: int) -> Attributes:
        found: dict[str, AttributeValue] = {
            "http.response.status_code": status,
            "draftgate.ending": ending.value,
            "gen_ai.usage.input_tokens": self.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": self.cached_tokens,
            "gen_ai.usage.output_tokens": self.output_tokens,
        }
        if self.workers:
            found["draftgate.worker_id"] = ",".join(self.workers)
        if self.plan is not None:
            found.update(outcome_attributes(self.outcome))
        if self._prefill_worker is not None:
            found["draftgate.prefill_worker_id"] = self._prefill_worker
        if self.cost_usd is not None:
            found["draftgate.cost_usd"] = self.cost_usd
        if self._ttft_s is not None:
            found["gen_ai.response.time_to_first_chunk"] = self._ttft_s
        if self._finish_reasons:
            found["gen_ai.response.finish_reasons"] = list(map(str, self._finish_reasons))
        return found

    def _log_end(self, ending: Ending, status: int, error: BaseException | None) -> None:
        level = logging.WARNING if ending is FAILED else logging.INFO
        if not is_logged(level):
            return
        plan = self.plan
        fields = {
            "endpoint": self._endpoint,
            "status": status,
            "ending": str(ending),
            "seconds": self._seconds,
            "ttft_s": self._ttft_s,
            "worker": ",".join(self.workers) or None,
            "prefill_worker": self._prefill_worker,
            "resumes": self._resumes or None,
            "preemptions": self._preemptions or None,
            "fallback": self._fallback and self._fallback.reason,
            "model": self._fallback and self._fallback.model,
            "tenant": self.tenant,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "cost_usd": self.cost_usd,
            "proposer": None if plan is None else plan.proposer,
            "drafted": self.outcome.num_drafted_tokens,
            "accepted": self.outcome.num_accepted_tokens,
        }
        if error is not None:
            fields["error_type"] = type(error).__name__
            fields["param"] = getattr(error, "param", None)
            if ending is FAILED:
                # The message of a rejection may quote the request, which no log may contain.
                fields["reason"] = str(error)
        log_fields(level, "request", fields)
