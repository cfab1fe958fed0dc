"""Tests of claims: a resumed request gets room that newcomers of every gateway leave to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.errors import BackendFailed
from draftgate.backends.token_ids import compact
from draftgate.backends.types import SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.assembly import loop_time_s
from draftgate.gateway.dispatch.claims import CLAIM_S, RENEW_S
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.state.commands import (
    ClaimWorker,
    ListWorkers,
    PublishReport,
    ReleaseLeases,
    RenewLeases,
    ReserveLease,
)
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.gateway.state.values import Lease
from tests.gateway.flaky_store import FlakyStore, guarded
from tests.gateway.stores import offer, report
from tests.gateway.troubles import (
    Choice,
    RecordingWatch,
    run_job,
    run_scenario,
    simulated,
)
from tests.gateway.two_gateways import Gateway, Pool, pool_of

CONFIG = WorkerConfig(kv_bytes=16 << 20, speculation="off")
"""Settings of workers with KV memory for 2,720 tokens."""

LONG_PROMPT, LONG_OUTPUT = 1200, 900
CLIENTS = 40


def job(number: int, prompt: int = 60, output: int = 150) -> Job:
    """Return a job whose prompt shares no prefix with the prompts of other jobs."""
    rng = Random(number)
    ids = compact([rng.randrange(100, 4000) for _ in range(prompt)])
    return Job(f"r{number}", (ids,), SamplingParams(output, seed=7, ignore_eos=True), output)


def long_job(number: int = 0) -> Job:
    return job(number, LONG_PROMPT, LONG_OUTPUT)


class Crowd:
    """Clients that send small requests to a gateway without a pause.

    Attributes:
        served: number of answered requests.
    """

    def __init__(self) -> None:
        self.served = 0
        self._numbers = count(1000)

    @asynccontextmanager
    async def at(self, gateway: Gateway, clients: int) -> AsyncIterator[None]:
        """Run clients of a gateway until the block ends."""
        tasks = [asyncio.create_task(self._client(gateway)) for _ in range(clients)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _client(self, gateway: Gateway) -> None:
        while True:
            await run_job(gateway.dispatcher, job(next(self._numbers)))
            self.served += 1


@asynccontextmanager
async def saturated(pool: Pool, crowd: Crowd) -> AsyncIterator[None]:
    """Run 40 clients, half of them at each gateway."""
    first, second = pool.gateways
    async with crowd.at(first, CLIENTS // 2), crowd.at(second, CLIENTS // 2):
        yield


async def start_long(
    pool: Pool, gateway: Gateway, number: int = 0
) -> tuple[asyncio.Task[list[Choice]], RecordingWatch]:
    """Start a stream with a long context, which has its worker when this function returns."""
    watch = RecordingWatch()
    task = asyncio.create_task(run_job(gateway.dispatcher, long_job(number), watch))
    while not watch.workers:  # noqa: ASYNC110 - a placement sets no event
        await asyncio.sleep(0.01)
    return task, watch


def test_newcomers_of_two_gateways_do_not_starve_a_resumed_stream() -> None:
    """A stream with a long context resumes within seconds, although 40 clients keep two gateways
    busy with small requests."""

    async def scenario() -> tuple[float, int, list[Choice]]:
        store, crowd = MemoryStore(loop_time_s), Crowd()
        async with pool_of(simulated({}), 3, (store, store), CONFIG) as pool:
            stream, watch = await start_long(pool, pool.gateways[0])
            async with saturated(pool, crowd):
                await asyncio.sleep(1.5)
                assert not stream.done()
                await pool.withdraw(watch.workers[0])
                begin_s = loop_time_s()
                while not watch.resumes:
                    assert not stream.done(), stream.exception()
                    await asyncio.sleep(0.01)
                waited_s, before = loop_time_s() - begin_s, crowd.served
                choices = await stream
                await asyncio.sleep(5.0)
                return waited_s, crowd.served - before, choices

    waited_s, served, (choice,) = run_scenario(scenario())
    assert waited_s < 5.0  # the longest small request takes 1.5 s
    assert len(choice.token_ids) == LONG_OUTPUT
    assert served > 100


def test_a_resumed_stream_is_not_starved_while_the_store_is_out() -> None:
    """A stream with a long context also resumes if both gateways decide alone."""

    async def scenario() -> tuple[float, list[Choice]]:
        flaky, crowd = FlakyStore(), Crowd()
        flaky.gateways = 2
        stores = (guarded(flaky), guarded(flaky))
        async with pool_of(simulated({}), 3, stores, CONFIG) as pool:
            stream, watch = await start_long(pool, pool.gateways[0])
            async with saturated(pool, crowd):
                await asyncio.sleep(1.0)
                flaky.failure = "gone"
                await asyncio.sleep(0.5)
                await pool.withdraw(watch.workers[0])
                begin_s = loop_time_s()
                choices = await stream
                waited_s = loop_time_s() - begin_s
        for store in stores:
            await store.close()
        return waited_s, choices

    waited_s, (choice,) = run_scenario(scenario())
    assert waited_s < 15.0  # far below the queue timeout of 60 s
    assert len(choice.token_ids) == LONG_OUTPUT


def test_all_resumed_streams_are_served_in_turn() -> None:
    """All streams of a stopped worker resume, even if their first claims reach the store late."""

    async def scenario() -> tuple[int, list[int]]:
        links, crowd = [FlakyStore(), FlakyStore()], Crowd()
        links[1].inner = links[0].inner
        first, second = map(guarded, links)
        async with pool_of(simulated({}), 3, (first, second), CONFIG) as pool:
            watches = [RecordingWatch() for _ in range(9)]
            streams = [
                asyncio.create_task(
                    run_job(pool.gateways[n % 2].dispatcher, job(n, 400, 400), watch)
                )
                for n, watch in enumerate(watches)
            ]
            async with saturated(pool, crowd):
                await asyncio.sleep(0.5)
                links[0].delay_s = 0.015  # below the deadline of 20 ms
                await pool.withdraw(pool.workers[0].worker_id)
                choices = await asyncio.gather(*streams)
            resumed = sum(len(watch.resumes) for watch in watches)
        for store in (first, second):
            await store.close()
        return resumed, [len(choice.token_ids) for (choice,) in choices]

    resumed, lengths = run_scenario(scenario())
    assert resumed >= 2
    assert lengths == [400] * 9


@dataclass
class Claimed:
    """A pool of two workers, the second of which is claimed by a stream of the first gateway.

    The lease `theirs` fills the claimed worker until the test releases it.

    Attributes:
        links: the connection of each gateway to the store.
    """

    pool: Pool
    store: MemoryStore
    links: list[FlakyStore]
    stream: asyncio.Task[list[Choice]]
    watch: RecordingWatch
    worker_id: str

    async def claimed_tokens(self) -> int:
        return sum(view.claimed_tokens for view in (await self.store.call(ListWorkers())).workers)


@asynccontextmanager
async def claimed_worker(timeout_s: float = 60.0) -> AsyncIterator[Claimed]:
    """Take a stream's worker away, while the other worker has too little room for the stream."""
    links = [FlakyStore(), FlakyStore()]
    store = links[0].inner = links[1].inner = MemoryStore(loop_time_s)
    first, second = map(guarded, links)
    async with pool_of(simulated({}), 2, (first, second), CONFIG, timeout_s=timeout_s) as pool:
        stream, watch = await start_long(pool, pool.gateways[0])
        (lost,) = watch.workers
        (other,) = (worker for worker in pool.workers if worker.worker_id != lost)
        theirs = Lease("theirs", other.worker_id, other.epoch, 2000, 1)
        await store.call(RenewLeases((theirs,), 60.0))
        await pool.withdraw(lost)
        await asyncio.sleep(0.5)
        yield Claimed(pool, store, links, stream, watch, other.worker_id)
        stream.cancel()
        await asyncio.wait({stream})
    for store in (first, second):
        await store.close()


def test_newcomers_leave_a_claimed_worker_to_its_request() -> None:
    """Newcomers of both gateways wait until the request of the claim has its lease."""

    async def scenario() -> None:
        async with claimed_worker() as claimed:
            assert await claimed.claimed_tokens() > LONG_PROMPT
            newcomers = [
                asyncio.create_task(run_job(gateway.dispatcher, job(number)))
                for number, gateway in enumerate(claimed.pool.gateways, 1)
            ]
            await asyncio.sleep(5.0)
            assert not any(task.done() for task in (*newcomers, claimed.stream))
            await claimed.store.call(ReleaseLeases(("theirs",)))
            await asyncio.sleep(0.2)
            assert [resume.sink for resume in claimed.watch.resumes] == [claimed.worker_id]
            assert await claimed.claimed_tokens() == 0
            await asyncio.gather(*newcomers)
            assert not claimed.stream.done()
            await claimed.stream

    run_scenario(scenario())


def test_a_claim_ends_with_its_client() -> None:
    """A client that disconnects while its stream waits takes the claim along immediately."""

    async def scenario() -> None:
        async with claimed_worker() as claimed:
            claimed.stream.cancel()
            await asyncio.wait({claimed.stream})
            await asyncio.sleep(0.1)
            assert await claimed.claimed_tokens() == 0
            await run_job(claimed.pool.gateways[1].dispatcher, job(1))

    run_scenario(scenario())


def test_a_claim_ends_at_the_queue_timeout() -> None:
    """A stream that finds no room in time gives up its claim."""

    async def scenario() -> None:
        async with claimed_worker(timeout_s=3.0) as claimed:
            with pytest.raises(BackendFailed, match="no worker had capacity within 3 s"):
                await claimed.stream
            await asyncio.sleep(0.1)
            assert await claimed.claimed_tokens() == 0

    run_scenario(scenario())


def test_the_claim_of_a_gateway_that_is_gone_expires() -> None:
    """A gateway that no longer reaches the store blocks a worker for at most `CLAIM_S`."""

    async def scenario() -> float:
        async with claimed_worker() as claimed:
            killed, other = claimed.pool.gateways
            killed.beats.cancel()
            begin_s = loop_time_s()
            claimed.links[0].failure = "gone"
            await claimed.store.call(ReleaseLeases(("theirs",)))
            await run_job(other.dispatcher, job(1))
            assert not claimed.stream.done()
            return loop_time_s() - begin_s

    assert CLAIM_S - RENEW_S < run_scenario(scenario()) < CLAIM_S + 2.0


def test_a_gateway_counts_its_claims() -> None:
    """A gateway counts its own open claims until their requests have leases."""

    async def scenario() -> None:
        async with claimed_worker() as claimed:
            own, others = (one.dispatcher.queue.claims for one in claimed.pool.gateways)
            assert (own.open, others.open) == (1, 0)
            await claimed.store.call(ReleaseLeases(("theirs",)))
            await claimed.stream
            assert own.open == 0

    run_scenario(scenario())


TOKENS = st.integers(1, 60)


@given(
    old=st.lists(st.tuples(st.integers(0, 2), TOKENS), min_size=1, max_size=12),
    claims=st.lists(st.integers(1, 100), min_size=1, max_size=6),
    newcomer=st.integers(1, 40),
)
def test_a_claim_waits_only_for_older_leases_and_claims(
    old: list[tuple[int, int]], claims: list[int], newcomer: int
) -> None:
    """Every claim becomes a lease when the leases from before it and earlier claims have ended,
    however many newcomers arrive."""

    async def scenario() -> None:
        store = MemoryStore(lambda: 1.0)
        offers = [offer(f"w{index}") for index in range(3)]
        for one in offers:
            await store.call(PublishReport(report(one.worker_id, capacity_tokens=100)))
        leases = [f"old-{number}" for number in range(len(old))]
        for name, (index, tokens) in zip(leases, old, strict=True):
            await store.call(ReserveLease(name, tokens, [offers[index]], 30.0))
        waiting = {f"long-{number}": tokens for number, tokens in enumerate(claims)}
        for name, tokens in waiting.items():
            assert await store.call(ClaimWorker(name, tokens, offers, 2.0)) is not None
        arrivals = count()
        while waiting:
            ended = len(leases)
            while (
                await store.call(ReserveLease(f"new-{next(arrivals)}", newcomer, offers, 30.0))
            ).lease:
                pass  # a newcomer never ends
            for name, tokens in tuple(waiting.items()):
                await store.call(ClaimWorker(name, tokens, offers, 2.0))
                if (await store.call(ReserveLease(name, tokens, offers, 30.0))).lease is not None:
                    del waiting[name]
                    leases.append(name)
            if len(leases) == ended:
                assert leases, "a claim waits for newcomers"
                await store.call(ReleaseLeases((leases.pop(0),)))
        found = (await store.call(ListWorkers())).workers
        assert [view.claimed_tokens for view in found] == [0, 0, 0]
        assert all(view.leased_tokens <= 100 for view in found)

    asyncio.run(scenario())
