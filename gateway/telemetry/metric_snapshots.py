"""Snapshots of metrics, which the processes of a node exchange and add up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import add
from typing import Final, TypeAlias

from draftgate.gateway.telemetry.metric_definitions import METRICS, Kind

Row: TypeAlias = tuple[str, str, tuple[str, ...], list[float]]
"""A series: the names of its model and of its metric, its labels, and its numbers. The numbers of a
histogram are its counts by bucket, and then its sum. Other metrics have one number."""

_GAUGES: Final = frozenset(metric.name for metric in METRICS if metric.kind is Kind.GAUGE)
_SHARED: Final = frozenset(metric.name for metric in METRICS if metric.shared)


def add_snapshots(snapshots: Iterable[Sequence[Row]]) -> list[Row]:
    """Return the sum of snapshots.

    Metrics that every process of a node reports alike are not added. The largest value counts.
    Unknown metrics, of another version, are omitted.
    """
    found: dict[tuple[str, str, tuple[str, ...]], list[float]] = {}
    known = {metric.name for metric in METRICS}
    for snapshot in snapshots:
        for model, name, labels, numbers in snapshot:
            key = model, name, labels
            before = found.get(key)
            if before is None:
                if name in known:
                    found[key] = list(numbers)
            elif name in _SHARED:
                found[key] = list(map(max, before, numbers))
            else:
                found[key] = list(map(add, before, numbers))
    return [(*key, numbers) for key, numbers in found.items()]


def without_gauges(snapshot: Iterable[Row]) -> list[Row]:
    """Return the counters and histograms of a snapshot, which outlive their process."""
    return [row for row in snapshot if row[1] not in _GAUGES]
