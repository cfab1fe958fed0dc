"""The metrics of flows."""

from __future__ import annotations

from typing import Final

from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.metrics import Metrics
from draftgate.policies.flows.outcome import FlowOutcome

MOST_NUMBERS: Final = 8
"""Number of hops with a label value of their own. All later hops share one."""

NO_FLOW: Final = "none"
"""The label value of a request that names an unknown flow without a deadline."""


class FlowMetrics:
    """An observer of flows (`gateway.dispatch.flows`) that records their metrics."""

    def __init__(self, metrics: Metrics) -> None:
        """Record the metrics of a node."""
        self._metrics = metrics

    def joined(self, number: int | None) -> None:
        """Count a request that names a flow."""
        label = NO_FLOW if number is None else _label(number)
        self._metrics.add(metric.FLOW_REQUESTS, 1, label)

    def hop_ended(self, number: int, share: float) -> None:
        """Record the time of a hop as a share of the whole time of its flow."""
        self._metrics.observe(metric.FLOW_HOP_SHARE, share, _label(number))

    def flow_ended(self, outcome: FlowOutcome) -> None:
        """Count a flow."""
        self._metrics.add(metric.FLOWS, 1, outcome.value)


def _label(number: int) -> str:
    return str(number) if number <= MOST_NUMBERS else f"{MOST_NUMBERS + 1}+"
