"""Tests of metrics: definitions, aliases and the number of label values."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from draftgate.backends.base import TokenUsage
from draftgate.backends.types import Delta, FinishReason, Phases
from draftgate.gateway.errors import Overloaded, QueueTimeout, QuotaExceeded
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.ending import Ending
from draftgate.gateway.telemetry.live import LEAST_JUDGED
from draftgate.gateway.telemetry.metric_definitions import METRICS
from draftgate.gateway.telemetry.metric_form import Kind, MetricDefinition
from draftgate.gateway.telemetry.metrics import (
    MOST_VALUES,
    OTHER,
    HistogramSeries,
    Metrics,
    shown_name,
)
from draftgate.gateway.telemetry.request_series import MOST_ENDED, RequestSeries
from draftgate.gateway.telemetry.watch import RequestWatch
from draftgate.gateway.tracing import NO_SPAN
from draftgate.policies.types import ServiceLevel
from tests.gateway.harness import ScriptedBackend, client, post_raw, running, until

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
SEMCONV = {
    "gen_ai_server_request_duration_seconds": {0.01 * 2**n for n in range(14)},
    "gen_ai_server_time_to_first_token_seconds": {
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10,
    },
    "gen_ai_server_time_per_output_token_seconds": {
        0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5,
    },
}  # fmt: skip
"""Bucket bounds of OpenTelemetry's GenAI conventions, in seconds."""


class Clock:
    """A clock that the test sets, in seconds."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def metrics() -> Metrics:
    """The metrics of a node without workers."""
    return Metrics(dict, lambda: "m")


def samples(
    metrics: Metrics, accept: str = ""
) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return every sample by name and labels, without the model's name."""
    write, content_type = metrics.page(accept)
    read: Any = read_openmetrics if "openmetrics" in content_type else read_text
    return {
        (sample.name, _labels(sample.labels.items())): sample.value
        for family in read(write().decode())
        for sample in family.samples
    }


def _labels(pairs: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple(
        sorted(pair for pair in pairs if pair[0] not in {"model_name", "gen_ai_request_model"})
    )


def total(found: dict[Any, float], name: str, **labels: str) -> float:
    """Return the sum of the samples with this name and these labels."""
    return sum(v for (n, has), v in found.items() if n == name and set(labels.items()) <= set(has))


def watched(metrics: Metrics, clock: Clock) -> RequestWatch:
    return RequestWatch(
        RequestSeries(metrics), NO_SPAN, "/v1/completions", "text_completion", clock
    )


def test_every_name_is_defined_once_with_help_and_unit() -> None:
    """Every metric has a unique name, a help text and a unit."""
    names = [name for definition in METRICS for name in (definition.name, *definition.aliases)]
    assert len(names) == len(set(names))
    assert all(definition.text and definition.unit for definition in METRICS)
    assert all(f.name.startswith("draftgate_") for f in METRICS)
    assert all(bool(f.buckets) == (f.kind is Kind.HISTOGRAM) for f in METRICS)
    assert all(list(f.buckets) == sorted(set(f.buckets)) for f in METRICS)


@pytest.mark.parametrize("name", SEMCONV)
def test_buckets_include_the_bounds_of_the_conventions(name: str) -> None:
    """The buckets of a metric include all bounds of OpenTelemetry's conventions."""
    (definition,) = (definition for definition in METRICS if name in definition.aliases)
    assert {round(bound, 9) for bound in SEMCONV[name]} <= set(definition.buckets)


def test_text_and_openmetrics_have_the_same_samples(metrics: Metrics) -> None:
    """The text format and OpenMetrics contain the same samples."""
    for definition in METRICS:
        if definition.of_worker is None:
            values = ["x"] * len(definition.labels)
            record = metrics.observe if definition.kind is Kind.HISTOGRAM else metrics.add
            record(definition, 2.0, *values)
    assert metrics.page("text/html")[1].startswith("text/plain; version=0.0.4")
    assert metrics.page(OPENMETRICS)[1].startswith("application/openmetrics-text; version=1.0.0")
    assert samples(metrics, OPENMETRICS) == samples(metrics)
    assert len(samples(metrics)) > 100


@pytest.mark.parametrize(
    "definition", [f for f in METRICS if f.aliases and f.of_worker is None], ids=lambda f: f.name
)
def test_alias_has_the_same_values(metrics: Metrics, definition: MetricDefinition) -> None:
    """A metric has the same values under each of its names."""
    values = ["" if label == "error_type" else "x" for label in definition.labels]
    if definition.kind is Kind.HISTOGRAM:
        metrics.observe(definition, 3.0, *values)
        suffixes = ["_count", "_sum"]
    else:
        metrics.add(definition, 3.0, *values)
        suffixes = [""]
    found = samples(metrics)
    for alias in definition.aliases:
        for suffix in suffixes:
            own = total(found, shown_name(definition, definition.name) + suffix)
            assert total(found, shown_name(definition, alias) + suffix) == own > 0


def test_label_values_are_bounded_and_no_count_is_lost(metrics: Metrics) -> None:
    """The metrics count further label values as `other` beyond a limit of `MOST_VALUES`."""
    for number in range(1000):
        for _ in range(2):
            metrics.add(metric.REQUESTS, 1, f"/{number}", "finished")
    found = {
        key: value
        for key, value in samples(metrics).items()
        if key[0] == "draftgate_requests_total"
    }
    assert len(found) == MOST_VALUES + 1
    assert sum(found.values()) == 2000
    assert total(found, "draftgate_requests_total", endpoint=OTHER) == 2 * (1000 - MOST_VALUES)


def test_metric_without_labels_starts_at_zero(metrics: Metrics) -> None:
    """A metric without labels has the value 0 before its first event."""
    found = samples(metrics)
    for definition in METRICS:
        if not definition.labels:
            suffix = "_count" if definition.kind is Kind.HISTOGRAM else ""
            assert found[shown_name(definition, definition.name) + suffix, ()] == 0


@given(st.lists(st.floats(0, 20) | st.sampled_from(metric.GAPS.buckets), max_size=60))
def test_values_counted_together_are_counted_as_one_by_one(values: list[float]) -> None:
    """A histogram has the same counts whether values are counted together or one by one."""
    bounds = metric.GAPS.buckets
    found, expected = (HistogramSeries(bounds, [0] * (len(bounds) + 1)) for _ in range(2))
    for value in values:
        expected.observe(value)
    found.observe_all(values)
    assert found.counts == expected.counts
    assert found.total == pytest.approx(expected.total)


def test_inter_token_latency_is_between_deliveries_of_a_choice(metrics: Metrics) -> None:
    """The inter-token latency is the gap between two deliveries to the same choice."""
    clock = Clock()
    watch = watched(metrics, clock)
    for choice, at_s in ((0, 101.0), (1, 101.5), (0, 102.0), (1, 104.5)):
        clock.now_s = at_s
        watch.observe(Delta(choice, (1, 2), "ab"))
    found = samples(metrics)
    for name in ("draftgate_inter_token_latency_seconds", "vllm:time_per_output_token_seconds"):
        assert total(found, name + "_count") == 2
        assert total(found, name + "_sum") == pytest.approx(1.0 + 3.0)
    assert total(found, "vllm:generation_tokens_total") == 8
    assert total(found, "draftgate_time_to_first_token_seconds_sum") == pytest.approx(1.0)


def test_queue_prefill_and_decode_times_come_from_the_worker(metrics: Metrics) -> None:
    """The queue, prefill and decode times use the timestamps that the worker recorded."""
    clock = Clock()
    watch = watched(metrics, clock)
    phases = Phases(100.0, 100.25, ((101.0, 7),), 101.0)
    clock.now_s = 101.125
    watch.observe(Delta(0, (1,), "a", phases=phases))
    clock.now_s = 103.0
    watch.observe(Delta(0, (1,), "a", finish_reason=FinishReason.STOP))
    found = samples(metrics)
    assert total(found, "draftgate_worker_queue_seconds_sum") == pytest.approx(0.25)
    assert total(found, "vllm:request_prefill_time_seconds_sum") == pytest.approx(0.75)
    assert total(found, "vllm:request_decode_time_seconds_sum") == pytest.approx(2.0)


async def test_time_to_worker_is_observed_for_every_prompt(scripted: ScriptedBackend) -> None:
    """The server records the time to the worker for every prompt, also under vLLM's metric name."""
    body = {"prompt": ["a", "b"], "max_tokens": 5, "stream": True}
    async with running(backends=[scripted]) as gateway:
        _, writer = await post_raw(gateway, "/v1/completions", body)
        for _ in range(2):
            await scripted.submitted.get()
        found = samples(gateway.node.metrics)
        writer.close()
    for name in ("draftgate_time_to_worker_seconds", "vllm:request_queue_time_seconds"):
        assert total(found, name + "_count") == 2
        assert total(found, name + "_sum") > 0


def test_failed_requests_do_not_count_in_served_latencies(metrics: Metrics) -> None:
    """The latencies of served requests exclude failed requests, which have an error type."""
    clock = Clock()
    served, broken = watched(metrics, clock), watched(metrics, clock)
    broken.end(Ending.FAILED, 500, KeyError("x"))
    clock.now_s += 2.0
    served.end(Ending.FINISHED, 200)
    found = samples(metrics)
    name = "gen_ai_server_request_duration_seconds"
    labels = {"gen_ai_operation_name": "text_completion", "gen_ai_provider_name": "draftgate"}
    assert total(found, name + "_count", **labels) == 2
    assert total(found, name + "_count", error_type="KeyError", **labels) == 1
    assert total(found, "vllm:e2e_request_latency_seconds_count") == 1
    assert total(found, "vllm:e2e_request_latency_seconds_sum") == pytest.approx(2.0)


async def test_choices_are_counted_by_finish_reason(scripted: ScriptedBackend) -> None:
    """The metrics count choices by finish reason, with `abort` for a disconnected client."""
    body = {"prompt": "x", "max_tokens": 5, "stream": True}
    async with running(backends=[scripted]) as gateway, client(gateway) as http:
        for last in (True, False):
            reader, writer = await post_raw(gateway, "/v1/completions", body)
            request = await scripted.submitted.get()
            scripted.emit(request, "a", last=last)
            await reader.readuntil(b"data: ")
            if not last:
                writer.close()
            await until(lambda: gateway.node.in_flight == 0)
            writer.close()
        response = await http.get("/metrics", headers={"accept": OPENMETRICS})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    found = {
        sample.labels["finished_reason"]: sample.value
        for family in read_openmetrics(response.text)
        for sample in family.samples
        if sample.name == "vllm:request_success_total"
    }
    assert found == {"stop": 1.0, "abort": 1.0}


async def test_first_event_of_a_labelled_counter_increases_its_series() -> None:
    """Rates count the first request, because its series was 0 before."""
    async with running() as gateway, client(gateway) as http:

        async def finished() -> float:
            text = (await http.get("/metrics")).text
            begin = 'draftgate_requests_total{endpoint="/v1/completions"'
            (line,) = [
                line
                for line in text.splitlines()
                if line.startswith(begin) and 'outcome="finished"' in line
            ]
            return float(line.split()[-1])

        assert await finished() == 0
        await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert await finished() == 1


async def test_tenants_have_latency_refusals_and_slo(tmp_path: Path) -> None:
    """The metrics have the latency, the refusals and the attainment of each tenant."""
    keys = tmp_path / "keys.yaml"
    text = "keys: [{name: a, key: sk-a, requests_per_minute: 2}, {name: b, key: sk-b}]"
    await asyncio.to_thread(keys.write_text, text)
    body = {"prompt": "x", "max_tokens": 2, "ignore_eos": True}
    path = "/v1/completions"
    async with running(api_keys_file=str(keys)) as gateway, client(gateway) as http:
        for key, ttft_ms in (("a", "60000"), ("a", "60000"), ("a", "60000"), ("b", None)):
            headers = {"authorization": f"Bearer sk-{key}"}
            if ttft_ms is not None:
                headers["x-slo-ttft-ms"] = ttft_ms
            await http.post(path, json=body, headers=headers)
        found = samples(gateway.node.metrics)

    def value(name: str, **labels: str) -> float:
        return found.get((f"draftgate_tenant_{name}", tuple(sorted(labels.items()))), 0.0)

    assert value("slo_requests_total", tenant="a", outcome="met") == 2
    assert value("slo_requests_total", tenant="b", outcome="met") == 0
    assert value("refused_requests_total", tenant="a", kind="quota_requests") == 1
    for tenant, requests in (("a", 2), ("b", 1)):
        assert value("request_duration_seconds_count", tenant=tenant) == requests
        assert value("time_to_first_token_seconds_count", tenant=tenant) == requests


@pytest.mark.parametrize(
    ("ending", "ttft_s", "outcome"),
    [
        (Ending.FINISHED, 0.4, "met"),
        (Ending.FINISHED, 0.6, "missed"),
        (Ending.FAILED, 0.4, "missed"),
        (Ending.CANCELLED, 0.4, None),
        (Ending.REJECTED, None, None),
    ],
)
def test_attainment_counts_requests_that_ended_intact_and_in_time(
    metrics: Metrics, ending: Ending, ttft_s: float | None, outcome: str | None
) -> None:
    """A request with targets counts as met if it finished in time, as missed if it was late or
    failed, and not at all if its client left or it was refused."""
    clock = Clock()
    watch = RequestWatch(
        RequestSeries(metrics), NO_SPAN, "/v1/completions", "text_completion", clock
    )
    watch.forwarding("m", "a", ServiceLevel(0.5, None), 1, stream=True)
    if ttft_s is not None:
        clock.now_s += ttft_s
        watch.progressed(1)
    watch.end(ending, 200)
    metrics.fold()
    counts = {series: one.value for series, one in metrics._scalars[metric.TENANT_SLO].items()}
    assert counts == ({} if outcome is None else {("a", outcome): 1})


def test_refused_requests_miss_their_targets(metrics: Metrics) -> None:
    """The attainment of recent requests counts refusals for want of capacity as missed, but neither
    those of quotas nor requests without targets. It is unknown for a few requests."""
    cases = [
        (ServiceLevel(0.5), Ending.FINISHED, None),
        (ServiceLevel(0.5), Ending.REJECTED, Overloaded("too late", 1.0)),
        (ServiceLevel(0.5), Ending.REJECTED, QuotaExceeded("no tokens left", 1.0)),
        (ServiceLevel(), Ending.FINISHED, None),
        (ServiceLevel(), Ending.FAILED, QueueTimeout("no worker had capacity", 1.0)),
    ]
    for number in range(LEAST_JUDGED):
        assert (metrics.recent.attainment() is None) is (3 * number < LEAST_JUDGED)
        for service, ending, error in cases:
            watch = watched(metrics, Clock())
            watch.forwarding("m", "a", service, 1, stream=True)
            if ending is Ending.FINISHED:
                watch.progressed(1)
            watch.end(ending, 200, error)
    assert metrics.recent.attainment() == pytest.approx(1 / 3)


def test_every_reading_counts_all_that_requests_have_reported(metrics: Metrics) -> None:
    """Every scrape and every sample of the live page counts what requests have reported before,
    once, however many requests have ended since the last reading."""
    series, clock, ended, sent = RequestSeries(metrics), Clock(), 0, 0
    for number in (1, 0, MOST_ENDED - 1, MOST_ENDED, 3 * MOST_ENDED + 1):
        open_watches = [RequestWatch(series, NO_SPAN, "/v1/a", "chat", clock) for _ in range(3)]
        for watch in open_watches:
            watch.forwarding("m", "", ServiceLevel(), 1, stream=True)
            clock.now_s += 0.5
            watch.observe(Delta(0, (1, 2), "ab"))
            sent += 1
        for _ in range(number):
            watch = RequestWatch(series, NO_SPAN, "/v1/a", "chat", clock)
            watch.forwarding("m", "", ServiceLevel(), 1, stream=True)
            clock.now_s += 0.5
            watch.observe(Delta(0, (1, 2), "ab", finish_reason=FinishReason.STOP))
            watch.end(Ending.FINISHED, 200)
            ended, sent = ended + 1, sent + 1
        for _ in range(2):
            found = samples(metrics)
            assert total(found, "draftgate_requests_total", endpoint="/v1/a") == ended
            assert total(found, "draftgate_choices_total", finish_reason="stop") == ended
            assert total(found, "draftgate_request_duration_seconds_count") == ended
            assert total(found, "draftgate_generation_tokens_total") == 2 * sent
            assert total(found, "draftgate_time_to_first_token_seconds_count") == sent
            assert metrics.recent.requests == ended
            assert metrics.recent.tokens == 2 * sent
            assert len(metrics.recent.ttft_s()) == sent


def test_metrics_of_tenants_have_bounded_series(metrics: Metrics) -> None:
    """Beyond the limit, tenants share the series `other`, and no count is lost."""
    for number in range(3 * MOST_VALUES):
        watch = watched(metrics, Clock())
        watch.forwarding("m", f"t{number}", ServiceLevel(0.5, None), 1, stream=True)
        watch.progressed(1)
        watch.settled(TokenUsage(prompt=0, cached=0, output=5))
        watch.end(Ending.FINISHED, 200)
        refused = RequestWatch(
            RequestSeries(metrics), NO_SPAN, "/v1/completions", "text_completion"
        )
        refused.forwarding("m", f"t{number}", ServiceLevel(0.5, None), 1, stream=True)
        refused.end(Ending.REJECTED, 429, QuotaExceeded("no tokens left", 1.0))
    metrics.fold()
    for definition in (metric.TENANT_TTFT, metric.TENANT_DURATION):
        assert len(metrics._histograms[definition]) == MOST_VALUES + 1
    counters = {metric.TENANT_SLO: 1, metric.TENANT_REFUSED: 1, metric.TENANT_TOKENS: 5}
    for definition, each in counters.items():
        counts = [series.value for series in metrics._scalars[definition].values()]
        assert sorted(counts) == [each] * MOST_VALUES + [2 * MOST_VALUES * each]
