"""What upstreams tell of themselves, and the load that is made of it."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.base import WorkerConfig
from draftgate.backends.openai.metrics.dialects import read_metrics
from draftgate.backends.openai.metrics.polling import MISSING_S
from draftgate.backends.openai.metrics.reading import DraftTotals, Reading
from draftgate.backends.openai.metrics.tally import HALF_LIFE_DRAFTS, PRIOR, DraftTally
from draftgate.backends.openai.speed import ObservedSpeed
from draftgate.backends.openai.told import STALE_S, UPSTREAM_PROPOSER, ToldLoad
from draftgate.backends.openai.upstream import OpenAIUpstream
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
            Reading("vllm", 3, 2, 0, 0.25, 1000, 32),
        ),
        (
            vllm(3, 2, 0.25, usage_name="gpu_cache_usage_perc", engines=2),
            Reading("vllm", 6, 4, 0, 0.25, 2000, 32),
        ),
        (
            vllm(blocks="None", drafts=(0, 0, 0)),
            Reading("vllm", 0, 0, 0, 0.0, drafts=True, totals=DraftTotals(0.0, 0.0, 0.0)),
        ),
        (
            vllm(1, drafts=DRAFTS, engines=2),
            Reading(
                "vllm", 2, 0, 0, 0.0, 2000, 32, drafts=True, totals=DraftTotals(200, 800, 500)
            ),
        ),
        (sglang(5, 1, 0.5), Reading("sglang", 5, 1, 0, 0.5, 4096, 1)),
        (
            sglang(5, accept_length=2.5, draft_tokens=4, max_sequences=48),
            Reading(
                "sglang", 5, 0, 48, 0.0, 4096, 1, drafts=True, means=DraftMeans(3.0, 1.5)
            ),
        ),
        (
            sglang(5, accept_length=2.5, accept_rate=0.5),
            Reading("sglang", 5, 0, 0, 0.0, 4096, 1, drafts=True, means=DraftMeans(3.0, 1.5)),
        ),
        (sglang(accept_length=2.5), Reading("sglang", 0, 0, 0, 0.0, 4096, 1, drafts=True)),
        (llama_cpp(2, 7), Reading("llama.cpp", 2, 7)),
        (
            llama_cpp(2, 7, DRAFTS),
            Reading("llama.cpp", 2, 7, drafts=True, totals=DraftTotals(*map(float, DRAFTS))),
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
def test_each_engine_is_read_in_its_own_words(page: str, expected: Reading | None) -> None:
    """Figures of replicas are added, those of ranks and priorities count once, NaN counts not."""
    assert read_metrics(page) == expected


def test_a_page_that_is_none_is_an_error() -> None:
    """A broken sample is told, not guessed at."""
    with pytest.raises(ValueError, match="could not convert"):
        read_metrics("vllm:num_requests_running{} many\n")


@given(st.text(max_size=300))
def test_no_text_breaks_the_reader(text: str) -> None:
    """Whatever stands at /metrics is a reading, none, or a ValueError."""
    for page in (
        text,
        f"vllm:num_requests_running{text}",
        f"llamacpp:requests_processing 1\n{text}",
    ):
        with suppress(ValueError):
            read_metrics(page)


async def test_our_own_page_is_read(sim: Listening) -> None:
    """Another Draftgate tells its price and its acceptance, and is not taken for a vLLM."""
    async with client(sim) as http:
        body = {"prompt": "x = x + 1\n" * 20, "max_tokens": 40, "temperature": 0}
        await http.post("/v1/completions", json=body)
        found = read_metrics((await http.get("/metrics")).text)
    load = sim.node.fleet.workers[0].backend.load()
    assert found is not None
    assert (found.engine, found.running, found.waiting) == ("draftgate", 0, 0)
    assert (found.price, found.acceptance) == (load.price, pytest.approx(load.acceptance))
    assert found.drafts
    assert found.totals is not None
    assert 0 < found.totals.accepted <= found.totals.drafted


def test_a_tally_follows_the_last_drafts() -> None:
    """What is new outweighs what is old, also where an engine was restarted."""
    tally = DraftTally()
    assert tally.means == PRIOR
    tally.learn(DraftTotals(1e6, 5e6, 4e6))
    assert tally.means.drafted == pytest.approx(5.0, rel=0.01)
    tally.learn(DraftTotals(1e6 + 5 * HALF_LIFE_DRAFTS, 5e6 + 25 * HALF_LIFE_DRAFTS, 4e6))
    assert tally.means.accepted == pytest.approx(0.0, abs=0.2)
    before = tally.means
    tally.learn(DraftTotals(0.0, 0.0, 0.0))
    assert tally.means == before
    tally.learn(DraftTotals(HALF_LIFE_DRAFTS, 3 * HALF_LIFE_DRAFTS, 3 * HALF_LIFE_DRAFTS))
    assert tally.means.drafted < 4.1
    assert tally.means.accepted > 1.9


@given(
    st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**8), st.integers(0, 10**8))),
)
def test_means_stay_possible_whatever_counters_do(counts: list[tuple[int, int, int]]) -> None:
    """Counters that jump, fall or contradict each other give no more accepted than drafted."""
    tally = DraftTally()
    for drafts, drafted, accepted in counts:
        tally.learn(DraftTotals(float(drafts), float(drafted), float(accepted)))
        assert 0.0 <= tally.means.accepted <= tally.means.drafted


def loaded(told: ToldLoad, sent: int, now_s: float = 0.0) -> WorkerLoad:
    return told.load(sent, ObservedSpeed(), now_s)


def test_what_others_send_shows() -> None:
    """The engine's count less our own is theirs; ours changes at once, theirs with readings."""
    told = ToldLoad(0, None)
    told.learn(Reading("vllm", running=9, waiting=3, kv_usage=0.5, kv_blocks=100), 4, 10.0)
    load = loaded(told, 4, 10.5)
    assert (load.running, load.waiting, load.others, load.age_s) == (9, 3, 8, 0.5)
    assert (load.kv_blocks_free, load.kv_blocks_total, load.max_sequences) == (50, 100, 9)
    assert loaded(told, 6, 10.5).running == 11
    assert loaded(told, 0, 10.5).running == 5


def test_old_readings_count_for_nothing() -> None:
    """Who tells nothing any more is known by what is counted here, as one that never did."""
    told = ToldLoad(0, None)
    told.learn(Reading("vllm", 9, 3, kv_usage=0.9, kv_blocks=100), 0, 0.0)
    assert loaded(told, 2, STALE_S + 0.1) == loaded(ToldLoad(0, None), 2)
    assert loaded(told, 2, STALE_S + 0.1).age_s is None


def test_seats_are_those_declared_else_told_else_seen() -> None:
    """An operator knows best, then the engine, then who waits there."""
    full = Reading("vllm", running=9, waiting=3)
    for declared, reading, seats in (
        (5, full, 5),
        (0, Reading("sglang", 9, 3, max_sequences=48), 48),
        (0, full, 9),
        (0, Reading("vllm", 9, 0), 0),
    ):
        told = ToldLoad(declared, None)
        told.learn(reading, 0, 0.0)
        assert loaded(told, 0).max_sequences == seats


def test_a_price_is_made_of_what_is_seen() -> None:
    """The longer times grow with the batch the higher it is; an idle engine's is 0."""
    told, speed = ToldLoad(0, None), ObservedSpeed()
    accepted = expected_accepted(0.7, 4.0)
    totals = DraftTotals(1e6, 4e6, 1e6 * accepted)
    told.learn(Reading("vllm", 32, 0, drafts=True, totals=totals), 0, 0.0)
    for load in range(1, 60):
        speed.streamed(0.01 * load + 0.2, 101, 1, load)  # seconds of 100 gaps
    busy = told.load(0, speed, 0.0)
    assert busy.proposers == (UPSTREAM_PROPOSER,)
    assert busy.acceptance == pytest.approx(0.7, abs=0.01)
    assert busy.draft_tokens == pytest.approx(4.0, abs=0.05)
    share = 0.01 * 32 / (0.01 * 32 + 0.2)
    assert busy.price == pytest.approx(share * (1 + accepted) / 5.0, rel=0.05)
    told.learn(Reading("vllm", 0, 0, drafts=True, totals=totals), 0, 0.0)
    assert told.load(0, speed, 0.0).price == 0.0


async def test_metrics_are_read_when_it_starts_and_go_on_being_read() -> None:
    """The first request meets a load that is known, and later ones a newer one."""
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


async def test_the_background_reads_by_itself() -> None:
    """Nobody has to ask: what changes there is known here soon."""
    async with upstream(whole) as there:
        there.metrics = vllm(1)
        worker = OpenAIUpstream(WorkerConfig(upstream=there.url), poll_s=0.001)
        async with running(backends=[worker]):
            there.metrics = vllm(8)
            await until(lambda: worker.load().others == 8)


async def test_without_metrics_all_is_as_counted_here() -> None:
    """A page that is not there is asked for again after a while, and nobody is worse off."""
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


async def test_our_own_requests_are_no_others() -> None:
    """What this gateway has there is counted once, before and after a reading."""
    async with upstream(held()) as there, in_front(there) as where:
        worker = where.node.fleet.workers[0].backend
        _, writer = await post_raw(where, "/v1/completions", {"prompt": "x", "n": 3})
        await there.came.get()
        assert worker.load().running == 3, "each choice takes a place"
        there.metrics = vllm(5, 0)
        await worker.poll()
        assert worker.load().running == 3, "it is not asked again so soon"
        worker._poller._missing_until_s = 0.0
        await worker.poll()
        assert (worker.load().running, worker.load().others) == (5, 2)
        writer.close()
        await until(lambda: worker.load().running == 2)


async def test_who_is_full_of_others_gets_half_at_least() -> None:
    """Others' sequences take seats, but no gateway is kept out by them altogether."""
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


async def test_memory_that_is_full_lets_requests_wait_here() -> None:
    """A prompt that does not fit into the KV memory which an engine has left is not sent yet."""
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
async def test_the_one_that_others_use_less_is_chosen(pages: tuple[str, str]) -> None:
    """Of two that are alike here, requests go to the one with less of others' work."""
    async with upstream(whole) as a, upstream(whole) as b:
        a.metrics, b.metrics = pages
        async with in_front(a, b) as where, client(where) as http:
            for _ in range(4):
                assert (await http.post("/v1/completions", json={})).status_code == 200
            assert (len(a.requests), len(b.requests)) == (0, 4)


async def test_a_llama_cpp_tells_its_slots_without_metrics() -> None:
    """Its server is known by the list of models, and has its seats at another address."""
    async with upstream(whole) as there:
        there.owner = "llamacpp"
        worker = unasked(WorkerConfig(upstream=there.url), Clock())
        async with running(backends=[worker]):
            assert worker.load() == WorkerLoad(0, 0, 0, 0, 0.0, 0.0, (), max_sequences=3)
