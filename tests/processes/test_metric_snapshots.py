"""Tests of the metrics that processes share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.metric_snapshots import SharedSnapshots, add_snapshots
from draftgate.gateway.telemetry.metrics import Metrics


def metrics() -> Metrics:
    """Return the metrics of a process without workers."""
    return Metrics(list, lambda: "m")


def value(rows: list, name: str) -> float:
    """Return the sum of the first numbers of a metric."""
    return sum(numbers[0] for found, _, numbers in rows if found == name)


@given(st.lists(st.lists(st.integers(0, 100), max_size=5), min_size=1, max_size=4))
def test_counters_and_histograms_of_processes_add_up(amounts: list[list[int]]) -> None:
    """The page of one process has the sums over all processes."""
    processes = []
    for of_process in amounts:
        one = metrics()
        for amount in of_process:
            one.add(metric.GENERATION_TOKENS, amount)
            one.observe(metric.PROMPT_LENGTH, amount)
        processes.append(one)
    first, *others = processes
    write, _ = first.page("", [other.snapshot() for other in others])
    page = write().decode()
    total, count = sum(map(sum, amounts)), sum(map(len, amounts))
    assert f'draftgate_generation_tokens_total{{model_name="m"}} {float(total)}' in page
    assert f'{metric.PROMPT_LENGTH.name}_count{{model_name="m"}} {float(count)}' in page


def test_values_of_the_whole_node_are_not_added() -> None:
    """Two processes that see the same open worker report one open worker."""
    one, other = metrics(), metrics()
    for process in (one, other):
        process.set(metric.OPEN_WORKERS, 1)
        process.set(metric.QUEUED, 2)
    found = add_snapshots([one.snapshot(), other.snapshot()])
    assert value(found, "draftgate_open_workers") == 1
    assert value(found, "draftgate_queued_requests") == 4


async def test_counters_survive_the_restart_of_a_process() -> None:
    """Counters never decrease when a process restarts, and its gauges end with it."""
    shared = SharedSnapshots()
    before = metrics()
    before.add(metric.GENERATION_TOKENS, 5)
    before.set(metric.QUEUED, 3)
    await shared.share("front 1", "run 1", before.snapshot())
    after = metrics()
    after.add(metric.GENERATION_TOKENS, 2)
    await shared.share("front 1", "run 2", after.snapshot())
    found = add_snapshots(await shared.others("front 0"))
    assert value(found, "draftgate_generation_tokens") == 7
    assert value(found, "draftgate_queued_requests") == 0


async def test_a_process_gets_only_the_snapshots_of_others() -> None:
    """A process adds its own present values, so it does not get its own snapshot."""
    shared = SharedSnapshots()
    one = metrics()
    one.add(metric.GENERATION_TOKENS, 5)
    await shared.share("front 0", "run", one.snapshot())
    assert await shared.others("front 0") == []
    assert await shared.others("front 1") == [one.snapshot()]


def test_metrics_of_another_version_are_omitted() -> None:
    """An unknown metric of another process does not break the page."""
    assert add_snapshots([[("unknown", (), [1.0])]]) == []
