"""Metrics pages of upstreams, and the load that is computed from them."""

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
    RecentDrafts,
    UpstreamLoad,
)
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.app import Listening
from draftgate.policies.speculation.upstream_speculation import DraftMeans, expected_accepted
from draftgate.policies.types import WorkerLoad
from tests.gateway.harness import client, post_raw, running, until
from tests.gateway.metric_pages import llama_cpp, sglang, vllm
from tests.gateway.upstreams import Clock, held, in_front, unasked, upstream, whole

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
def test_page_of_each_engine_is_read(page: str, expected: EngineMetrics | None) -> None:
    """Replicas are added, ranks and priorities count once, and NaN is ignored."""
    assert read_metrics(page) == expected


def test_broken_sample_raises_value_error() -> None:
    """A value that is not a number is an error, not a guess."""
    with pytest.raises(ValueError, match="could not convert"):
        read_metrics("vllm:num_requests_running{} many\n")


@given(st.text(max_size=300))
def test_reader_raises_only_value_error(text: str) -> None:
    """Any text at /metrics gives metrics, None or a ValueError."""
    for page in (
        text,
        f"vllm:num_requests_running{text}",
        f"llamacpp:requests_processing 1\n{text}",
    ):
        with suppress(ValueError):
            read_metrics(page)


async def test_page_of_another_draftgate_has_price_and_acceptance(sim: Listening) -> None:
    """It also shows vLLM's names, but is not read as a vLLM."""
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


def test_recent_drafts_outweigh_old_ones() -> None:
    """The means follow the latest drafts, also after a restart of the engine."""
    recent = RecentDrafts()
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
    """Counters may jump, fall or contradict each other."""
    recent = RecentDrafts()
    for drafts, drafted, accepted in counts:
        recent.add_counters(DraftCounters(float(drafts), float(drafted), float(accepted)))
        assert 0.0 <= recent.means.accepted <= recent.means.drafted


def test_load_separates_other_clients_from_own_requests() -> None:
    """Others are the engine's count minus our own, which changes at once."""
    known = UpstreamLoad(0, None)
    metrics = EngineMetrics("vllm", running=9, waiting=3, kv_usage=0.5, kv_blocks=100)
    known.update(metrics, 4, 10.0)
    load = known.load(4, 10.5)
    assert (load.running, load.waiting, load.others, load.age_s) == (9, 3, 8, 0.5)
    assert (load.kv_blocks_free, load.kv_blocks_total, load.max_sequences) == (50, 100, 9)
    assert known.load(6, 10.5).running == 11
    assert known.load(0, 10.5).running == 5


def test_stale_metrics_are_ignored() -> None:
    """An upstream that reports no longer has the load of one that never did."""
    known = UpstreamLoad(0, None)
    known.update(EngineMetrics("vllm", 9, 3, kv_usage=0.9, kv_blocks=100), 0, 0.0)
    assert known.load(2, STALE_S + 0.1) == UpstreamLoad(0, None).load(2, STALE_S + 0.1)
    assert known.load(2, STALE_S + 0.1).age_s is None


def test_max_sequences_are_declared_else_reported_else_estimated() -> None:
    """The operator knows best, then the engine, then the engine's queue."""
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
    """The more the times grow with the batch, the higher it is; an idle engine's is 0."""
    known = UpstreamLoad(0, None)
    accepted = expected_accepted(0.7, 4.0)
    counters = DraftCounters(1e6, 4e6, 1e6 * accepted)
    known.update(EngineMetrics("vllm", 32, 0, drafts=True, counters=counters), 0, 0.0)
    for load in range(1, 60):
        known.speed.add_stream(0.01 * load + 0.2, 101, 1, load)  # seconds of 100 gaps
    busy = known.load(0, 0.0)
    assert busy.proposers == (UPSTREAM_PROPOSER,)
    assert busy.acceptance == pytest.approx(0.7, abs=0.01)
    assert busy.draft_tokens == pytest.approx(4.0, abs=0.05)
    share = 0.01 * 32 / (0.01 * 32 + 0.2)
    assert busy.price == pytest.approx(share * (1 + accepted) / 5.0, rel=0.05)
    known.update(EngineMetrics("vllm", 0, 0, drafts=True, counters=counters), 0, 0.0)
    assert known.load(0, 0.0).price == 0.0


async def test_metrics_are_read_at_start_and_afterwards() -> None:
    """The load is known before the first request, and updated later."""
    async with upstream(whole) as there:
        there.metrics = vllm(3, 0, 0.1, drafts=DRAFTS)
        clock = Clock()
        worker = unasked(WorkerConfig(upstream=there.url), clock)
        async with running(backends=[worker]) as where, client(where) as http:
            assert worker.load().running == worker.load().others == 3
            there.metrics = vllm(5, 2, 0.1, drafts=DRAFTS)
            await worker.poll()
            clock.now_s += 2.5
            assert (worker.load().running, worker.load().waiting) == (5, 2)
            page = (await http.get("/metrics")).text
    assert 'draftgate_others_sequences{model_name="theirs",worker="0"} 7.0' in page
    assert 'draftgate_upstream_metrics_age_seconds{model_name="theirs",worker="0"} 2.5' in page
    assert 'vllm:num_requests_running{model_name="theirs",worker="0"} 5.0' in page


async def test_background_task_polls_metrics() -> None:
    """A change at the upstream soon shows in its load."""
    async with upstream(whole) as there:
        there.metrics = vllm(1)
        worker = OpenAIUpstream(WorkerConfig(upstream=there.url), poll_s=0.001)
        async with running(backends=[worker]):
            there.metrics = vllm(8)
            await until(lambda: worker.load().others == 8)


async def test_upstream_without_metrics_has_the_load_counted_here() -> None:
    """A missing page is asked for again after a while; a broken one changes nothing."""
    async with upstream(whole) as there:
        clock = Clock()
        worker = unasked(WorkerConfig(upstream=there.url, upstream_concurrency=2), clock)
        async with running(backends=[worker]) as where, client(where) as http:
            assert worker.load() == WorkerLoad(0, 0, 0, 0, 0.0, 0.0, (), max_sequences=2)
            there.metrics = vllm(4)
            await worker.poll()
            assert worker.load().others == 0
            clock.now_s += MISSING_S
            await worker.poll()
            assert worker.load().others == 4
            assert (await http.post("/v1/completions", json={})).status_code == 200
            there.metrics = "vllm:num_requests_running{ nonsense"
            await worker.poll()
            assert worker.load().others == 4


async def test_own_requests_are_counted_once() -> None:
    """They are not taken for those of others, before and after a reading."""
    async with upstream(held()) as there, in_front(there) as where:
        worker = where.node.fleet.workers[0].backend
        _, writer = await post_raw(where, "/v1/completions", {"prompt": "x", "n": 3})
        await there.came.get()
        assert worker.load().running == 3, "each choice is a sequence"
        there.metrics = vllm(5, 0)
        await worker.poll()
        assert worker.load().running == 3, "a missing page is not asked for again so soon"
        worker._monitor._next_metrics_s = 0.0
        await worker.poll()
        assert (worker.load().running, worker.load().others) == (5, 2)
        writer.close()
        await until(lambda: worker.load().running == 2)


async def test_other_clients_leave_half_of_the_capacity() -> None:
    """Their sequences take capacity, but never keep this gateway out."""
    async with upstream(held()) as there:
        there.metrics = vllm(7, 0)
        async with in_front(there, seats=8) as where:
            writers = [
                (await post_raw(where, "/v1/completions", {"prompt": "x"}))[1] for _ in range(6)
            ]
            for _ in range(4):
                await there.came.get()
            await until(lambda: len(where.node.dispatcher.queue) == 2)
            assert len(there.requests) == 4
            for writer in writers:
                writer.close()
            await until(lambda: where.node.dispatcher.in_flight == 0)


async def test_request_waits_while_kv_memory_is_full() -> None:
    """A prompt is not sent before it fits into the engine's free KV memory."""
    async with upstream(held()) as there:
        there.metrics = vllm(1, 0, 0.999, blocks="100")  # 32 tokens of 3200 are free
        async with in_front(there) as where:
            _, first = await post_raw(where, "/v1/completions", {"prompt": "x"})
            await there.came.get()
            _, second = await post_raw(where, "/v1/completions", {"prompt": "y" * 400})
            await until(lambda: len(where.node.dispatcher.queue) == 1)
            there.metrics = vllm(1, 0, 0.1, blocks="100")
            await where.node.fleet.workers[0].backend.poll()
            where.node.dispatcher.queue.pump()
            await there.came.get()
            first.close()
            second.close()
            await until(lambda: where.node.dispatcher.in_flight == 0)


@pytest.mark.parametrize(
    "pages",
    [(vllm(20, 0, 0.5), vllm(1, 0, 0.02)), (llama_cpp(20), llama_cpp(1))],
    ids=["memory", "counts"],
)
async def test_upstream_with_less_work_of_others_is_chosen(pages: tuple[str, str]) -> None:
    """Of two upstreams that are otherwise equal, it gets the requests."""
    async with upstream(whole) as a, upstream(whole) as b:
        a.metrics, b.metrics = pages
        async with in_front(a, b) as where, client(where) as http:
            for _ in range(4):
                assert (await http.post("/v1/completions", json={})).status_code == 200
            assert (len(a.requests), len(b.requests)) == (0, 4)


async def test_llama_cpp_reports_slots_without_metrics() -> None:
    """Its server is recognised by the list of models, and reports its slots at /props."""
    async with upstream(whole) as there:
        there.owner = "llamacpp"
        worker = unasked(WorkerConfig(upstream=there.url), Clock())
        async with running(backends=[worker]):
            assert worker.load() == WorkerLoad(0, 0, 0, 0, 0.0, 0.0, (), max_sequences=3)
