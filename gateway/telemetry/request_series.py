"""The series of the metrics that most requests change, and what requests report to them.

Requests append to lists, which `fold` counts in the metrics: every second, before the metrics or
the values of the live page are read, and after `MOST_ENDED` requests. A fold of these takes less
than a millisecond.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Final, TypeVar

from draftgate.backends.types import FinishReason, Phases, SpeculationOutcome
from draftgate.gateway.dispatch.flows import FlowEvent, HopEnded, HopJoined
from draftgate.gateway.dispatch.kv_pulls import KvFetch
from draftgate.gateway.dispatch.run import (
    Fallback,
    Move,
    NotResumed,
    Preempted,
    Prefill,
    PrefillEnd,
)
from draftgate.gateway.logs import log
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.metrics import Metrics
from draftgate.policies.flows.outcome import FlowOutcome
from draftgate.policies.moves import MoveEnd
from draftgate.policies.types import SpeculationPlan

T = TypeVar("T")

MOST_ENDED: Final = 64
"""Requests that are counted together, at most."""


class RequestSeries:
    """The series without labels, which are found once for all requests, and the lists.

    Attributes:
        metrics: all metrics of the model.
        recent: values of the last minute, for the live page.
        new_tokens: number of generated tokens.
        new_events: number of tokens for the live page that an upstream generates.
        new_gaps_s: times in seconds between deltas of a choice.
        placed: prompts that got their first worker: tokens, and seconds since the arrival.
        plans: prompts with output: maximum output tokens, and the plan.
        first_outputs: the operation of a request, and its TTFT in seconds.
        phases: the phases of choices on their workers.
        finished: choices that have ended: the reason, and seconds of decoding, if known.
    """

    def __init__(self, metrics: Metrics) -> None:
        """Find the series, which start at zero."""
        self.metrics = metrics
        self.recent = metrics.recent
        self.new_tokens = self.new_events = 0
        self.new_gaps_s: list[float] = []
        self.placed: list[tuple[int, float]] = []
        self.plans: list[tuple[int, SpeculationPlan]] = []
        self.first_outputs: list[tuple[str, float]] = []
        self.phases: list[Phases] = []
        self.finished: list[tuple[FinishReason, float | None]] = []
        self._ended: list[Callable[[], None]] = []
        metrics.folds.append(self.fold)
        self.prompt_tokens = metrics.scalar(metric.PROMPT_TOKENS)
        self.cached_tokens = metrics.scalar(metric.CACHED_TOKENS)
        self.generation_tokens = metrics.scalar(metric.GENERATION_TOKENS)
        self.prompt_length = metrics.histogram(metric.PROMPT_LENGTH)
        self.output_length = metrics.histogram(metric.OUTPUT_LENGTH)
        self.max_tokens = metrics.histogram(metric.MAX_TOKENS)
        self.to_worker = metrics.histogram(metric.TO_WORKER)
        self.worker_queue = metrics.histogram(metric.WORKER_QUEUE)
        self.prefill = metrics.histogram(metric.PREFILL)
        self.decode = metrics.histogram(metric.DECODE)
        self.gaps = metrics.histogram(metric.GAPS)

    def add_ended(self, count: Callable[[], None]) -> None:
        """Call a function later, which counts a request that has ended."""
        self._ended.append(count)
        if len(self._ended) >= MOST_ENDED:
            self.fold()

    def record(self, event: NotResumed | KvFetch | Move | Fallback | Prefill | Preempted) -> None:
        """Count an event of the dispatcher that does not change what is known of its request."""
        metrics = self.metrics
        match event:
            case NotResumed():
                metrics.add(metric.RESUMES, 1, event.cause.value, event.why.value)
            case Fallback():
                metrics.add(metric.FALLBACKS, 1, event.requested, event.model, event.reason)
            case Prefill():
                metrics.add(metric.PREFILLS, 1, event.end.value)
                if event.end is PrefillEnd.COMPUTED:
                    metrics.observe(metric.PREFILL_CALLS, event.seconds)
            case Preempted():
                outcome = "continued" if event.continues else "restarted"
                metrics.add(metric.PREEMPTIONS, 1, outcome)
            case KvFetch():
                end = "none" if event.end is None else event.end.value
                reason = event.decision.reason.value
                metrics.add(metric.KV_FETCHES, 1, event.cause.value, reason, end)
                metrics.add(metric.KV_FETCHED, event.num_bytes)
            case Move():
                metrics.add(metric.MOVES, 1, event.reason.value, event.end.value)
                if event.gap_s is not None:
                    metrics.observe(metric.MOVE_GAP, event.gap_s)
                if event.end is MoveEnd.REJECTED:
                    log(
                        logging.ERROR,
                        "a worker computed other tokens than the source of a move",
                        prompt=event.index,
                        from_worker=event.source,
                        to_worker=event.sink,
                        verified_tokens=event.verified_tokens,
                    )

    def fold(self) -> None:
        """Count what requests have reported since the last call."""
        metrics, recent = self.metrics, self.recent
        self.generation_tokens.value += self.new_tokens
        recent.tokens += self.new_tokens + self.new_events
        self.new_tokens = self.new_events = 0
        self.gaps.observe_all(_taken(self.new_gaps_s))
        if placed := _taken(self.placed):
            lengths, waits_s = zip(*placed, strict=True)
            self.prompt_tokens.value += sum(lengths)
            self.prompt_length.observe_all(lengths)
            self.to_worker.observe_all(waits_s)
        if plans := _taken(self.plans):
            self.max_tokens.observe_all([most for most, _ in plans])
            decided = Counter([(plan.policy, plan.proposer or "none") for _, plan in plans])
            for labels, count in decided.items():
                metrics.add(metric.DECISIONS, count, *labels)
        for operation, ttft_s in _taken(self.first_outputs):
            metrics.observe(metric.TTFT, ttft_s, operation)
            recent.add_ttft(ttft_s)
        if phases := _taken(self.phases):
            self.worker_queue.observe_all([one.scheduled_s - one.queued_s for one in phases])
            self.prefill.observe_all([one.first_token_s - one.scheduled_s for one in phases])
        if finished := _taken(self.finished):
            for reason, count in Counter([reason for reason, _ in finished]).items():
                metrics.add(metric.CHOICES, count, reason.value)
            self.decode.observe_all([one for _, one in finished if one is not None])
        for count_request in _taken(self._ended):
            count_request()

    def count_speculation(self, outcome: SpeculationOutcome, tenant: str, decode_s: float) -> None:
        """Count the drafts of a request.

        Args:
            decode_s: seconds of decoding to which the time saved by drafts refers, summed over the
                finished choices.
        """
        if decode_s:
            self.recent.draft_times.add(
                tenant, outcome.saved_s, decode_s, outcome.num_drafted_tokens
            )
        if outcome.saved_s:
            saved = "saved" if outcome.saved_s > 0.0 else "lost"
            self.metrics.add(metric.DRAFT_TIME, abs(outcome.saved_s), tenant, saved)
        if not outcome.num_spec_steps:
            return
        self.metrics.add(metric.SPEC_STEPS, outcome.num_spec_steps)
        self.metrics.add(metric.DRAFTED, outcome.num_drafted_tokens)
        self.metrics.add(metric.ACCEPTED, outcome.num_accepted_tokens)
        beyond = sum(outcome.acceptance_histogram)
        for position, steps in enumerate(outcome.acceptance_histogram[:-1]):
            beyond -= steps  # number of steps that accepted more than `position` tokens
            self.metrics.add(metric.ACCEPTED_AT, beyond, str(position))


def _taken(items: list[T]) -> list[T]:
    """Return the items of a list, which is empty afterwards."""
    taken = items[:]
    items.clear()
    return taken


# --- The metrics of flows -------------------------------------------------------------------------


MOST_NUMBERS: Final = 8
"""Number of hops with a label value of their own. All later hops share one."""

NO_FLOW: Final = "none"
"""The label value of a request that names an unknown flow without a deadline."""


def count_flow_event(metrics: Metrics, event: FlowEvent) -> None:
    """Count a hop or the outcome of a flow."""
    match event:
        case HopJoined(number=number):
            label = NO_FLOW if number is None else _label(number)
            metrics.add(metric.FLOW_REQUESTS, 1, label)
        case HopEnded():
            metrics.observe(metric.FLOW_HOP_SHARE, event.share, _label(event.number))
        case FlowOutcome():
            metrics.add(metric.FLOWS, 1, event.value)


def _label(number: int) -> str:
    return str(number) if number <= MOST_NUMBERS else f"{MOST_NUMBERS + 1}+"
