"""Every metric of a node, declared once, under our names and those dashboards know.

An instrument is recorded under its `draftgate_*` name; `ALIASES` says under which `vllm:*` name the
same figure appears as well, so that dashboards and benchmarks made for vLLM read it unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.samples import Sample

from backends.types import SpeculationOutcome
from gateway.telemetry.recent import Recent
from policies.types import WorkerLoad

disable_created_metrics()  # type: ignore[no-untyped-call]  # series that nobody reads

ALIASES: Final = {
    "draftgate_running_sequences": "vllm:num_requests_running",
    "draftgate_waiting_sequences": "vllm:num_requests_waiting",
    "draftgate_kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
    "draftgate_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "draftgate_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "draftgate_request_duration_seconds": "vllm:e2e_request_latency_seconds",
    "draftgate_prompt_tokens": "vllm:prompt_tokens",
    "draftgate_generation_tokens": "vllm:generation_tokens",
    "draftgate_spec_steps": "vllm:spec_decode_num_drafts",
    "draftgate_drafted_tokens": "vllm:spec_decode_num_draft_tokens",
    "draftgate_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    "draftgate_accepted_tokens_per_pos": "vllm:spec_decode_num_accepted_tokens_per_pos",
}

_TTFT_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
    7.5, 10.0, 20.0, 40.0,
)  # fmt: skip
_TPOT_S: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15,
    0.2, 0.3, 0.5, 1.0, 2.5,
)  # fmt: skip
_DURATION_S: Final = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84,
)  # fmt: skip


Loads = Callable[[], Sequence[WorkerLoad | None]]
"""The load of every worker in order, None for a broken one; empty before they have started."""


def _kv_usage(load: WorkerLoad) -> float:
    return 1 - load.kv_blocks_free / max(load.kv_blocks_total, 1)


_GAUGES: Final[tuple[tuple[str, str, Callable[[WorkerLoad], float]], ...]] = (
    ("draftgate_running_sequences", "Sequences in the batch", attrgetter("running")),
    ("draftgate_waiting_sequences", "Sequences in the queue", attrgetter("waiting")),
    ("draftgate_kv_cache_usage_ratio", "Share of KV blocks in use, 0 to 1", _kv_usage),
    ("draftgate_price_tokens", "Expected tokens a draft slot must promise", attrgetter("price")),
    ("draftgate_acceptance_ratio", "Chance of a draft token, 0 to 1", attrgetter("acceptance")),
    (
        "draftgate_step_cost_error_ratio",
        "Running median of |measured / predicted - 1| over step times",
        attrgetter("step_cost_error"),
    ),
)
"""Name, help and value of what is read from a worker's load."""


class Metrics:
    """The instruments. All carry the label `model_name`; loads, `worker`: its place in the node.

    Attributes:
        recent: the last minute's figures, for the live page.
    """

    def __init__(self, loads: Loads, model: Callable[[], str]) -> None:
        """Declare them in a registry of their own; `loads` and `model` are asked at each scrape."""
        self.recent = Recent()
        self._registry = CollectorRegistry(auto_describe=True)
        self._model = model

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ("model_name", *labels), registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ("model_name",), registry=self._registry, buckets=buckets)

        self._requests = counter(
            "draftgate_requests", "Requests by endpoint and outcome", "endpoint", "outcome"
        )
        self._decisions = counter(
            "draftgate_decisions", "Requests by what they may draft with", "policy", "proposer"
        )
        self._prompt_tokens = counter("draftgate_prompt_tokens", "Tokens of prompts")
        self._cached_tokens = counter(
            "draftgate_cached_prompt_tokens", "Tokens of prompts whose KV was cached"
        )
        self._output_tokens = counter("draftgate_generation_tokens", "Tokens generated")
        self._output: Counter | None = None
        self._spec_steps = counter("draftgate_spec_steps", "Drafts verified")
        self._drafted = counter("draftgate_drafted_tokens", "Draft tokens verified")
        self._accepted = counter("draftgate_accepted_tokens", "Draft tokens accepted")
        self._accepted_at = counter(
            "draftgate_accepted_tokens_per_pos", "Draft tokens accepted, by position", "position"
        )
        self._ttft = histogram(
            "draftgate_time_to_first_token_seconds", "Arrival to first text", _TTFT_S
        )
        self._tpot = histogram(
            "draftgate_time_per_output_token_seconds", "Mean gap between tokens", _TPOT_S
        )
        self._duration = histogram(
            "draftgate_request_duration_seconds", "Arrival to last byte", _DURATION_S
        )
        self._registry.register(_LoadCollector(loads, model))

    def decided(self, policy: str, proposer: str | None) -> None:
        """Count a decision."""
        self._decisions.labels(self._model(), policy, proposer or "none").inc()

    def prompt(self, tokens: int) -> None:
        """Count the tokens of a prompt that was dispatched."""
        self._prompt_tokens.labels(self._model()).inc(tokens)

    def cached(self, tokens: int) -> None:
        """Count the tokens of a prompt that were not computed anew."""
        self._cached_tokens.labels(self._model()).inc(tokens)

    def generated(self, tokens: int) -> None:
        """Count tokens generated; called for every delta, so the label is looked up once."""
        if self._output is None:
            self._output = self._output_tokens.labels(self._model())
        self._output.inc(tokens)

    def speculated(self, outcome: SpeculationOutcome) -> None:
        """Count what speculation did for a choice."""
        model = self._model()
        self._spec_steps.labels(model).inc(outcome.num_spec_steps)
        self._drafted.labels(model).inc(outcome.num_drafted_tokens)
        self._accepted.labels(model).inc(outcome.num_accepted_tokens)
        beyond = sum(outcome.acceptance_histogram)
        for position, steps in enumerate(outcome.acceptance_histogram[:-1]):
            beyond -= steps  # steps that accepted more than `position` tokens
            self._accepted_at.labels(model, str(position)).inc(beyond)

    def first_token(self, seconds: float) -> None:
        """Record a time to first token."""
        self._ttft.labels(self._model()).observe(seconds)

    def finished(self, endpoint: str, outcome: str, seconds: float, tpot_s: float | None) -> None:
        """Record the end of a request; `tpot_s` is None where there was no gap to measure."""
        model = self._model()
        self._requests.labels(model, endpoint, outcome).inc()
        self._duration.labels(model).observe(seconds)
        if tpot_s is not None:
            self._tpot.labels(model).observe(tpot_s)

    def exposition(self) -> bytes:
        """Return everything in Prometheus' text format, aliases included."""
        return generate_latest(_WithAliases(self._registry))


class _LoadCollector:
    """Gauges of the workers' loads, read when scraped."""

    def __init__(self, loads: Loads, model: Callable[[], str]) -> None:
        self._loads = loads
        self._model = model

    def collect(self) -> Iterable[Metric]:
        loads = self._loads()
        if not loads:
            return
        for name, text, value in _GAUGES:
            family = GaugeMetricFamily(name, text, labels=("model_name", "worker"))
            for index, load in enumerate(loads):
                if load is not None:
                    family.add_metric((self._model(), str(index)), value(load))
            yield family


class _WithAliases(CollectorRegistry):
    """A registry seen through `ALIASES`: every metric, and its copies."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._source = registry

    def collect(self) -> Iterable[Metric]:
        for metric in self._source.collect():
            yield metric
            alias = ALIASES.get(metric.name)
            if alias is not None:
                yield _renamed(metric, alias)


def _renamed(metric: Metric, name: str) -> Metric:
    copy = Metric(name, metric.documentation, metric.type, metric.unit)
    prefix = len(metric.name)
    copy.samples = [Sample(name + sample.name[prefix:], *sample[1:]) for sample in metric.samples]
    return copy
