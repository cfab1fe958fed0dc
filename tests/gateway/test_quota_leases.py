"""Tests of requests that reserve their quota together with their lease.

All tests run in virtual time. A call to the shared store takes a millisecond.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.quotas import quota_account
from draftgate.gateway.errors import InvalidRequest, QuotaExceeded
from draftgate.gateway.state.commands import ReadTotals, ReleaseLeases, RenewLeases
from draftgate.gateway.state.values import Lease
from draftgate.policies.quotas import Quota, Totals
from tests.gateway.flaky_store import FlakyStore, guarded
from tests.gateway.harness import ScriptedBackend
from tests.gateway.test_failover_details import job
from tests.gateway.test_failover_details import settle as settle_loop
from tests.gateway.troubles import Dispatched, dispatching, run_job, run_scenario

CALL_S = 0.001
MOST = 15
"""The prompt and the output limit of `job`, in tokens."""


@dataclass
class Shared:
    """A dispatcher of one worker, and the connection to its store.

    The worker runs one sequence at a time.
    """

    dispatched: Dispatched
    worker: ScriptedBackend
    remote: FlakyStore

    def send(self, one: Job) -> asyncio.Task:
        """Run a job in the background."""
        return asyncio.create_task(run_job(self.dispatched.dispatcher, one))

    async def finish(self) -> None:
        """Let the request that the worker gets next generate one token."""
        self.worker.emit(await self.worker.submitted.get(), "x", last=True)

    async def calls_of(self, work: Coroutine[object, object, object]) -> Counter[str]:
        """Return the reservations in the store during some work."""
        self.remote.calls.clear()
        await work
        names = ("ReserveLease", "ReserveQuota")
        return Counter({name: self.remote.calls[name] for name in names if self.remote.calls[name]})

    @property
    def account(self) -> str:
        """The account of the tenant in the store."""
        return quota_account("t", self.dispatched.fleet.model_id)

    async def totals(self) -> Totals:
        """Return the totals in the store after all settlements have been sent."""
        await asyncio.sleep(1.0)
        return await self.remote.call(ReadTotals(self.account))


@asynccontextmanager
async def shared(quota: Quota) -> AsyncIterator[Shared]:
    """Run a dispatcher whose tenant `t` has a quota in a shared store."""
    worker, remote = ScriptedBackend(), FlakyStore()
    worker.max_sequences = 1
    remote.delay_s = CALL_S
    settings = {"store": guarded(remote), "shared": True, "quotas": {"t": quota}}
    async with dispatching(lambda _: worker, 1, **settings) as dispatched:
        await asyncio.sleep(0.1)  # gives the worker time to report
        yield Shared(dispatched, worker, remote)


def of_tenant(name: str, **fields: object) -> Job:
    return replace(job(name, **fields), tenant="t")


def test_a_request_without_a_wait_makes_one_call() -> None:
    """A request that need not wait reserves its quota and its lease in one call of the store."""

    async def scenario() -> None:
        async with shared(Quota(60, 600)) as pool:

            async def served() -> None:
                result = pool.send(of_tenant("a"))
                await pool.finish()
                await result

            assert await pool.calls_of(served()) == {"ReserveLease": 1}
            assert await pool.totals() == Totals(MOST, 6, MOST - 6, 0)

    run_scenario(scenario())


def test_a_request_that_waits_reserves_its_quota_before() -> None:
    """A request that has to wait reserves its quota first, and is charged once."""

    async def scenario() -> None:
        async with shared(Quota(2, 600)) as pool:
            first = pool.send(of_tenant("a"))
            running = await pool.worker.submitted.get()

            async def waits() -> None:
                second = pool.send(of_tenant("b"))
                await asyncio.sleep(0.5)
                assert len(pool.dispatched.dispatcher.queue) == 1
                with pytest.raises(QuotaExceeded):  # and does not wait
                    await run_job(pool.dispatched.dispatcher, of_tenant("c"))
                pool.worker.emit(running, "x", last=True)
                await pool.finish()
                await asyncio.gather(first, second)

            assert await pool.calls_of(waits()) == {"ReserveQuota": 2, "ReserveLease": 1}
            assert await pool.totals() == Totals(2 * MOST, 12, 2 * MOST - 12, 0)

    run_scenario(scenario())


def test_a_request_beyond_its_quota_takes_no_lease() -> None:
    """A request that does not fit into its quota reserves nothing, and gets the time to retry."""

    async def scenario() -> None:
        async with shared(Quota(1, 600)) as pool:
            result = pool.send(of_tenant("a"))
            await pool.finish()
            await result
            with pytest.raises(QuotaExceeded) as caught:
                await run_job(pool.dispatched.dispatcher, of_tenant("b"))
            assert caught.value.retry_after_s == pytest.approx(60.0, abs=0.1)
            assert pool.worker.submitted.empty()
            assert await pool.dispatched.is_idle()
            assert await pool.totals() == Totals(MOST, 6, MOST - 6, 0)

    run_scenario(scenario())


def test_a_tenant_that_exceeds_its_quota_reserves_before_admission() -> None:
    """After a refusal, the requests of a tenant reserve no capacity until the quota has room."""

    async def scenario() -> None:
        async with shared(Quota(60, 600, burst_requests=1)) as pool:
            calls = []
            for name, served in (("a", True), ("b", False), ("c", False), ("d", True)):

                async def send(name: str = name, served: bool = served) -> None:
                    result = pool.send(of_tenant(name))
                    if served:
                        await pool.finish()
                    await asyncio.wait({result})
                    assert (result.exception() is None) == served

                calls.append(await pool.calls_of(send()))
                if name == "c":
                    await asyncio.sleep(1.0)
            assert calls == [
                {"ReserveLease": 1},
                {"ReserveLease": 1},
                {"ReserveQuota": 1},
                {"ReserveLease": 1},
            ]

    run_scenario(scenario())


def test_a_request_that_never_fits_is_a_client_error() -> None:
    """A request that is larger than its quota is invalid, and reserves nothing."""

    async def scenario() -> None:
        async with shared(Quota(tokens_per_minute=MOST - 1)) as pool:
            with pytest.raises(InvalidRequest, match="never exceeds 14"):
                await run_job(pool.dispatched.dispatcher, of_tenant("a"))
            assert await pool.dispatched.is_idle()
            assert await pool.totals() == Totals()

    run_scenario(scenario())


def test_a_request_that_other_gateways_hold_up_is_charged_once() -> None:
    """A request whose leases the store refuses for a while reserves its quota once."""

    async def scenario() -> None:
        async with shared(Quota(1, 600)) as pool:
            worker = pool.dispatched.fleet.workers[0]
            theirs = Lease("theirs", worker.worker_id, worker.epoch, 10**6, 1 << 60)
            await pool.remote.inner.call(RenewLeases([theirs], 30.0))
            result = pool.send(of_tenant("a"))
            await asyncio.sleep(1.0)
            assert pool.worker.submitted.empty()
            assert (await pool.remote.call(ReadTotals(pool.account))).open == MOST
            await pool.remote.inner.call(ReleaseLeases(["theirs"]))
            await pool.finish()
            await result
            assert await pool.totals() == Totals(MOST, 6, MOST - 6, 0)

    run_scenario(scenario())


def test_a_request_with_several_prompts_reserves_its_quota_once() -> None:
    """A request with several prompts reserves the quota of all before any of them runs."""

    async def scenario() -> None:
        async with shared(Quota(1, 600)) as pool:

            async def served() -> None:
                several = of_tenant("a")
                result = pool.send(replace(several, prompts=several.prompts * 3))
                for _ in range(3):
                    await pool.finish()
                await result

            assert await pool.calls_of(served()) == {"ReserveQuota": 1, "ReserveLease": 3}
            assert await pool.totals() == Totals(3 * MOST, 18, 3 * MOST - 18, 0)

    run_scenario(scenario())


@pytest.mark.parametrize("ticks", range(0, 12, 2))
@pytest.mark.parametrize("delay_s", [0.0, CALL_S, 0.1])
def test_a_disconnect_during_the_call_leaves_nothing_reserved(ticks: int, delay_s: float) -> None:
    """A client that disconnects during the call leaves neither a lease nor quota reserved."""

    async def scenario() -> None:
        async with shared(Quota(60, 600)) as pool:
            pool.remote.delay_s = delay_s
            result = pool.send(of_tenant("a"))
            for _ in range(ticks):
                await asyncio.sleep(0)
            result.cancel()
            await settle_loop()
            pool.remote.delay_s = CALL_S
            assert (await pool.totals()).open == 0
            assert await pool.dispatched.is_idle()

    run_scenario(scenario())


def test_the_local_share_decides_during_an_outage() -> None:
    """During an outage, a request without a wait is granted or refused without the store."""

    async def scenario() -> None:
        async with shared(Quota(1, 600)) as pool:
            pool.remote.failure = "refused"
            result = pool.send(of_tenant("a"))
            await pool.finish()
            await result
            with pytest.raises(QuotaExceeded):
                await run_job(pool.dispatched.dispatcher, of_tenant("b"))
            assert await pool.dispatched.is_idle()

    run_scenario(scenario())
