"""Tests of upstreams' metrics pages and of the load that they give."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.openai.metrics import DraftCounters, EngineMetrics, read_metrics
from draftgate.backends.openai.monitor import MISSING_S
from draftgate.backends.openai.upstream import OpenAIUpstream
from draftgate.backends.openai.upstream_load import (
    HALF_LIFE_DRAFTS,
    PRIOR,
    STALE_S,
    UPSTREAM_PROPOSER,
    UpstreamDrafts,
    UpstreamLoad,
)
from draftgate.backends.worker_config import UpstreamSettings, WorkerConfig
from draftgate.gateway.app import Listening
from draftgate.policies.speculation.upstream_speculation import DraftMeans, expected_accepted
from draftgate.policies.types import WorkerLoad
from tests.gateway.harness import client, post_raw, running, until
from tests.gateway.metric_pages import llama_cpp, sglang, vllm
from tests.gateway.upstreams import Clock, forwarding, held, manual_upstream, upstream, whole

DRAFTS = (100, 400, 250)


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (
            vllm(3, 2, 0.25),
            EngineMetrics("vllm", 3, 2, 0, 0.25, 1000, 32),
        ),
        (
            vllm(3, 2, 0.25, usage_name="gpu_cache_usage_perc", engines=2),
            EngineMetrics("vllm", 6, 4, 0, 0.25, 2000, 32),
        ),
        (
            vllm(blocks="None", drafts=(0, 0, 0)),
            EngineMetrics("vllm", 0, 0, 0, 0.0, drafts=True, counters=DraftCounters(0.0, 0.0, 0.0)),
        ),
        (
            vllm(1, drafts=DRAFTS, engines=2),
            EngineMetrics(
                "vllm", 2, 0, 0, 0.0, 2000, 32, drafts=True, counters=DraftCounters(200, 800, 500)
            ),
        ),
        (sglang(5, 1, 0.5), EngineMetrics("sglang", 5, 1, 0, 0.5, 4096, 1)),
        (
            sglang(5, accept_length=2.5, draft_tokens=4, max_sequences=48),
            EngineMetrics(
                "sglang", 5, 0, 48, 0.0, 4096, 1, drafts=True, means=DraftMeans(3.0, 1.5)
            ),
        ),
        (
            sglang(5, accept_length=2.5, accept_rate=0.5),
            EngineMetrics("sglang", 5, 0, 0, 0.0, 4096, 1, drafts=True, means=DraftMeans(3.0, 1.5)),
        ),
        (sglang(accept_length=2.5), EngineMetrics("sglang", 0, 0, 0, 0.0, 4096, 1, drafts=True)),
        (llama_cpp(2, 7), EngineMetrics("llama.cpp", 2, 7)),
        (
            llama_cpp(2, 7, DRAFTS),
            EngineMetrics("llama.cpp", 2, 7, drafts=True, counters=DraftCounters(100, 400, 250)),
        ),
        ("process_cpu_seconds_total 12.5\n", None),
        ("", None),
    ],
    ids=[
        "vllm", "vllm-older-two-engines", "vllm-starting", "vllm-drafting", "sglang",
        "sglang-drafting", "sglang-older", "sglang-unsaid-length", "llama.cpp",
        "llama.cpp-drafting", "unknown", "empty",
    ],
)  # fmt: skip
def test_page_of_each_engine_is_parsed(page: str, expected: EngineMetrics | None) -> None:
    """The reader adds replicas, counts ranks and priorities once, and ignores NaN."""
    assert read_metrics(page) == expected


def test_broken_sample_raises_value_error() -> None:
    """The reader raises a ValueError for a sample that is not a number."""
    with pytest.raises(ValueError, match="could not convert"):
        read_metrics("vllm:num_requests_running{} many\n")


@given(st.text(max_size=300))
def test_reader_raises_only_value_error(text: str) -> None:
    """The reader returns metrics or None, or raises a ValueError, for any text."""
    for page in (
        text,
        f"vllm:num_requests_running{text}",
        f"llamacpp:requests_processing 1\n{text}",
    ):
        with suppress(ValueError):
            read_metrics(page)


async def test_page_of_another_draftgate_has_price_and_acceptance(sim: Listening) -> None:
    """The reader takes price and acceptance from another Draftgate's page."""
    async with client(sim) as http:
        body = {"prompt": "x = x + 1\n" * 20, "max_tokens": 40, "temperature": 0}
        await http.post("/v1/completions", json=body)
        found = read_metrics((await http.get("/metrics")).text)
    load = sim.node.fleet.workers[0].backend.load()
    assert found is not None
    assert (found.engine, found.running, found.waiting) == ("draftgate", 0, 0)
    assert (found.price, found.acceptance) == (load.price, pytest.approx(load.acceptance))
    assert found.drafts
    assert found.counters is not None
    assert 0 < found.counters.accepted <= found.counters.drafted


def test_recent_drafts_outweigh_old_drafts() -> None:
    """The means follow the latest drafts, even after a restart of the engine."""
    recent = UpstreamDrafts()
    assert recent.means == PRIOR
    recent.add_counters(DraftCounters(1e6, 5e6, 4e6))
    assert recent.means.drafted == pytest.approx(5.0, rel=0.01)
    recent.add_counters(DraftCounters(1e6 + 5 * HALF_LIFE_DRAFTS, 5e6 + 25 * HALF_LIFE_DRAFTS, 4e6))
    assert recent.means.accepted == pytest.approx(0.0, abs=0.2)
    before = recent.means
    recent.add_counters(DraftCounters(0.0, 0.0, 0.0))
    assert recent.means == before
    recent.add_counters(DraftCounters(HALF_LIFE_DRAFTS, 3 * HALF_LIFE_DRAFTS, 3 * HALF_LIFE_DRAFTS))
    assert recent.means.drafted < 4.1
    assert recent.means.accepted > 1.9


@given(
    st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**8), st.integers(0, 10**8))),
)
def test_accepted_mean_never_exceeds_drafted_mean(counts: list[tuple[int, int, int]]) -> None:
    """The mean of accepted tokens never exceeds the mean of drafted tokens for any counters."""
    recent = UpstreamDrafts()
    for drafts, drafted, accepted in counts:
        recent.add_counters(DraftCounters(float(drafts), float(drafted), float(accepted)))
        assert 0.0 <= recent.means.accepted <= recent.means.drafted


def test_load_separates_other_clients_from_own_requests() -> None:
    """The load of other clients is the engine's count minus the gateway's own requests."""
    known = UpstreamLoad(0, None)
    metrics = EngineMetrics("vllm", running=9, waiting=3, kv_usage=0.5, kv_blocks=100)
    known.update(metrics, 4, 10.0)
    load = known.load(4, 10.5)
    assert (load.running, load.waiting, load.others, load.age_s) == (9, 3, 8, 0.5)
    assert (load.kv_blocks_free, load.kv_blocks_total, load.max_sequences) == (50, 100, 9)
    assert known.load(6, 10.5).running == 11
    assert known.load(0, 10.5).running == 5


def test_stale_metrics_are_ignored() -> None:
    """The load of an upstream with stale metrics equals the load without metrics."""
    known = UpstreamLoad(0, None)
    known.update(EngineMetrics("vllm", 9, 3, kv_usage=0.9, kv_blocks=100), 0, 0.0)
    assert known.load(2, STALE_S + 0.1) == UpstreamLoad(0, None).load(2, STALE_S + 0.1)
    assert known.load(2, STALE_S + 0.1).age_s is None


def test_max_sequences_prefer_setting_then_report_then_estimate() -> None:
    """The setting has precedence over the engine's report, and the report over the estimate."""
    full = EngineMetrics("vllm", running=9, waiting=3)
    for declared, metrics, expected in (
        (5, full, 5),
        (0, EngineMetrics("sglang", 9, 3, max_sequences=48), 48),
        (0, full, 9),
        (0, EngineMetrics("vllm", 9, 0), 0),
    ):
        known = UpstreamLoad(declared, None)
        known.update(metrics, 0, 0.0)
        assert known.load(0, 0.0).max_sequences == expected


def test_price_follows_from_counters_and_times() -> None:
    """The price grows with the effect of the batch on step times and is 0 for an idle engine."""
    known = UpstreamLoad(0, None)
    accepted = expected_accepted(0.7, 4.0)
    counters = DraftCounters(1e6, 4e6, 1e6 * accepted)
    known.update(EngineMetrics("vllm", 32, 0, drafts=True, counters=counters), 0, 0.0)
    for load in range(1, 60):
        known.speed.add_stream(0.01 * load + 0.2, 101, 1, load)  # duration of 100 gaps in seconds
    busy = known.load(0, 0.0)
    assert busy.proposers == (UPSTREAM_PROPOSER,)
    assert busy.acceptance == pytest.approx(0.7, abs=0.01)
    assert busy.draft_tokens == pytest.approx(4.0, abs=0.05)
    share = 0.01 * 32 / (0.01 * 32 + 0.2)
    assert busy.price == pytest.approx(share * (1 + accepted) / 5.0, rel=0.05)
    known.update(EngineMetrics("vllm", 0, 0, drafts=True, counters=counters), 0, 0.0)
    assert known.load(0, 0.0).price == 0.0


async def test_metrics_are_read_at_start_and_afterwards() -> None:
    """The gateway reads the upstream's metrics at its start and updates them later."""
    async with upstream(whole) as engine:
        engine.metrics = vllm(3, 0, 0.1, drafts=DRAFTS)
        clock = Clock()
        worker = manual_upstream(WorkerConfig(upstream=UpstreamSettings(url=engine.url)), clock)
        async with running(backends=[worker]) as gateway, client(gateway) as http:
            assert worker.load().running == worker.load().others == 3
            engine.metrics = vllm(5, 2, 0.1, drafts=DRAFTS)
            await worker.poll()
            clock.now_s += 2.5
            assert (worker.load().running, worker.load().waiting) == (5, 2)
            page = (await http.get("/metrics")).text
    assert 'draftgate_others_sequences{model_name="theirs",worker="0"} 7.0' in page
    assert 'draftgate_upstream_metrics_age_seconds{model_name="theirs",worker="0"} 2.5' in page
    assert 'vllm:num_requests_running{model_name="theirs",worker="0"} 5.0' in page


async def test_background_task_polls_metrics() -> None:
    """A background task polls the upstream's metrics."""
    async with upstream(whole) as engine:
        engine.metrics = vllm(1)
        worker = OpenAIUpstream(
            WorkerConfig(upstream=UpstreamSettings(url=engine.url)), poll_s=0.001
        )
        async with running(backends=[worker]):
            engine.metrics = vllm(8)
            await until(lambda: worker.load().others == 8)


async def test_upstream_without_metrics_has_the_gateways_counts() -> None:
    """The load of an upstream without metrics uses the gateway's counts until a page appears."""
    async with upstream(whole) as engine:
        clock = Clock()
        worker = manual_upstream(
            WorkerConfig(upstream=UpstreamSettings(url=engine.url, concurrency=2)), clock
        )
        async with running(backends=[worker]) as gateway, client(gateway) as http:
            assert worker.load() == WorkerLoad(0, 0, 0, 0, 0.0, 0.0, (), max_sequences=2)
            engine.metrics = vllm(4)
            await worker.poll()
            assert worker.load().others == 0
            clock.now_s += MISSING_S
            await worker.poll()
            assert worker.load().others == 4
            assert (await http.post("/v1/completions", json={})).status_code == 200
            engine.metrics = "vllm:num_requests_running{ nonsense"
            await worker.poll()
            assert worker.load().others == 4


async def test_own_requests_are_counted_once() -> None:
    """The gateway counts its own requests once, before and after a reading."""
    async with upstream(held()) as engine, forwarding(engine) as gateway:
        worker = gateway.node.fleet.workers[0].backend
        _, writer = await post_raw(gateway, "/v1/completions", {"prompt": "x", "n": 3})
        await engine.arrived.get()
        assert worker.load().running == 3, "each choice is a sequence"
        engine.metrics = vllm(5, 0)
        await worker.poll()
        assert worker.load().running == 3, "the gateway does not poll a missing page again so soon"
        worker._monitor._next_metrics_s = 0.0
        await worker.poll()
        assert (worker.load().running, worker.load().others) == (5, 2)
        writer.close()
        await until(lambda: worker.load().running == 2)


async def test_other_clients_leave_half_of_the_capacity() -> None:
    """The gateway keeps half of the capacity for its own requests when other clients use the
    engine."""
    async with upstream(held()) as engine:
        engine.metrics = vllm(7, 0)
        async with forwarding(engine, max_sequences=8) as gateway:
            writers = [
                (await post_raw(gateway, "/v1/completions", {"prompt": "x"}))[1] for _ in range(6)
            ]
            for _ in range(4):
                await engine.arrived.get()
            await until(lambda: len(gateway.node.dispatcher.queue) == 2)
            assert len(engine.requests) == 4
            for writer in writers:
                writer.close()
            await until(lambda: gateway.node.in_flight == 0)


async def test_request_waits_while_kv_memory_is_full() -> None:
    """The gateway holds a request until its prompt fits into the engine's free KV memory."""
    async with upstream(held()) as engine:
        engine.metrics = vllm(1, 0, 0.999, blocks="100")  # 32 tokens of 3200 are free
        async with forwarding(engine) as gateway:
            _, first = await post_raw(gateway, "/v1/completions", {"prompt": "x"})
            await engine.arrived.get()
            _, second = await post_raw(gateway, "/v1/completions", {"prompt": "y" * 400})
            await until(lambda: len(gateway.node.dispatcher.queue) == 1)
            engine.metrics = vllm(1, 0, 0.1, blocks="100")
            await gateway.node.fleet.workers[0].backend.poll()
            gateway.node.dispatcher.queue.dispatch_waiting()
            await engine.arrived.get()
            first.close()
            second.close()
            await until(lambda: gateway.node.in_flight == 0)


@pytest.mark.parametrize(
    "pages",
    [(vllm(20, 0, 0.5), vllm(1, 0, 0.02)), (llama_cpp(20), llama_cpp(1))],
    ids=["memory", "counts"],
)
async def test_upstream_with_less_work_of_others_is_chosen(pages: tuple[str, str]) -> None:
    """The gateway prefers the upstream with less work of other clients."""
    async with upstream(whole) as a, upstream(whole) as b:
        a.metrics, b.metrics = pages
        async with forwarding(a, b) as gateway, client(gateway) as http:
            for _ in range(4):
                assert (await http.post("/v1/completions", json={})).status_code == 200
            assert (len(a.requests), len(b.requests)) == (0, 4)


async def test_llama_cpp_reports_slots_without_metrics() -> None:
    """The gateway reads the slots of llama.cpp's server from `/props` if its metrics are
    disabled."""
    async with upstream(whole) as engine:
        engine.owner = "llamacpp"
        worker = manual_upstream(WorkerConfig(upstream=UpstreamSettings(url=engine.url)), Clock())
        async with running(backends=[worker]):
            assert worker.load() == WorkerLoad(0, 0, 0, 0, 0.0, 0.0, (), max_sequences=3)
