"""Fetching the prefix of a new prompt from a worker that has it cached."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import pytest
from msgspec import structs
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from draftgate.backends.core.prefix_cache import extend_chain
from draftgate.backends.engine.backend import EngineBackend
from draftgate.backends.kv_transfer.transfer import TransferEnd
from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.sim.kv_link import LOCAL_LINK, KvLink
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.token_ids import compact
from draftgate.backends.types import SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.kv_pulls import FetchCause, KvFetch
from draftgate.gateway.telemetry.otel import OtelTracing
from draftgate.lab.sim.virtual_time import loop_time_s
from draftgate.policies.kv_transfer import (
    MEASURED_S,
    PullReason,
)
from tests.gateway.harness import client, needs_engine, open_stream, running
from tests.gateway.troubles import (
    Choice,
    Dispatched,
    RecordingWatch,
    dispatching,
    run_job,
    run_scenario,
)

BLOCK_BYTES = 16 * load_profile("cpu-demo").kv_token_bytes
CONFIG = WorkerConfig(kv_bytes=1000 * BLOCK_BYTES, max_num_seqs=4, speculation="off")
ONE_AT_A_TIME = structs.replace(CONFIG, max_num_seqs=1)

PREFIX_TOKENS = 2048
HELD_TOKENS = 800
"""Output of a request that keeps its worker full for the length of a test."""


class Asked(SimBackend):
    """A simulated worker that counts the operations on its blocks."""

    calls: ClassVar = Counter[str]()

    async def begin_import(self, hashes: Any) -> int:
        self.calls["begin_import"] += 1
        return await super().begin_import(hashes)

    async def held_blocks(self, hashes: Any) -> int:
        self.calls["held_blocks"] += 1
        return await super().held_blocks(hashes)

    def pull_blocks(self, hashes: Any, *, urgent: bool = False) -> Any:
        self.calls["pull_blocks"] += 1
        return super().pull_blocks(hashes, urgent=urgent)


def make_job(
    name: str,
    tail: int = 0,
    prefix: int = 1,
    prefix_tokens: int = PREFIX_TOKENS,
    tenant: str = "t",
    output_tokens: int = 20,
) -> Job:
    """Return a job whose prompt has a shared prefix and a tail of 40 tokens of its own."""
    shared = [7 + index * (31 + prefix) % 500 for index in range(prefix_tokens)]
    own = [7 + (index * 17 + tail * 29) % 500 for index in range(40)]
    sampling = SamplingParams(1, seed=7)
    return Job(name, (compact([*shared, *own]),), sampling, output_tokens, tenant=tenant)


@dataclass
class Answer:
    """The results of a job, and the seconds to its first token."""

    choices: list[Choice]
    ttft_s: float
    cached_tokens: int
    watch: RecordingWatch = field(default_factory=RecordingWatch)

    @property
    def fetch(self) -> KvFetch:
        (fetch,) = self.watch.fetches
        return fetch


async def answered(dispatched: Dispatched, job: Job) -> Answer:
    """Run a job to its end."""
    watch, choice, begun_s = RecordingWatch(), Choice(), loop_time_s()
    ttft_s, cached_tokens = 0.0, 0
    async with dispatched.dispatcher.run(job, watch=watch) as run:
        async for delta in run.deltas:
            if delta.token_ids and not choice.token_ids:
                ttft_s = loop_time_s() - begun_s
            cached_tokens = max(cached_tokens, delta.cached_tokens)
            choice.append(delta)
    return Answer([choice], ttft_s, cached_tokens, watch)


@asynccontextmanager
async def holder_full(dispatched: Dispatched, job: Job) -> AsyncIterator[str]:
    """Keep the worker of a job full, and yield the id of the worker."""
    watch = RecordingWatch()
    async with dispatched.dispatcher.run(
        replace(job, request_id="holder", max_tokens=HELD_TOKENS), watch=watch
    ) as run:
        await anext(run.deltas)
        yield watch.workers[0]


def second_job(job: Job, holder: Job, link: KvLink = LOCAL_LINK) -> Answer:
    """Run a job while the worker that ran `holder` is full."""

    async def scenario() -> Answer:
        factory = partial(SimBackend, link=link)
        async with dispatching(factory, 2, config=ONE_AT_A_TIME) as dispatched:
            async with holder_full(dispatched, holder) as worker_id:
                answer = await answered(dispatched, job)
            assert answer.watch.workers != [worker_id]
            return answer

    return run_scenario(scenario())


def test_new_prompt_takes_its_prefix_from_a_full_worker() -> None:
    """A worker that lacks a prefix pulls it from the full worker that has it cached. The text is
    the same, and the first token comes much earlier."""
    job = make_job("r", tail=1)
    pulled = second_job(job, make_job("h"))
    computed = second_job(job, make_job("h", prefix=2))
    assert pulled.choices == computed.choices
    assert pulled.fetch.cause is FetchCause.NEW
    assert pulled.fetch.decision.reason is PullReason.FASTER
    assert pulled.fetch.end is TransferEnd.COMPLETE
    assert pulled.fetch.num_bytes == pulled.fetch.blocks * BLOCK_BYTES
    assert pulled.cached_tokens == pulled.fetch.blocks * 16 == PREFIX_TOKENS
    assert (computed.cached_tokens, computed.watch.fetches) == (0, [])
    assert computed.ttft_s > 10 * pulled.ttft_s


def test_tenants_never_share_a_prefix() -> None:
    """The same prompt of another tenant is computed."""
    answer = second_job(make_job("r", tail=1, tenant="u"), make_job("h", tenant="t"))
    assert (answer.cached_tokens, answer.watch.fetches) == (0, [])


def test_workers_are_not_asked_without_a_gain() -> None:
    """No worker is asked for its blocks if no other worker probably holds more of the prompt, or if
    a pull would take longer than computing."""

    async def scenario() -> None:
        factory = partial(Asked, link=KvLink(2e6, 0.0))
        async with dispatching(factory, 2, config=ONE_AT_A_TIME) as dispatched:
            for number in range(4):  # new prompts, then the same prompts
                watch = RecordingWatch()
                job = make_job(f"n{number}", tail=number % 2, prefix=number % 2)
                await run_job(dispatched.dispatcher, job, watch)
                assert not watch.fetches
            assert not Asked.calls
            async with holder_full(dispatched, make_job("h", prefix=5)):
                slow = await answered(dispatched, make_job("slow", tail=1, prefix=5))
            assert slow.fetch.end is TransferEnd.LATE
            assert Asked.calls == {"begin_import": 1, "pull_blocks": 1}
            async with holder_full(dispatched, make_job("h", prefix=6)):
                answer = await answered(dispatched, make_job("r", tail=1, prefix=6))
            assert answer.fetch.decision.reason is PullReason.SLOWER
            assert Asked.calls == {"begin_import": 1, "pull_blocks": 1}

    Asked.calls.clear()
    run_scenario(scenario())


def small_first(config: WorkerConfig) -> Asked:
    """Return a worker that runs eight sequences, or one if it is the first. The link is slow."""
    sequences = 8 if config.device_index else 1
    return Asked(structs.replace(config, max_num_seqs=sequences), link=KvLink(1e8, 0.0))


def test_simultaneous_requests_share_one_transfer() -> None:
    """Requests whose prefix is on its way wait for it. No block is sent twice."""

    async def scenario() -> None:
        async with dispatching(small_first, 2, config=CONFIG) as dispatched:
            jobs = [make_job(f"r{tail}", tail, prefix_tokens=384) for tail in range(4)]
            async with holder_full(dispatched, jobs[0]):
                answers = await asyncio.gather(*(answered(dispatched, job) for job in jobs[1:]))
            (fetch,) = (fetch for answer in answers for fetch in answer.watch.fetches)
            assert fetch.end is TransferEnd.COMPLETE
            assert Asked.calls["pull_blocks"] == 1
            assert [answer.cached_tokens for answer in answers] == [384] * 3
            spread = max(answer.ttft_s for answer in answers) - min(a.ttft_s for a in answers)
            assert spread < fetch.seconds  # none of them waited for another's transfer in turn

    Asked.calls.clear()
    run_scenario(scenario())


def test_evicted_prefix_is_computed() -> None:
    """A source that has evicted the prefix in the meantime ends the transfer, and the destination
    computes the prompt."""
    job = make_job("r", tail=1)

    async def scenario() -> None:
        async with dispatching(SimBackend, 2, config=ONE_AT_A_TIME) as dispatched:
            async with holder_full(dispatched, make_job("h", prefix=3)) as full:
                hashes: list[bytes] = []
                extend_chain(hashes, "t", job.prompts[0], 16)
                dispatched.dispatcher.queue.router.history.record(full, hashes, 0)
                answer = await answered(dispatched, job)
            assert answer.fetch.source == full
            assert answer.fetch.end is TransferEnd.MISSING
            assert answer.cached_tokens == 0
            assert answer.choices == await run_job(dispatched.dispatcher, job)

    run_scenario(scenario())


@pytest.mark.parametrize(
    ("link", "counts"), [(LOCAL_LINK, True), (KvLink(2e6, 0.0), False)], ids=["fast", "slow"]
)
def test_routing_counts_on_a_pull_over_a_measured_link(link: KvLink, counts: bool) -> None:
    """The router offers a pull only after a transfer has measured the link as fast enough, and as
    long as the measurement is recent."""

    async def scenario() -> None:
        async with dispatching(partial(SimBackend, link=link), 2, config=ONE_AT_A_TIME) as found:
            source, sink = found.fleet.workers
            pulls = found.dispatcher.queue.router.pulls
            async with holder_full(found, make_job("h")) as full:
                assert full == source.worker_id
                assert pulls.offer(source, sink, 0, 128) is None
                answer = await answered(found, make_job("r", tail=1))
                offer = pulls.offer(source, sink, 0, 128)
                assert (offer is not None) == counts
                if offer is not None:
                    assert offer.tokens == PREFIX_TOKENS
                    assert offer.pull_s < 1.5 * answer.fetch.seconds < offer.compute_s
            await asyncio.sleep(MEASURED_S)
            assert pulls.offer(source, sink, 0, 128) is None

    run_scenario(scenario())


async def bytes_of(backend: EngineBackend, hashes: list[bytes]) -> bytes:
    """Return the bytes of the blocks that an engine holds."""
    return b"".join([bytes(chunk.data) async for chunk in backend.pull_blocks(hashes)])


@needs_engine
@pytest.mark.usefixtures("_always_pulls")
async def test_engine_with_a_fetched_prefix_gives_the_same_text() -> None:
    """An engine that pulls a prefix computes only the tail. Text and block bytes are equal to those
    of an engine that computes the whole prompt."""
    config = WorkerConfig(threads=1, kv_bytes=16 << 20, max_model_len=2048, max_num_seqs=1)
    job = make_job("r", tail=1, prefix_tokens=512)
    hashes: list[bytes] = []
    extend_chain(hashes, "t", job.prompts[0], 16)
    async with dispatching(EngineBackend, 2, config=config) as dispatched:
        async with holder_full(dispatched, make_job("h", prefix_tokens=512)) as full:
            answer = await answered(dispatched, job)
        (sink,) = (one for one in dispatched.fleet.workers if one.worker_id != full)
        pulled = await bytes_of(sink.backend, hashes[:32])
    assert answer.fetch.end is TransferEnd.COMPLETE
    assert answer.cached_tokens == 512
    async with dispatching(EngineBackend, 1, config=config) as dispatched:
        assert answer.choices == await run_job(dispatched.dispatcher, job)
        assert await bytes_of(dispatched.fleet.workers[0].backend, hashes[:32]) == pulled


async def test_trace_and_metrics_tell_new_prompts_from_resumed_prompts() -> None:
    """The span and the metrics of a fetch name its cause."""
    exporter = InMemorySpanExporter()
    tracing = OtelTracing(SimpleSpanProcessor(exporter))
    settings = {"tracing": tracing, "devices": (0, 1), "max_num_seqs": 1}
    async with running(**settings) as gateway, client(gateway) as http:
        body = {"prompt": list(make_job("h").prompts[0]), "max_tokens": HELD_TOKENS, "seed": 1}
        async with open_stream(http, "/v1/completions", {**body, "stream": True}):
            await http.post("/v1/completions", json={**body, "max_tokens": 2})
        page = (await http.get("/metrics")).text
    tracing.shutdown()
    (span,) = (one for one in exporter.get_finished_spans() if one.name == "kv.transfer")
    assert span.attributes["draftgate.kv.cause"] == "new"
    counted = [
        line
        for line in page.splitlines()
        if line.startswith('draftgate_kv_fetches_total{cause="new"') and not line.endswith(" 0.0")
    ]
    assert len(counted) == 1
    assert 'reason="faster"' in counted[0]
