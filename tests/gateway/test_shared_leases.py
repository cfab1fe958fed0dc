"""Tests of gateways that share workers: leases are binding and may change a request's worker."""

from __future__ import annotations

import asyncio

import pytest

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.token_ids import compact
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.errors import QueueTimeout
from draftgate.gateway.state.commands import ReleaseLeases, RenewLeases
from draftgate.gateway.state.guarded.store import GuardedStore
from draftgate.gateway.state.store import Store
from draftgate.gateway.state.values import Lease
from tests.gateway.flaky_store import FlakyStore
from tests.gateway.troubles import (
    DeviceFault,
    Dispatched,
    RecordingWatch,
    after_tokens,
    dispatching,
    run_job,
    run_scenario,
    simulated,
)

BLOCKS = 20
TOKENS = BLOCKS * 16
CONFIG = WorkerConfig(kv_bytes=TOKENS * load_profile("cpu-demo").kv_token_bytes)
"""Settings of workers with KV memory for 320 tokens."""


def job(max_tokens: int = 8, request_id: str = "r") -> Job:
    ids = compact(Tokenizer(SHIPPED_MODEL).encode("import os\n"))
    return Job(request_id, (ids,), SamplingParams(max_tokens, seed=7, ignore_eos=True), max_tokens)


async def lease_for_other_gateway(
    store: Store, dispatched: Dispatched, worker: int, tokens: int
) -> None:
    """Lease tokens of a worker for another gateway after the worker's last report."""
    found = dispatched.fleet.workers[worker]
    number = found.watermark + (1 << 40)
    await store.call(
        RenewLeases([Lease("theirs", found.worker_id, found.epoch, tokens, number)], 30.0)
    )


def test_a_request_waits_for_leases_of_other_gateways() -> None:
    """A request waits until another gateway's lease ends, although the worker seems free."""

    async def scenario() -> tuple[float, int]:
        now_s = asyncio.get_running_loop().time
        async with dispatching(simulated({}), 1, config=CONFIG, shared=True) as dispatched:
            await asyncio.sleep(0.1)  # gives the workers time to report
            await lease_for_other_gateway(dispatched.store, dispatched, 0, TOKENS)
            begin_s = now_s()
            result = asyncio.create_task(run_job(dispatched.dispatcher, job()))
            await asyncio.sleep(1.0)
            assert not result.done()
            assert dispatched.fleet.workers[0].backend.load().running == 0
            await dispatched.store.call(ReleaseLeases(["theirs"]))
            (choice,) = await result
            assert await dispatched.is_idle()
            return now_s() - begin_s, len(choice.token_ids)

    waited_s, tokens = run_scenario(scenario())
    assert 1.0 < waited_s < 1.5
    assert tokens == 8


def test_a_node_without_a_pool_does_not_wait_for_leases() -> None:
    """A node without a pool ignores leases, because its queue knows all requests."""

    async def scenario() -> int:
        async with dispatching(simulated({}), 1, config=CONFIG) as dispatched:
            await asyncio.sleep(0.1)
            jobs = [run_job(dispatched.dispatcher, job(200, f"r{index}")) for index in range(4)]
            return sum(len(choices[0].token_ids) for choices in await asyncio.gather(*jobs))

    assert run_scenario(scenario()) == 4 * 200


def test_waiting_for_leases_ends_at_the_queue_timeout() -> None:
    """All waits of a request for leases together end at the queue timeout."""

    async def scenario() -> float:
        now_s = asyncio.get_running_loop().time
        settings = {"config": CONFIG, "shared": True, "timeout_s": 2.0}
        async with dispatching(simulated({}), 1, **settings) as dispatched:
            await asyncio.sleep(0.1)
            await lease_for_other_gateway(dispatched.store, dispatched, 0, TOKENS)
            begin_s = now_s()
            with pytest.raises(QueueTimeout):
                await run_job(dispatched.dispatcher, job())
            await dispatched.store.call(ReleaseLeases(["theirs"]))
            assert await dispatched.is_idle()
            return now_s() - begin_s

    assert run_scenario(scenario()) == pytest.approx(2.0, abs=0.1)


def test_the_wait_of_a_resumed_stream_starts_with_its_loss() -> None:
    """The wait of a resumed stream starts at the loss of its worker and not at its arrival."""

    async def scenario() -> int:
        faults = {0: DeviceFault(after_tokens(300))}
        settings = {"config": WorkerConfig(), "shared": True, "timeout_s": 0.2}
        async with dispatching(simulated(faults), 2, **settings) as dispatched:
            await asyncio.sleep(0.1)
            begun_s = asyncio.get_running_loop().time()
            await lease_for_other_gateway(
                dispatched.store, dispatched, 1, 1
            )  # the router prefers the worker without this lease
            result = asyncio.create_task(run_job(dispatched.dispatcher, job(1_000)))
            await asyncio.sleep(0.05)
            full = dispatched.fleet.workers[1].backend.load()
            await lease_for_other_gateway(
                dispatched.store, dispatched, 1, full.kv_blocks_total * full.kv_block_tokens
            )
            while dispatched.fleet.workers[0].backend.failure is None:  # noqa: ASYNC110 - a failure sets no event
                await asyncio.sleep(0.01)
            assert asyncio.get_running_loop().time() - begun_s > 0.2
            await asyncio.sleep(0.1)
            await dispatched.store.call(ReleaseLeases(["theirs"]))
            (choice,) = await result
            return len(choice.token_ids)

    assert run_scenario(scenario()) == 1_000


def test_a_reservation_may_choose_another_worker() -> None:
    """A request runs on the worker that the store chose, which may differ from the router's
    choice."""

    async def scenario() -> None:
        async with dispatching(simulated({}), 2, config=CONFIG, shared=True) as dispatched:
            await asyncio.sleep(0.1)
            for loaded in range(2):
                watch = RecordingWatch()
                await lease_for_other_gateway(dispatched.store, dispatched, loaded, TOKENS // 2)
                await run_job(dispatched.dispatcher, job(), watch)
                await dispatched.store.call(ReleaseLeases(["theirs"]))
                free = dispatched.fleet.workers[1 - loaded].worker_id
                assert watch.workers == [free]
                (decision,) = dispatched.decisions.latest(1)
                assert decision.worker_id == free
                assert not decision.degraded
                assert await dispatched.is_idle()
            latest = dispatched.decisions.latest(2)
            assert any(item.worker_id != item.route.worker_id for item in latest)

    run_scenario(scenario())


def test_decisions_without_the_store_are_degraded() -> None:
    """The node marks decisions during a store outage as degraded, but no later decisions."""

    async def scenario() -> list[bool]:
        flaky = FlakyStore()
        store = GuardedStore(flaky, clock=asyncio.get_running_loop().time, uniform=lambda: 0.0)
        found = []
        async with dispatching(
            simulated({}), 2, config=CONFIG, shared=True, store=store
        ) as dispatched:
            await asyncio.sleep(0.1)
            for failure in (None, "gone", None):
                flaky.failure = failure
                await asyncio.sleep(20.0)
                await run_job(dispatched.dispatcher, job())
                found.append(dispatched.decisions.latest(1)[0].degraded)
        await store.close()
        return found

    assert run_scenario(scenario()) == [False, True, False]


def test_leases_of_other_gateways_shorten_drafts() -> None:
    """Leases of other gateways raise the price of slots before their requests arrive."""

    async def scenario() -> list[tuple[int, float]]:
        found = []
        config = WorkerConfig(profile="h100-8b", max_num_seqs=512)
        async with dispatching(simulated({}), 1, config=config, shared=True) as dispatched:
            await run_job(dispatched.dispatcher, job(64))  # measures the speeds of the worker
            for tokens in (0, 4_000, 64_000):
                await asyncio.sleep(2.0)
                await lease_for_other_gateway(dispatched.store, dispatched, 0, tokens)
                await run_job(dispatched.dispatcher, job(64))
                (decision,) = dispatched.decisions.latest(1)
                found.append((decision.plan.max_draft_tokens, decision.load.price))
                await dispatched.store.call(ReleaseLeases(["theirs"]))
        return found

    (alone, lowest), (medium, higher), (crowded, highest) = run_scenario(scenario())
    assert lowest < higher < highest
    assert alone >= medium > crowded
