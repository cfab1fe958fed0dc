"""What is known of a request: the facts that its record, its span and its log line have in common.

A node keeps the facts of its latest requests in memory, without text. The live page lists them, and
shows each on a page of its own. Records are made when they are read, so requests pay nothing.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from draftgate.backends.types import NO_OUTCOME, Phases
from draftgate.gateway.dispatch.decisions import KEPT, Decision
from draftgate.gateway.dispatch.run import Fallback
from draftgate.gateway.dispatch.span_attributes import outcome_attributes
from draftgate.gateway.errors import TooMany
from draftgate.gateway.logs import is_logged, log_fields
from draftgate.gateway.telemetry.ending import CANCELLED, FAILED, Ending
from draftgate.gateway.tracing import NO_SPAN, Attributes, AttributeValue
from draftgate.policies.types import SpeculationPlan

MOST_STEPS: Final = 64
"""Maximum steps with drafts that a record lists. Those of 1000 requests take about 4 MB."""

MOST_SHARED: Final = 250
"""Maximum records that a process sends to the others each second. Encoding them takes a few
milliseconds. A process with more requests per second shares only the latest."""

RUNNING: Final = "running"
"""The ending of a request that has not ended."""


class RequestRecord(msgspec.Struct, frozen=True):
    """One of the latest requests.

    Attributes:
        request_id: the id of its decisions, which is its `x-request-id` if an upstream runs it.
        client_id: its `x-request-id`.
        model: the model that responds.
        workers: ids of the workers that ran it, in order.
        started_s: Unix time of its arrival.
        seconds: time from its arrival to its end, or until now.
        ending: a member of `Ending`, or `running`.
        status: the HTTP status, or None while it runs.
        ttft_s, tpot_s: its latencies in seconds, or None without them.
        saved_s: seconds that drafts saved, or lost if negative.
        cost_usd: the cost of the response, or None without a known price.
        error: the type of its error, or empty.
        reason: the message of its error, or empty if that may quote the request.
        trace_id: id of its trace, or None without one.
        requested_model: the model that the client has asked for, of which `model` is a fallback, or
            empty if both are the same.
        fallback: why another model responds, or empty.
    """

    request_id: str
    client_id: str
    endpoint: str
    model: str
    tenant: str
    workers: list[str]
    started_s: float
    seconds: float
    ending: str
    status: int | None
    ttft_s: float | None
    tpot_s: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    saved_s: float
    resumes: int
    preemptions: int
    cost_usd: float | None
    error: str
    reason: str
    trace_id: str | None
    requested_model: str = ""
    fallback: str = ""

    def mentions(self, text: str) -> bool:
        """Return whether a lower-case text occurs in an id, a name, the ending or the error."""
        names = (self.request_id, self.client_id, self.endpoint, self.model, self.tenant)
        others = (
            self.requested_model,
            self.ending,
            self.error,
            self.reason,
            self.trace_id or "",
        )
        return any(text in one.lower() for one in (*names, *self.workers, *others))


class RequestSpan(msgspec.Struct, frozen=True):
    """A phase of a request.

    Attributes:
        name: `queue` until a worker is chosen, and then `worker.queue`, `prefill` and `decode` as
            in traces, or `first token` and `stream` of an upstream.
        begin_s, end_s: seconds since the arrival of the request.
        choice: index of the choice, or None for all.
    """

    name: str
    begin_s: float
    end_s: float
    choice: int | None = None


class RecordedRequest(msgspec.Struct, frozen=True):
    """A request with its phases and steps.

    Attributes:
        steps: numbers of verified and of accepted draft tokens of its first steps with drafts.
    """

    record: RequestRecord
    spans: list[RequestSpan]
    steps: list[tuple[int, int]]


class RequestDetail(msgspec.Struct):
    """The response of `/records/{request_id}`.

    Attributes:
        decisions: its decisions, oldest first, with its moves.
    """

    record: RequestRecord
    spans: list[RequestSpan]
    steps: list[tuple[int, int]]
    decisions: list[Decision]


class RequestList(msgspec.Struct):
    """The response of `/records`.

    Attributes:
        records: the records that match, newest first.
        models, tenants, workers, endings: the values of all records.
    """

    records: list[RequestRecord]
    models: list[str]
    tenants: list[str]
    workers: list[str]
    endings: list[str]


class RequestFacts:
    """The facts about one request, which its watch collects.

    Attributes:
        client_id, request_id: as in `RequestRecord`.
        account: name of the account that sent it.
        workers: ids of the workers that ran the request, in order.
        plan: the speculation plan of its first prompt.
        outcome: the outcome of speculation, summed over the choices that have finished, and after
            the end over all choices.
        cost_usd: the cost of the response in USD, or None without a known price.
        arrival_s, waited_s: its arrival, and the seconds until it got its first worker.
        phases: the phases of each choice, on each of its workers.
        ending: how it has ended, or None.
        seconds: time from its arrival to its end.
        shared: whether other processes know it, and its end.
    """

    client_id = request_id = account = model = endpoint = ""
    prompt_tokens = cached_tokens = output_tokens = 0
    outcome = NO_OUTCOME
    plan: SpeculationPlan | None = None
    tenant: str | None = None
    cost_usd: float | None = None
    waited_s: float | None = None
    ttft_s: float | None = None
    resumes = preemptions = 0
    fallback: Fallback | None = None
    prefill_worker: str | None = None  # which computed the prompt for another upstream
    ending: Ending | None = None
    status = 0
    seconds = 0.0
    error: type[BaseException] | None = None
    reason = ""
    span = NO_SPAN
    shared = (False, False)

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.arrival_s = self.last_s = clock()  # time of the last output of an upstream
        self.workers: list[str] = []
        self.latest_s: dict[int, float] = {}  # time of the last output, by choice
        self.phases: dict[int, list[Phases]] = {}
        self.steps: list[tuple[int, int]] = []
        self.finish_reasons: list[str] = []

    def tpot_s(self) -> float | None:
        """Return the mean time between the tokens of a choice, or None if it is unknown."""
        return None

    def record(self) -> RequestRecord:
        """Return the record of the request as it is now."""
        age_s = self.clock() - self.arrival_s
        ended, outcome = self.ending is not None, self.outcome
        return RequestRecord(
            self.request_id or self.client_id,
            self.client_id,
            self.endpoint,
            self.model if self.fallback is None else self.fallback.model,
            self.account,
            self.workers[:],
            time.time() - age_s,
            self.seconds if ended else age_s,
            RUNNING if self.ending is None else self.ending.value,
            self.status if ended else None,
            self.ttft_s,
            self.tpot_s(),
            self.prompt_tokens,
            self.cached_tokens,
            self.output_tokens,
            outcome.num_drafted_tokens,
            outcome.num_accepted_tokens,
            outcome.saved_s,
            self.resumes,
            self.preemptions,
            self.cost_usd,
            "" if self.error is None or self.ending is CANCELLED else self.error.__name__,
            self.reason,
            self.span.trace_id,
            "" if self.fallback is None else self.model,
            "" if self.fallback is None else self.fallback.reason,
        )

    def recorded(self) -> RecordedRequest:
        """Return the record with phases and steps."""
        record = self.record()
        return RecordedRequest(record, list(self._spans(record)), self.steps[:])

    def _spans(self, record: RequestRecord) -> Iterator[RequestSpan]:
        """Yield the phases, in order of their begin."""
        if self.waited_s is not None:
            yield RequestSpan("queue", 0.0, self.waited_s)
        if self.ttft_s is not None and not self.phases:  # an upstream reports no phases
            yield RequestSpan("first token", self.waited_s or 0.0, self.ttft_s)
            yield RequestSpan("stream", self.ttft_s, record.seconds)
        found = [
            RequestSpan(name, begin_s - self.arrival_s, end_s - self.arrival_s, choice)
            for choice, runs in self.phases.items()
            for number, one in enumerate(runs)
            for name, begin_s, end_s in (
                ("worker.queue", one.queued_s, one.scheduled_s),
                ("prefill", one.scheduled_s, one.first_token_s),
                ("decode", one.first_token_s, self._decoded_s(choice, number)),
            )
        ]
        yield from sorted(found, key=lambda span: span.begin_s)

    def _decoded_s(self, choice: int, number: int) -> float:
        """Return the end of the decoding of a choice on one of its workers."""
        later = self.phases[choice][number + 1 :]
        return later[0].queued_s if later else self.latest_s[choice]

    def note_error(self, ending: Ending, error: BaseException) -> None:
        """Keep the type of an error, and its message unless that may quote the request."""
        self.error = type(error)
        if ending is FAILED or isinstance(error, TooMany):
            self.reason = str(error)

    def end_attributes(self) -> Attributes:
        """Return the attributes that the span of an ended request gets."""
        assert self.ending is not None
        found: dict[str, AttributeValue] = {
            "http.response.status_code": self.status,
            "draftgate.ending": self.ending.value,
            "gen_ai.usage.input_tokens": self.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": self.cached_tokens,
            "gen_ai.usage.output_tokens": self.output_tokens,
        }
        if self.workers:
            found["draftgate.worker_id"] = ",".join(self.workers)
        if self.plan is not None:
            found.update(outcome_attributes(self.outcome))
        if self.prefill_worker is not None:
            found["draftgate.prefill_worker_id"] = self.prefill_worker
        if self.cost_usd is not None:
            found["draftgate.cost_usd"] = self.cost_usd
        if self.ttft_s is not None:
            found["gen_ai.response.time_to_first_chunk"] = self.ttft_s
        if self.finish_reasons:
            found["gen_ai.response.finish_reasons"] = list(map(str, self.finish_reasons))
        return found

    def log_end(self, error: BaseException | None) -> None:
        """Log the end of the request, if its level is logged."""
        ending = self.ending
        level = logging.WARNING if ending is FAILED else logging.INFO
        if not is_logged(level):
            return
        plan = self.plan
        fields = {
            "endpoint": self.endpoint,
            "status": self.status,
            "ending": str(ending),
            "seconds": self.seconds,
            "ttft_s": self.ttft_s,
            "worker": ",".join(self.workers) or None,
            "prefill_worker": self.prefill_worker,
            "resumes": self.resumes or None,
            "preemptions": self.preemptions or None,
            "fallback": self.fallback and self.fallback.reason,
            "model": self._logged_model(error),
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

    def _logged_model(self, error: BaseException | None) -> str | None:
        """Return the model that replaced the requested one, or the model of a failed request."""
        if self.fallback is not None:
            return self.fallback.model
        return None if error is None else self.model or None


class LatestRequests:
    """The latest requests of a process. Use the object only on the thread of the event loop."""

    def __init__(self) -> None:
        self._latest: deque[RequestFacts] = deque(maxlen=KEPT)

    def add(self, facts: RequestFacts) -> None:
        """Keep a request that has arrived."""
        self._latest.append(facts)

    def __iter__(self) -> Iterator[RequestFacts]:
        """Yield the requests, newest first."""
        return reversed(self._latest)

    def take_changed(self) -> list[RequestFacts]:
        """Return the latest requests that have begun or ended since the last call, oldest first."""
        states = ((one, (True, one.ending is not None)) for one in self._latest)
        changed = [(one, state) for one, state in states if one.shared != state][-MOST_SHARED:]
        for one, state in changed:
            one.shared = state
        return [one for one, _ in changed]
