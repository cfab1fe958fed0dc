"""The values of the figures, and the page that Prometheus reads.

Recording is plain arithmetic on the event loop's thread, without locks: some figures are recorded
for every delta. The families and text formats are prometheus-client's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from draftgate.gateway.telemetry.cardinality import LabelBounds
from draftgate.gateway.telemetry.metric_definitions import METRICS, Kind, MetricDefinition
from draftgate.gateway.telemetry.recent import Recent
from draftgate.policies.types import WorkerLoad

Loads = Callable[[], Sequence[WorkerLoad | None]]
"""The load of every worker in order, None for a broken one; empty before they have started."""

Labels = tuple[str, ...]
"""Values of a figure's own labels: the model's name comes to all of them on the page."""

_GEN_AI: Final = {"model_name": "gen_ai_request_model", "operation": "gen_ai_operation_name"}
_VLLM: Final = {"finish_reason": "finished_reason"}
"""Labels that others call differently."""


class Amount:
    """The value of one series of a counter or a gauge."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        """Begin at zero."""
        self.value = 0.0

    def copy(self) -> Amount:
        """Return it as it is now."""
        copied = Amount()
        copied.value = self.value
        return copied


class Spread:
    """One series of a histogram."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """Begin empty."""
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value into its bucket."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def copy(self) -> Spread:
        """Return it as it is now."""
        copied = Spread(self._bounds)
        copied.counts, copied.total = self.counts.copy(), self.total
        return copied


Rows = list[tuple[Labels, Amount | Spread]]
"""The series of a figure."""


class Metrics:
    """What a node counted. Use on the event loop's thread only.

    Attributes:
        recent: the last minute's figures, for the live page.
    """

    def __init__(self, loads: Loads, model: Callable[[], str]) -> None:
        """Begin empty; `loads` and `model` (the model's name) are asked when they are needed."""
        self._loads = loads
        self._model = model
        self.recent = Recent()
        self._bounds = LabelBounds()
        self._amounts: defaultdict[MetricDefinition, dict[Labels, Amount]] = defaultdict(dict)
        self._spreads: defaultdict[MetricDefinition, dict[Labels, Spread]] = defaultdict(dict)

    def amount(self, figure: MetricDefinition, *labels: str) -> Amount:
        """Return a series to keep, where it is counted often."""
        series = self._amounts[figure]
        found = series.get(labels)
        if found is None:
            found = series.setdefault(self._bounded(figure, labels), Amount())
        return found

    def spread(self, figure: MetricDefinition, *labels: str) -> Spread:
        """Return a series to keep, where it is observed often."""
        series = self._spreads[figure]
        found = series.get(labels)
        if found is None:
            found = series.setdefault(self._bounded(figure, labels), Spread(figure.buckets))
        return found

    def add(self, figure: MetricDefinition, amount: float = 1.0, *labels: str) -> None:
        """Let a counter rise."""
        self.amount(figure, *labels).value += amount

    def set(self, figure: MetricDefinition, value: float, *labels: str) -> None:
        """Set a gauge."""
        self.amount(figure, *labels).value = value

    def observe(self, figure: MetricDefinition, value: float, *labels: str) -> None:
        """Count a value into a histogram."""
        self.spread(figure, *labels).observe(value)

    def page(self, accept: str = "") -> tuple[Callable[[], bytes], str]:
        """Return how to write everything, and the content type that the `Accept` header chose.

        What is written is as of now; writing it may be done in a thread.
        """
        page = _Page(self._model(), [(figure, self._rows(figure)) for figure in METRICS])
        kinds = {part.partition(";")[0].strip() for part in accept.split(",")}
        if "application/openmetrics-text" not in kinds:
            return partial(generate_latest, page), CONTENT_TYPE_PLAIN_0_0_4
        # Our names need no escaping, and the default one spoils the colon of vllm:* samples.
        write = partial(openmetrics.generate_latest, page, openmetrics.ALLOWUTF8)
        return write, openmetrics.CONTENT_TYPE_LATEST

    def _bounded(self, figure: MetricDefinition, values: Labels) -> Labels:
        named = zip(figure.labels, values, strict=True)
        return tuple(self._bounds.folded(name, value) for name, value in named)

    def _rows(self, figure: MetricDefinition) -> Rows:
        """Return label values and value of each series, as of now."""
        if figure.of_worker is not None:
            return self._of_workers(figure.of_worker)
        histogram = figure.kind is Kind.HISTOGRAM
        if not figure.labels and self._model():  # what has not happened yet is 0, not missing
            (self.spread if histogram else self.amount)(figure)
        series: Mapping[Labels, Amount | Spread]
        series = self._spreads[figure] if histogram else self._amounts[figure]
        return [(values, one.copy()) for values, one in series.items()]

    def _of_workers(self, of_worker: Callable[[WorkerLoad], float]) -> Rows:
        rows: Rows = []
        for index, load in enumerate(self._loads()):
            if load is not None:
                amount = Amount()
                amount.value = of_worker(load)
                rows.append(((str(index),), amount))
        return rows


class _Page:
    """Figures as they were, for an encoder, which may run in a thread."""

    def __init__(self, model: str, taken: list[tuple[MetricDefinition, Rows]]) -> None:
        self._model = model
        self._taken = taken

    def collect(self) -> Iterator[Metric]:
        for figure, rows in self._taken:
            for name in (figure.name, *figure.aliases):
                yield _family(figure, name, self._model, rows)


def _family(figure: MetricDefinition, name: str, model: str, rows: Rows) -> Metric:
    unit = figure.unit if name.endswith("_" + figure.unit) else ""  # OpenMetrics wants it so
    family = Metric(name, figure.text, figure.kind.value, unit)
    for values, value in rows:
        labels = {"model_name": model, **dict(zip(figure.labels, values, strict=True))}
        told = _dialect(name, labels)
        if told is not None:
            family.samples += _samples(figure, name, told, value)
    return family


def _dialect(name: str, labels: dict[str, str]) -> dict[str, str] | None:
    """Return the labels as those who know that name call them; None where they would not count."""
    if name.startswith("vllm:"):
        if labels.get("error_type"):
            return None  # durations are those of requests that finished, there
        return {_VLLM.get(label, label): value for label, value in labels.items() if value}
    if name.startswith("gen_ai_"):
        told = {_GEN_AI.get(label, label): value for label, value in labels.items() if value}
        return {**told, "gen_ai_provider_name": "draftgate"}
    return {label: value for label, value in labels.items() if value}


def shown_name(figure: MetricDefinition, name: str) -> str:
    """Return one of a figure's names as the page has it."""
    return f"{name}_total" if figure.kind is Kind.COUNTER else name


def _samples(
    figure: MetricDefinition, name: str, labels: dict[str, str], value: Amount | Spread
) -> Iterator[Sample]:
    if isinstance(value, Amount):
        yield Sample(shown_name(figure, name), labels, value.value)
        return
    below = 0
    bounds = (*figure.buckets, float("inf"))
    for bound, count in zip(bounds, value.counts, strict=True):
        below += count
        shown = floatToGoString(bound)  # type: ignore[no-untyped-call]
        yield Sample(f"{name}_bucket", {**labels, "le": shown}, below)
    yield Sample(f"{name}_count", labels, below)
    yield Sample(f"{name}_sum", labels, value.total)
