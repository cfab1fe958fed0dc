"""The series of the metrics that most requests change."""

from __future__ import annotations

from typing import Protocol

from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.metrics import Metrics


class Counting(Protocol):
    """An observer that has not counted all of its deltas yet."""

    def count(self) -> None:
        """Count the deltas since the last call."""
        ...


class RequestSeries:
    """The series without labels, which are found once for all requests.

    Attributes:
        metrics: all metrics of the node.
        watches: the observers of running requests, which count their deltas before the metrics are
            read.
    """

    def __init__(self, metrics: Metrics) -> None:
        """Find the series, which start at zero."""
        self.metrics = metrics
        self.watches: set[Counting] = set()
        metrics.before_reading = self._count
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

    def _count(self) -> None:
        for watch in self.watches:
            watch.count()
