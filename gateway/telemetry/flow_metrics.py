"""The metrics of flows."""

from __future__ import annotations

from typing import Final

from draftgate.gateway.dispatch.flows import FlowEvent, HopEnded, HopJoined
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.metrics import Metrics
from draftgate.policies.flows.outcome import FlowOutcome

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
