"""The series of the metrics that most requests change."""

from __future__ import annotations

from draftgate.backends.types import SpeculationOutcome
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.metrics import Metrics


class RequestSeries:
    """The series without labels, which are found once for all requests.

    Attributes:
        metrics: all metrics of the node.
        new_tokens: number of generated tokens since the metrics were last read.
        new_gaps_s: times in seconds between deltas of a choice since then.
    """

    def __init__(self, metrics: Metrics) -> None:
        """Find the series, which start at zero."""
        self.metrics = metrics
        self.new_tokens = 0
        self.new_gaps_s: list[float] = []
        metrics.before_reading = self._count_new
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

    def _count_new(self) -> None:
        """Count the deltas since the last call, which is at most a second ago for the live page."""
        self.generation_tokens.value += self.new_tokens
        self.metrics.recent.tokens += self.new_tokens
        self.gaps.observe_all(self.new_gaps_s)
        self.new_tokens, self.new_gaps_s = 0, []

    def count_speculation(self, outcome: SpeculationOutcome, tenant: str, decode_s: float) -> None:
        """Count the drafts of a request.

        Args:
            decode_s: seconds of decoding to which the time saved by drafts refers, summed over the
                finished choices.
        """
        if decode_s:
            self.metrics.recent.draft_times.add(
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
