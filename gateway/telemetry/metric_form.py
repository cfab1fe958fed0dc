"""The form of a metric's definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from draftgate.gateway.telemetry.metric_buckets import LENGTHS, PHASE_S
from draftgate.policies.types import WorkerLoad


class Kind(StrEnum):
    """Prometheus' type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, eq=False)
class MetricDefinition:
    """One metric.

    Every metric has the label `model_name` in addition to its own labels.

    Attributes:
        name: the name without the `_total` that counters have on the page.
        text: the help text.
        unit: the unit of the values.
        labels: names of its own labels. `Metrics` bounds the values of each.
        buckets: upper bounds of a histogram, in ascending order, without infinity.
        aliases: further names, also without `_total`.
        of_worker: reads the metric from a worker's load. Such a metric has the label `worker`.
        shared: whether all processes of a node report the same value.
    """

    name: str
    kind: Kind
    text: str
    unit: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...]
    aliases: tuple[str, ...]
    of_worker: Callable[[WorkerLoad], float] | None
    shared: bool


DEFINED: Final[list[MetricDefinition]] = []
"""All definitions so far, in the order of the page."""


def define(
    kind: Kind,
    name: str,
    text: str,
    *aliases: str,
    unit: str = "",
    labels: tuple[str, ...] = (),
    buckets: tuple[float, ...] = (),
    of_worker: Callable[[WorkerLoad], float] | None = None,
    shared: bool = False,
) -> MetricDefinition:
    """Define a metric, whose unit is by default the last word of its name."""
    unit = unit or name.rpartition("_")[2]
    if kind is Kind.HISTOGRAM and not buckets:
        buckets = PHASE_S if unit == "seconds" else LENGTHS
    labels = ("worker",) if of_worker else labels
    metric = MetricDefinition(name, kind, text, unit, labels, buckets, aliases, of_worker, shared)
    DEFINED.append(metric)
    return metric
