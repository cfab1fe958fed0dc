"""Gateways that share workers: leases are binding and may change the worker of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.token_ids import compact
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.errors import QueueTimeout
from draftgate.gateway.state.guarded import GuardedStore
from draftgate.gateway.state.store import Lease, Store
from tests.gateway.flaky_store import FlakyStore
from tests.gateway.troubles import (
    Dispatched,
    Told,
    Trouble,
    answer,
    behind,
    dispatching,
    play,
    quick_starts,
    simulated,
)

BLOCKS = 20
TOKENS = BLOCKS * 16
CONFIG = WorkerConfig(kv_bytes=TOKENS * load_profile("cpu-demo").kv_token_bytes)
"""Workers with KV memory for 320 tokens."""


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    """Start workers quickly, because tests here start many."""
    with quick_starts():
        yield


def job(max_tokens: int = 8, request_id: str = "r") -> Job:
    ids = compact(Tokenizer(SHIPPED_MODEL).encode("import os\n"))
    return Job(request_id, (ids,), SamplingParams(max_tokens, seed=7, ignore_eos=True), max_tokens)


async def others_lease(store: Store, there: Dispatched, worker: int, tokens: int) -> None:
    """Lease tokens of a worker for another gateway, after its last report."""
    found = there.fleet.workers[worker]
    number = found.watermark + (1 << 40)
    await store.renew([Lease("theirs", found.worker_id, found.epoch, tokens, number)], 30.0)


def test_a_request_waits_for_leases_of_other_gateways() -> None:
    """A request waits for the end of another gateway's lease, although workers seem free."""

    async def scenario() -> tuple[float, int]:
        now_s = asyncio.get_running_loop().time
        async with dispatching(simulated({}), 1, config=CONFIG, shared=True) as there:
            await asyncio.sleep(0.1)  # the workers have reported
            await others_lease(there.store, there, 0, TOKENS)
            begin_s = now_s()
            asking = asyncio.create_task(answer(there.dispatcher, job()))
            await asyncio.sleep(1.0)
            assert not asking.done()
            assert there.fleet.workers[0].backend.load().running == 0
            await there.store.release(["theirs"])
            (choice,) = await asking
            assert await there.is_idle()
            return now_s() - begin_s, len(choice.token_ids)

    waited_s, tokens = play(scenario())
    assert 1.0 < waited_s < 1.5
    assert tokens == 8


def test_a_node_without_a_pool_does_not_wait_for_leases() -> None:
    """Without a pool, the queue knows all requests, so leases are not binding."""

    async def scenario() -> int:
        async with dispatching(simulated({}), 1, config=CONFIG) as there:
            await asyncio.sleep(0.1)
            jobs = [answer(there.dispatcher, job(200, f"r{index}")) for index in range(4)]
            return sum(len(choices[0].token_ids) for choices in await asyncio.gather(*jobs))

    assert play(scenario()) == 4 * 200


def test_waiting_for_leases_ends_at_the_queue_timeout() -> None:
    """The waits of a request for leases together are at most the queue timeout."""

    async def scenario() -> float:
        now_s = asyncio.get_running_loop().time
        settings = {"config": CONFIG, "shared": True, "timeout_s": 2.0}
        async with dispatching(simulated({}), 1, **settings) as there:
            await asyncio.sleep(0.1)
            await others_lease(there.store, there, 0, TOKENS)
            begin_s = now_s()
            with pytest.raises(QueueTimeout):
                await answer(there.dispatcher, job())
            await there.store.release(["theirs"])
            assert await there.is_idle()
            return now_s() - begin_s

    assert play(scenario()) == pytest.approx(2.0, abs=0.1)


def test_the_wait_of_a_resumed_stream_starts_with_its_loss() -> None:
    """The wait of a resumed stream starts when it loses its worker, not at its arrival."""

    async def scenario() -> int:
        trouble = {0: Trouble(behind(300))}
        settings = {"config": WorkerConfig(), "shared": True, "timeout_s": 0.2}
        async with dispatching(simulated(trouble), 2, **settings) as there:
            await asyncio.sleep(0.1)
            begun_s = asyncio.get_running_loop().time()
            await others_lease(
                there.store, there, 1, 1
            )  # of equal workers it chooses the other one
            asking = asyncio.create_task(answer(there.dispatcher, job(1_000)))
            await asyncio.sleep(0.05)
            full = there.fleet.workers[1].backend.load()
            await others_lease(there.store, there, 1, full.kv_blocks_total * full.kv_block_tokens)
            while there.fleet.workers[0].backend.failure is None:  # noqa: ASYNC110 - it sets none
                await asyncio.sleep(0.01)
            assert asyncio.get_running_loop().time() - begun_s > 0.2
            await asyncio.sleep(0.1)
            await there.store.release(["theirs"])
            (choice,) = await asking
            return len(choice.token_ids)

    assert play(scenario()) == 1_000


def test_a_reservation_may_choose_another_worker() -> None:
    """The request runs on the worker that the store chose, and the record has the router's choice
    too."""

    async def scenario() -> None:
        async with dispatching(simulated({}), 2, config=CONFIG, shared=True) as there:
            await asyncio.sleep(0.1)
            for turn in range(2):
                told = Told()
                await others_lease(there.store, there, turn, TOKENS // 2)
                await answer(there.dispatcher, job(), told)
                await there.store.release(["theirs"])
                free = there.fleet.workers[1 - turn].worker_id
                assert told.workers == [free]
                (decision,) = there.decisions.latest(1)
                assert decision.worker_id == free
                assert not decision.degraded
                assert await there.is_idle()
            latest = there.decisions.latest(2)
            assert any(one.worker_id != one.route.worker_id for one in latest)

    play(scenario())


def test_decisions_without_the_store_are_degraded() -> None:
    """Decisions during an outage are marked as degraded, later ones are not."""

    async def scenario() -> list[bool]:
        flaky = FlakyStore()
        store = GuardedStore(flaky, clock=asyncio.get_running_loop().time, uniform=lambda: 0.0)
        found = []
        async with dispatching(simulated({}), 2, config=CONFIG, shared=True, store=store) as there:
            await asyncio.sleep(0.1)
            for failure in (None, "gone", None):
                flaky.failure = failure
                await asyncio.sleep(20.0)
                await answer(there.dispatcher, job())
                found.append(there.decisions.latest(1)[0].degraded)
        await store.close()
        return found

    assert play(scenario()) == [False, True, False]


def test_leases_of_other_gateways_shorten_drafts() -> None:
    """Leases of other gateways raise the price before their requests arrive."""

    async def scenario() -> list[tuple[int, float]]:
        found = []
        config = WorkerConfig(profile="h100-8b", max_num_seqs=512)
        async with dispatching(simulated({}), 1, config=config, shared=True) as there:
            await answer(there.dispatcher, job(64))  # speeds are known from here on
            for tokens in (0, 4_000, 64_000):
                await asyncio.sleep(2.0)
                await others_lease(there.store, there, 0, tokens)
                await answer(there.dispatcher, job(64))
                (decision,) = there.decisions.latest(1)
                found.append((decision.plan.max_draft_tokens, decision.load.price))
                await there.store.release(["theirs"])
        return found

    (alone, cheap), (beside, dearer), (crowded, dearest) = play(scenario())
    assert cheap < dearer < dearest
    assert alone >= beside > crowded
