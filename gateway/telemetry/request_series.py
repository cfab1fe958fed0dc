"""The series of the metrics that most requests change."""

from __future__ import annotations

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
