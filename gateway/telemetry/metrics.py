"""The values of the metrics, and the page for Prometheus.

Recording is plain arithmetic without locks on the thread of the event loop, because every request
changes many metrics. The package prometheus-client provides the metric families and text formats.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import add
from typing import Final, TypeAlias

from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from draftgate.gateway.telemetry.live import Recent
from draftgate.gateway.telemetry.metric_definitions import METRICS
from draftgate.gateway.telemetry.metric_form import Kind, MetricDefinition
from draftgate.policies.types import WorkerLoad

Labels = tuple[str, ...]
"""Values of a metric's own labels, without the name of the model."""

MOST_VALUES: Final = 100
"""Maximum values of a label. A histogram has about 20 samples for each value, and Prometheus
expects a few thousand samples per scrape."""

OTHER: Final = "other"
"""The label value that replaces further values. Operators choose some values, such as tenants, so a
limit keeps memory and the page small."""

_GEN_AI: Final = {"model_name": "gen_ai_request_model", "operation": "gen_ai_operation_name"}
_VLLM: Final = {"finish_reason": "finished_reason"}
"""Labels whose names differ in OpenTelemetry's conventions and in vLLM."""


Row: TypeAlias = tuple[str, str, tuple[str, ...], list[float]]
"""A series: the names of its model and of its metric, its labels, and its numbers. The numbers of a
histogram are its counts by bucket, and then its sum. Other metrics have one number."""

_GAUGES: Final = frozenset(metric.name for metric in METRICS if metric.kind is Kind.GAUGE)
_SHARED: Final = frozenset(metric.name for metric in METRICS if metric.shared)


@dataclass(slots=True)
class Scalar:
    """One series of a counter or a gauge."""

    value: float = 0.0

    @property
    def numbers(self) -> list[float]:
        """The value, in the form of snapshots."""
        return [self.value]

    def copy(self) -> Scalar:
        """Return a snapshot."""
        return Scalar(self.value)


@dataclass(slots=True)
class HistogramSeries:
    """One series of a histogram.

    Attributes:
        bounds: upper bounds of the buckets, without infinity.
        counts: values in each bucket, not cumulative. The last bucket has no upper bound.
        total: sum of all values.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    @property
    def numbers(self) -> list[float]:
        """The counts and the sum, in the form of snapshots."""
        return [*self.counts, self.total]

    def observe(self, value: float) -> None:
        """Count a value in its bucket."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Count values in their buckets."""
        counts, bounds = self.counts, self.bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self.total += sum(values)

    def copy(self) -> HistogramSeries:
        """Return a snapshot."""
        return replace(self, counts=self.counts.copy())


Rows = list[tuple[str, Labels, Scalar | HistogramSeries]]
"""The series of a metric, with the names of their models."""


class Metrics:
    """The metrics of a model on a node.

    Use the object only on the thread of the event loop.

    Attributes:
        folds: callbacks that make all values current.
    """

    def __init__(
        self, loads: Callable[[], Mapping[str, WorkerLoad]], model: Callable[[], str]
    ) -> None:
        """Start at zero.

        Args:
            loads: a function that returns the loads of the workers by the value of their label,
                called on each scrape.
            model: a function that returns the name of the model, empty while unknown.
        """
        self._loads = loads
        self._model = model
        self._recent = Recent()
        self.folds: list[Callable[[], None]] = []
        self._gauges: dict[tuple[MetricDefinition, Labels], Callable[[], float]] = {}
        self._known_values: defaultdict[str, set[str]] = defaultdict(set)  # by label
        self._scalars: defaultdict[MetricDefinition, dict[Labels, Scalar]] = defaultdict(dict)
        self._histograms: defaultdict[MetricDefinition, dict[Labels, HistogramSeries]] = (
            defaultdict(dict)
        )

    @property
    def recent(self) -> Recent:
        """Values of the last minute, for the live page."""
        self.fold()
        return self._recent

    def fold(self) -> None:
        """Make all values current."""
        for fold in self.folds:
            fold()

    def scalar(self, metric: MetricDefinition, *labels: str) -> Scalar:
        """Return a series of a counter or gauge.

        Hot paths keep the series.
        """
        series = self._scalars[metric]
        found = series.get(labels)
        if found is None:
            found = series.setdefault(self._bounded(metric, labels), Scalar())
        return found

    def histogram(self, metric: MetricDefinition, *labels: str) -> HistogramSeries:
        """Return a series of a histogram.

        Hot paths keep the series.
        """
        series = self._histograms[metric]
        found = series.get(labels)
        if found is None:
            empty = HistogramSeries(metric.buckets, [0] * (len(metric.buckets) + 1))
            found = series.setdefault(self._bounded(metric, labels), empty)
        return found

    def add(self, metric: MetricDefinition, amount: float = 1.0, *labels: str) -> None:
        """Increase a counter."""
        series = self._scalars[metric].get(labels)
        if series is None:
            series = self.scalar(metric, *labels)
        series.value += amount

    def set(self, metric: MetricDefinition, value: float, *labels: str) -> None:
        """Set a gauge."""
        self.scalar(metric, *labels).value = value

    def set_all(self, metric: MetricDefinition, values: Mapping[Labels, float]) -> None:
        """Set all series of a gauge by their labels, and forget its other series."""
        self._scalars[metric] = {}
        for labels, value in values.items():
            self.scalar(metric, *labels).value += value

    def read(self, metric: MetricDefinition, value: Callable[[], float], *labels: str) -> None:
        """Set a gauge, or a shared counter, by a function whenever its value is needed."""
        self._gauges[metric, labels] = value

    def observe(self, metric: MetricDefinition, value: float, *labels: str) -> None:
        """Count a value in a histogram."""
        series = self._histograms[metric].get(labels)
        if series is None:
            series = self.histogram(metric, *labels)
        series.observe(value)

    def snapshot(self) -> list[Row]:
        """Return all series, for the page of another model or process of the node."""
        return _as_snapshot(self._all_rows())

    def page(
        self, accept: str = "", others: Sequence[Sequence[Row]] = ()
    ) -> tuple[Callable[[], bytes], str]:
        """Take a snapshot, and return the function that renders it with its content type.

        Rendering is slow and may run in another thread.

        Args:
            accept: the `Accept` header, which chooses between Prometheus' text and OpenMetrics.
            others: snapshots of other models and processes of the node, which the page includes.
        """
        found = self._all_rows()
        if others:
            found = _with_others(found, others)
        return _rendering(found, accept)

    def _bounded(self, metric: MetricDefinition, values: Labels) -> Labels:
        """Return label values, with `OTHER` for each value beyond the limit."""
        bounded = []
        for label, value in zip(metric.labels, values, strict=True):
            known = self._known_values[label]
            if len(known) < MOST_VALUES:
                known.add(value)
            bounded.append(value if value in known else OTHER)
        return tuple(bounded)

    def _all_rows(self) -> list[tuple[MetricDefinition, Rows]]:
        """Return a snapshot of each series of each metric."""
        self.fold()
        for (metric, labels), value in self._gauges.items():
            self.set(metric, float(value()), *labels)
        return [(metric, self._rows(metric)) for metric in METRICS]

    def _rows(self, metric: MetricDefinition) -> Rows:
        """Return a snapshot of each series."""
        model = self._model()
        if metric.of_worker is not None:
            return [
                (model, (label,), Scalar(metric.of_worker(load)))
                for label, load in self._loads().items()
            ]
        series: Mapping[Labels, Scalar | HistogramSeries]
        create: Callable[[MetricDefinition], object]
        if metric.kind is Kind.HISTOGRAM:
            create, series = self.histogram, self._histograms[metric]
        else:
            create, series = self.scalar, self._scalars[metric]
        if not metric.labels and model:
            create(metric)  # rates need a 0 before the first event
        return [(model, values, one.copy()) for values, one in series.items()]


def page_of(snapshots: Iterable[Sequence[Row]], accept: str) -> tuple[Callable[[], bytes], str]:
    """Return the function that renders the sum of snapshots, with its content type.

    Args:
        accept: as in `Metrics.page`.
    """
    return _rendering(_with_others([(metric, []) for metric in METRICS], snapshots), accept)


def _rendering(
    rows: list[tuple[MetricDefinition, Rows]], accept: str
) -> tuple[Callable[[], bytes], str]:
    page = _Page(rows)
    kinds = {part.partition(";")[0].strip() for part in accept.split(",")}
    if "application/openmetrics-text" not in kinds:
        return partial(generate_latest, page), CONTENT_TYPE_PLAIN_0_0_4
    # The names need no escaping, and the default escaping replaces the colon of vllm:*.
    write = partial(openmetrics.generate_latest, page, openmetrics.ALLOWUTF8)
    return write, openmetrics.CONTENT_TYPE_LATEST


def _as_snapshot(rows: Iterable[tuple[MetricDefinition, Rows]]) -> list[Row]:
    return [
        (model, metric.name, labels, series.numbers)
        for metric, found in rows
        for model, labels, series in found
    ]


def _with_others(
    own: list[tuple[MetricDefinition, Rows]], others: Iterable[Sequence[Row]]
) -> list[tuple[MetricDefinition, Rows]]:
    """Return the series of a model in this process together with other series."""
    by_name: defaultdict[str, Rows] = defaultdict(list)
    metrics = {metric.name: metric for metric, _ in own}
    for model, name, labels, numbers in add_snapshots([_as_snapshot(own), *others]):
        by_name[name].append((model, labels, _series(metrics[name], numbers)))
    return [(metric, by_name[metric.name]) for metric, _ in own]


def _series(metric: MetricDefinition, numbers: list[float]) -> Scalar | HistogramSeries:
    if metric.kind is not Kind.HISTOGRAM:
        return Scalar(numbers[0])
    *counts, total = numbers
    return HistogramSeries(metric.buckets, list(map(int, counts)), total)


class _Page:
    """A snapshot of all metrics in the form that prometheus-client's encoders accept."""

    def __init__(self, snapshot: list[tuple[MetricDefinition, Rows]]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        for metric, rows in self._snapshot:
            for name in (metric.name, *metric.aliases):
                yield self._family(metric, name, rows)

    def _family(self, metric: MetricDefinition, name: str, rows: Rows) -> Metric:
        # OpenMetrics requires that the name of a metric ends with its unit.
        unit = metric.unit if name.endswith("_" + metric.unit) else ""
        family = Metric(name, metric.text, metric.kind.value, unit)
        for model, values, value in rows:
            own = {"model_name": model, **dict(zip(metric.labels, values, strict=True))}
            labels = _translated(name, own)
            if labels is not None:
                family.samples += _samples(metric, name, labels, value)
        return family


def _translated(name: str, labels: dict[str, str]) -> dict[str, str] | None:
    """Return labels with the names for a metric's prefix, or None to omit the series."""
    names: Mapping[str, str] = {}
    if name.startswith("vllm:"):
        if labels.get("error_type"):
            return None  # vLLM's durations cover only finished requests
        names = _VLLM
    elif name.startswith("gen_ai_"):
        names = _GEN_AI
        labels = {**labels, "gen_ai_provider_name": "draftgate"}
    return {names.get(label, label): value for label, value in labels.items() if value}


def shown_name(metric: MetricDefinition, name: str) -> str:
    """Return one of a metric's names as it appears on the page."""
    return f"{name}_total" if metric.kind is Kind.COUNTER else name


def _samples(
    metric: MetricDefinition, name: str, labels: dict[str, str], value: Scalar | HistogramSeries
) -> Iterator[Sample]:
    if isinstance(value, Scalar):
        yield Sample(shown_name(metric, name), labels, value.value)
        return
    cumulative = 0
    for bound, count in zip((*metric.buckets, float("inf")), value.counts, strict=True):
        cumulative += count
        shown = floatToGoString(bound)  # type: ignore[no-untyped-call]
        yield Sample(f"{name}_bucket", {**labels, "le": shown}, cumulative)
    yield Sample(f"{name}_count", labels, cumulative)
    yield Sample(f"{name}_sum", labels, value.total)


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
