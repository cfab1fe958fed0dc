"""Tests of what the processes of a node share."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.types import SpeculationOutcome
from draftgate.gateway.cluster.siblings import Siblings
from draftgate.gateway.cluster.snapshots import (
    ProcessSnapshot,
    ReadActivities,
    ReadMetrics,
    ReadRecords,
    SharedRecord,
    SharedSnapshots,
    ShareSnapshot,
)
from draftgate.gateway.dispatch.decisions import KEPT, Decisions, MoveRecord, RecentMove
from draftgate.gateway.state.local.server import SharedStores, serving_stores
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.live import Activity, ActivityMeter, Live, node_sample
from draftgate.gateway.telemetry.metrics import Metrics, add_snapshots
from draftgate.gateway.telemetry.request_facts import (
    LatestRequests,
    RecordedRequest,
    RequestFacts,
)
from draftgate.gateway.telemetry.worker_list import ProcessStreams, RunningStream
from draftgate.policies.moves import MoveEnd
from draftgate.policies.types import RequestView, SpeculationMode, SpeculationPlan, WorkerLoad
from tests.gateway.harness import client, running

LOAD = WorkerLoad(3, 2, 6, 8, 0.2, 0.5, ("ngram",))
PLAN = SpeculationPlan("off", SpeculationMode.AUTO, None, 0, "test")
VIEW = RequestView(10, 20, 0.5, SpeculationMode.AUTO, None)


def metrics() -> Metrics:
    """Return the metrics of a process without workers."""
    return Metrics(dict, lambda: "m")


def value(rows: list, name: str) -> float:
    """Return the sum of the first numbers of a metric."""
    return sum(numbers[0] for _, found, _, numbers in rows if found == name)


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


def test_metrics_of_another_version_are_omitted() -> None:
    """An unknown metric of another process does not break the page."""
    assert add_snapshots([[("m", "unknown", (), [1.0])]]) == []


def snapshot(of: Metrics, *decisions: SharedRecord) -> ProcessSnapshot:
    """Return the snapshot of an idle process with some decisions."""
    return ProcessSnapshot(of.snapshot(), [Activity()], list(decisions), ProcessStreams())


def decided(key: int, tenant: str = "") -> SharedRecord:
    """Return a decision at a time that equals its key."""
    return SharedRecord(str(key), float(key), tenant, b"%d" % key)


async def test_counters_survive_the_restart_of_a_process() -> None:
    """Counters never decrease when a process restarts, and its gauges end with it."""
    shared = SharedSnapshots()
    before = metrics()
    before.add(metric.GENERATION_TOKENS, 5)
    before.set(metric.QUEUED, 3)
    shared.apply(ShareSnapshot("front 1", "run 1", snapshot(before)))
    after = metrics()
    after.add(metric.GENERATION_TOKENS, 2)
    shared.apply(ShareSnapshot("front 1", "run 2", snapshot(after)))
    found = add_snapshots(shared.apply(ReadMetrics()))
    assert value(found, "draftgate_generation_tokens") == 7
    assert value(found, "draftgate_queued_requests") == 0


async def test_a_process_gets_only_the_snapshots_of_others() -> None:
    """A process adds its own present values, so it does not get its own snapshot. Metrics are the
    exception, because a process only shows what all processes know."""
    shared = SharedSnapshots()
    one = metrics()
    one.add(metric.GENERATION_TOKENS, 5)
    shared.apply(ShareSnapshot("front 0", "run", snapshot(one, decided(1))))
    assert shared.apply(ReadActivities("front 0")) == []
    assert shared.apply(ReadRecords("decisions", "run", 9, None)) == []
    assert shared.apply(ReadMetrics()) == [[], one.snapshot()]
    assert shared.apply(ReadActivities("front 1")) == [Activity()]
    assert shared.apply(ReadRecords("decisions", "other run", 9, None)) == [(1.0, b"1")]


async def test_shared_decisions_are_the_latest_of_a_tenant() -> None:
    """The list is newest first over all processes, limited, and replaced by later versions."""
    shared, idle = SharedSnapshots(), metrics()
    shared.apply(ShareSnapshot("front 0", "a", snapshot(idle, decided(1, "t"), decided(4, "u"))))
    shared.apply(ShareSnapshot("front 1", "b", snapshot(idle, decided(2, "t"), decided(3, "t"))))
    ended = SharedRecord("1", 1.0, "t", b"ended")
    shared.apply(ShareSnapshot("front 0", "a", snapshot(idle, ended)))
    assert shared.apply(ReadRecords("decisions", "c", 9, "t")) == [
        (3.0, b"3"),
        (2.0, b"2"),
        (1.0, b"ended"),
    ]
    assert shared.apply(ReadRecords("decisions", "c", 2, None)) == [(4.0, b"4"), (3.0, b"3")]
    assert shared.apply(ReadRecords("decisions", "a", 9, None)) == [(3.0, b"3"), (2.0, b"2")]


async def test_number_of_shared_decisions_is_bounded() -> None:
    """The parent keeps as many decisions as one process does."""
    shared = SharedSnapshots()
    shared.apply(ShareSnapshot("front 0", "a", snapshot(metrics(), *map(decided, range(KEPT + 7)))))
    found = shared.apply(ReadRecords("decisions", "b", 2 * KEPT, None))
    assert [at_s for at_s, _ in found] == [float(key) for key in reversed(range(7, KEPT + 7))]


def test_changed_decisions_are_taken_once() -> None:
    """Each call returns what is new or has another outcome or move, after all kept decisions at
    first."""
    decisions = Decisions(None, lambda: 7.0)
    first = decisions.record("1", "w", VIEW, LOAD, PLAN, tenant="t")
    assert decisions.take_changed() == [("t", first)]
    assert decisions.take_changed() == []
    second = decisions.record("2", "w", VIEW, LOAD, PLAN)
    decisions.add_outcome(first, SpeculationOutcome())
    assert decisions.take_changed() == [("t", first), ("", second)]
    decisions.add_move("2", 0, "", second, MoveRecord("w", "v", "drain", MoveEnd.MOVED))
    assert decisions.take_changed() == [("", second)]


def test_sample_covers_all_processes() -> None:
    """A sample has sums of rates and counts, and percentiles over the requests of all."""
    one = Activity(1, 2.0, 30.0, 10, 5, [0.1], [0.01, 0.02])
    other = Activity(2, 3.0, 40.0, 30, 35, [0.3, 0.5], [])
    sample = node_sample(7.0, [LOAD], [one, other])
    assert (sample.queued, sample.requests_per_s, sample.tokens_per_s) == (3, 5.0, 70.0)
    assert sample.chosen_k == 1.0
    assert (sample.ttft_s.p50, sample.ttft_s.p99, sample.tpot_s.p50) == (0.3, 0.5, 0.01)
    assert sample.running == LOAD.running  # all processes have the same workers


class Process:
    """What one process of a node shows."""

    def __init__(self, path: Path, name: str) -> None:
        self.metrics = metrics()
        meter = ActivityMeter(self.metrics.recent)
        self.live = Live(lambda: [LOAD], lambda: [meter], lambda: 0.0)
        self.decisions = Decisions(None, lambda: 7.0)
        self.streams = ProcessStreams()
        self.requests = LatestRequests()
        shown = self.metrics.snapshot, self.live, self.decisions, self.requests
        self.siblings = Siblings(path, name, *shown, lambda: self.streams)


async def test_processes_share_over_the_socket_of_their_parent(tmp_path: Path) -> None:
    """Metrics, activity, decisions, requests and streams arrive at the other process."""
    path = tmp_path / "stores"
    stores = SharedStores(MemoryStore(), SharedSnapshots())
    async with serving_stores(stores, path):
        one, other = Process(path, "front 0"), Process(path, "front 1")
        one.metrics.add(metric.GENERATION_TOKENS, 5)
        one.metrics.recent.add_ttft(0.25)
        decision = one.decisions.record("1", "w", VIEW, LOAD, PLAN, tenant="t")
        one.requests.add(watch := RequestFacts(lambda: 0.0))
        watch.client_id, watch.account = "id", "t"
        one.live.take()
        move = MoveRecord("w-0", "w-1", "drain", MoveEnd.MOVED, gap_s=0.5)
        one.streams = ProcessStreams(
            [RunningStream("1", 0, "t", "w-1", 100, 2, moving=True)],
            [RecentMove("1", 0, "t", move)],
        )
        await one.siblings.share()
        assert await other.siblings.streams() == [one.streams]
        rows = add_snapshots(await other.siblings.metrics())
        assert value(rows, "draftgate_generation_tokens") == 5
        assert [found.ttft_s for found in await other.siblings.activities()] == [[0.25]]
        ((at_s, shown),) = await other.siblings.records("decisions", 9, "t")
        assert (at_s, json.loads(shown)) == (7.0, json.loads(msgspec.json.encode(decision)))
        assert await one.siblings.records("decisions", 9, "t") == []
        ((_, request),) = await other.siblings.records("requests", 9, "t")
        assert msgspec.json.decode(request, type=RecordedRequest).record.client_id == "id"
        assert await other.siblings.records("requests", 9, "u") == []


async def test_without_the_parent_a_process_shows_itself(tmp_path: Path) -> None:
    """What the others share is empty while their parent does not respond."""
    alone = Process(tmp_path / "nothing", "front 0").siblings
    await alone.share()
    assert await alone.streams() == await alone.activities() == []
    assert await alone.records("decisions", 9, None) == []


async def test_without_the_parent_there_are_no_metrics(tmp_path: Path) -> None:
    """The values of one process would look like a reset of all counters, so a scrape fails."""
    async with running() as gateway, client(gateway) as http:
        gateway.node.siblings = Process(tmp_path / "nothing", "front 0").siblings
        response = await http.get("/metrics")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")


@pytest.mark.parametrize("seed", range(20))
async def test_counters_never_decrease_between_scrapes(tmp_path: Path, seed: int) -> None:
    """Each scrape reaches any process, and shows at least what every earlier scrape has shown. A
    process may restart at any time, without a last snapshot."""
    rng, path = random.Random(seed), tmp_path / "stores"
    names = [f"front {number}" for number in range(3)]
    shown = 0.0
    async with serving_stores(SharedStores(MemoryStore(), SharedSnapshots()), path):
        processes = [Process(path, name) for name in names]
        for _ in range(60):
            number = rng.randrange(3)
            process = processes[number]
            action = rng.choice(("count", "count", "share", "scrape", "scrape", "restart"))
            if action == "count":
                process.metrics.add(metric.GENERATION_TOKENS, 1)
                process.metrics.observe(metric.PROMPT_LENGTH, 1)
            elif action == "share":
                await process.siblings.share()
            elif action == "restart":
                processes[number] = Process(path, names[number])
            else:
                rows = add_snapshots(await process.siblings.metrics())
                found = value(rows, "draftgate_generation_tokens")
                assert found >= shown
                assert found >= process.metrics.scalar(metric.GENERATION_TOKENS).value
                shown = found
    assert shown > 0
