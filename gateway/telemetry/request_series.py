"""The series of the metrics that most requests change."""

from __future__ import annotations

from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.metrics import Metrics


class RequestSeries:
    """The series without labels, which are found once for all requests.

    Attributes:
        metrics: all metrics of the node.
    """

    def __init__(self, metrics: Metrics) -> None:
        """Find the series, which start at zero."""
        self.metrics = metrics
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
