"""Tests of flows on a dispatcher with simulated workers, in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from random import Random

import pytest

from draftgate.backends.token_ids import compact
from draftgate.backends.types import SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.assembly import WaitingRules, loop_time_s
from draftgate.gateway.dispatch.dispatcher import Dispatcher
from draftgate.gateway.dispatch.flows import SETTLE_S, FlowEvent, HopEnded, HopJoined
from draftgate.gateway.dispatch.job import FlowTag, Job
from draftgate.gateway.dispatch.promised_work import PromisedWork
from draftgate.gateway.errors import Overloaded, TooMany
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.gateway.state.values import FlowKey
from draftgate.lab.simulate.cluster import running_dispatcher
from draftgate.policies.flows.outcome import FlowOutcome
from draftgate.policies.flows.types import HopKind
from draftgate.policies.types import ANYTIME, ServiceLevel
from tests.gateway.flaky_store import FlakyStore, guarded
from tests.gateway.troubles import run_job, run_scenario, simulated
from tests.gateway.two_gateways import pool_of

CONFIG = WorkerConfig(speculation="off", max_num_seqs=4)
LENGTHS = ((200, 30), (40, 5), (400, 200))
"""Prompt and output tokens of plan, retrieval and answer. Alone, such a flow takes 0.85 s."""

numbers = count()


class Observed:
    """An observer that keeps what it gets."""

    def __init__(self) -> None:
        self.numbers: list[int | None] = []
        self.shares: list[tuple[int, float]] = []
        self.outcomes = Counter[FlowOutcome]()

    def __call__(self, event: FlowEvent) -> None:
        match event:
            case HopJoined():
                self.numbers.append(event.number)
            case HopEnded():
                self.shares.append((event.number, event.share))
            case FlowOutcome():
                self.outcomes[event] += 1


@asynccontextmanager
async def dispatching() -> AsyncIterator[tuple[Dispatcher, Observed]]:
    """Run a dispatcher with one worker that orders by deadline."""
    rules = WaitingRules(ordering="edf")
    async with running_dispatcher(simulated({}), [CONFIG], rules) as dispatcher:
        dispatcher.flows.watch = observed = Observed()
        yield dispatcher, observed


def tag(flow_id: str, deadline_s: float | None, step: int) -> FlowTag:
    """Return what a request that arrives now says about its flow."""
    kind = HopKind(f"/{step}", "m")
    return FlowTag(flow_id, deadline_s, kind, loop_time_s(), lambda service: service)


def job(
    step: int, flow: FlowTag | None = None, service: ServiceLevel = ANYTIME, tenant: str = ""
) -> Job:
    """Return the job of a step, whose prompt shares no prefix with other jobs."""
    prompt, output = LENGTHS[step]
    number = next(numbers)
    rng = Random(number)
    ids = compact([rng.randrange(100, 4000) for _ in range(prompt)])
    sampling = SamplingParams(output, seed=7, ignore_eos=True)
    return Job(f"r{number}", (ids,), sampling, output, service=service, tenant=tenant, flow=flow)


async def run_flow(dispatcher: Dispatcher, flow_id: str, deadline_s: float) -> float:
    """Run the three hops of a flow, and return its seconds."""
    begun_s = loop_time_s()
    for step in range(3):
        await run_job(dispatcher, job(step, tag(flow_id, deadline_s, step)))
    return loop_time_s() - begun_s


async def run_split(dispatcher: Dispatcher, deadline_s: float) -> float:
    """Run three requests with equal parts of a deadline as targets, and return their seconds."""
    begun_s = loop_time_s()
    for step in range(3):
        await run_job(dispatcher, job(step, service=ServiceLevel(ttft_s=deadline_s / 3)))
    return loop_time_s() - begun_s


async def teach(dispatcher: Dispatcher, flows: int = 3) -> None:
    """Let some flows with ample time end, so that the history knows them."""
    for number in range(flows):
        await run_flow(dispatcher, f"teach-{number}", 10.0)
    await asyncio.sleep(10.0 + SETTLE_S + 0.1)


@asynccontextmanager
async def crowd(dispatcher: Dispatcher, clients: int, ttft_s: float) -> AsyncIterator[None]:
    """Keep a dispatcher busy with clients that send requests of another tenant without a pause."""

    async def client() -> None:
        service = ServiceLevel(ttft_s=ttft_s)
        while True:
            try:
                await run_job(dispatcher, job(0, service=service, tenant="crowd"))
            except TooMany as error:
                await asyncio.sleep(error.retry_after_s or 0.1)

    tasks = [asyncio.create_task(client()) for _ in range(clients)]
    try:
        await asyncio.sleep(1.0)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_flows_meet_a_deadline_that_equal_splits_miss() -> None:
    """Under load, flows of three hops meet a deadline that requests with a third of the deadline
    as target each miss."""
    deadline_s, flows = 2.0, 20

    async def scenario(*, split: bool) -> int:
        met = 0
        async with dispatching() as (dispatcher, observed):
            await teach(dispatcher)
            async with crowd(dispatcher, 8, ttft_s=0.5):
                for number in range(flows):
                    try:
                        if split:
                            took_s = await run_split(dispatcher, deadline_s)
                        else:
                            took_s = await run_flow(dispatcher, str(number), deadline_s)
                    except TooMany:
                        took_s = deadline_s + 1.0
                    met += took_s <= deadline_s
                    await asyncio.sleep(0.3)
            await asyncio.sleep(deadline_s + SETTLE_S + 0.1)
        if not split:
            assert observed.outcomes[FlowOutcome.MET] == met + 3
        return met

    with_flows, with_splits = (run_scenario(scenario(split=split)) for split in (False, True))
    assert with_flows >= 0.9 * flows
    assert with_splits <= 0.1 * flows


def test_infeasible_flow_is_refused_at_its_first_hop_only() -> None:
    """A flow that would end in time on an idle pool only is refused at once, with a time to return.
    The last hop of an admitted flow runs, however late it is."""

    async def scenario() -> None:
        async with dispatching() as (dispatcher, observed):
            await teach(dispatcher)
            for step in range(2):
                await run_job(dispatcher, job(step, tag("f", 1.5, step)))
            async with crowd(dispatcher, 12, ttft_s=60.0):
                await asyncio.sleep(0.5)  # so the answer cannot be in time
                await run_job(dispatcher, job(2, tag("f", 1.5, 2)))
                with pytest.raises(Overloaded) as refused:
                    await run_job(dispatcher, job(0, tag("new", 0.9, 0)))
            assert refused.value.kind == "flow"
            assert refused.value.retry_after_s is not None
            await asyncio.sleep(1.5 + SETTLE_S + 0.1)
            assert observed.outcomes == {
                FlowOutcome.MET: 3,
                FlowOutcome.MISSED: 1,
                FlowOutcome.REFUSED: 1,
            }

    run_scenario(scenario())


def test_flow_that_returns_after_its_refusal_begins_anew() -> None:
    """A client that sends a refused flow again after each given time is soon admitted, with the
    whole deadline."""

    async def scenario() -> None:
        async with dispatching() as (dispatcher, observed):
            await teach(dispatcher)
            running = [asyncio.create_task(run_job(dispatcher, job(2))) for _ in range(12)]
            await asyncio.sleep(0.1)
            took_s, refusals = None, 0
            while took_s is None:
                try:
                    took_s = await run_flow(dispatcher, "f", 1.2)
                except TooMany as error:
                    refusals += 1
                    await asyncio.sleep(error.retry_after_s or 0.0)
            assert 1 <= refusals <= 3
            assert took_s <= 1.2
            assert observed.numbers[-3 - refusals :] == [1] * refusals + [1, 2, 3]
            await asyncio.gather(*running)

    run_scenario(scenario())


def test_budgets_follow_the_lengths_of_the_hops() -> None:
    """A hop that is short compared to the later hops has the smaller part of the time."""

    async def scenario() -> None:
        async with dispatching() as (dispatcher, _):
            await teach(dispatcher)
            parts = []
            for step in range(3):
                async with dispatcher.run(job(step, tag("f", 4.0, step))) as run:
                    async for _ in run.deltas:
                        pass
                    assert run.hop is not None
                    assert run.hop.division is not None
                    remaining_s = run.hop.place.remaining_s
                    parts.append(run.hop.division.budget_s / remaining_s)
                    assert run.job.service == run.hop.service == run.requests[0].service
                    assert run.job.service.ttft_s is not None
            assert parts[0] < 0.4
            assert parts[1] < 0.1
            assert parts[2] == pytest.approx(1.0)

    run_scenario(scenario())


def test_tenants_with_one_id_have_two_flows() -> None:
    """The flows of two tenants with one id have hops of their own."""

    async def scenario() -> None:
        async with dispatching() as (dispatcher, observed):
            for tenant in ("a", "b", "a"):
                await run_job(dispatcher, job(1, tag("f", 5.0, 1), tenant=tenant))
            assert observed.numbers == [1, 1, 2]
            await asyncio.sleep(5.0 + SETTLE_S)
            assert observed.outcomes == {FlowOutcome.MET: 2}

    run_scenario(scenario())


def test_parallel_hops_share_the_time_of_one() -> None:
    """Retrievals that run at the same time count as one hop in the prediction of their flow."""

    async def flow(dispatcher: Dispatcher, flow_id: str) -> float:
        await run_job(dispatcher, job(0, tag(flow_id, 10.0, 0)))
        jobs = [job(1, tag(flow_id, 10.0, 1)) for _ in range(3)]
        await asyncio.gather(*(run_job(dispatcher, one) for one in jobs))
        await run_job(dispatcher, job(2, tag(flow_id, 10.0, 2)))
        return loop_time_s()

    async def scenario() -> None:
        async with dispatching() as (dispatcher, observed):
            await flow(dispatcher, "f")
            assert observed.numbers == [1, 2, 3, 4, 5]
            await asyncio.sleep(10.0 + SETTLE_S + 0.1)
            assert observed.outcomes == {FlowOutcome.MET: 1}
            later = dispatcher.flows.history.later("", 1, HopKind("/0", "m"))
            assert [hop.output_tokens for hop in later] == [5, 5, 5, 200]
            assert later[0].weight == later[-1].weight == 1.0

    run_scenario(scenario())


def test_failed_last_hop_makes_a_flow_miss() -> None:
    """A flow whose last request was cancelled has missed its deadline."""

    async def scenario() -> None:
        async with dispatching() as (dispatcher, observed):
            await run_job(dispatcher, job(1, tag("f", 5.0, 1)))
            answer = asyncio.create_task(run_job(dispatcher, job(2, tag("f", 5.0, 2))))
            await asyncio.sleep(0.1)
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
            await asyncio.sleep(5.0 + SETTLE_S)
            assert observed.outcomes == {FlowOutcome.MISSED: 1}

    run_scenario(scenario())


def test_late_hop_runs_without_targets_and_makes_the_flow_miss() -> None:
    """A hop after the deadline has no budget, and its flow has missed the deadline."""

    async def scenario() -> None:
        async with dispatching() as (dispatcher, observed):
            await run_job(dispatcher, job(1, tag("f", 2.0, 1)))
            await asyncio.sleep(3.0)
            async with dispatcher.run(job(1, tag("f", 2.0, 1))) as run:
                async for _ in run.deltas:
                    pass
                assert run.hop is not None
                assert run.hop.division is None
                assert run.job.service == ANYTIME
            await asyncio.sleep(2.0 + SETTLE_S)
            assert observed.outcomes == {FlowOutcome.MISSED: 1}

    run_scenario(scenario())


@pytest.mark.parametrize("broken", [False, True])
def test_two_gateways_serve_one_flow(*, broken: bool) -> None:
    """The hops of a flow may reach any gateway of a pool. While the store does not respond, each
    gateway serves the hops alone, and no request fails."""

    async def scenario() -> None:
        inner = MemoryStore(loop_time_s)
        remotes = FlakyStore(), FlakyStore()
        for remote in remotes:
            remote.inner = inner
        stores = guarded(remotes[0]), guarded(remotes[1])
        async with pool_of(simulated({}), 1, stores, CONFIG) as pool:
            observed = [Observed(), Observed()]
            for gateway, observer in zip(pool.gateways, observed, strict=True):
                gateway.dispatcher.flows.watch = observer
            for step in range(3):
                if step == 1 and broken:
                    remotes[0].failure = remotes[1].failure = "refused"
                dispatcher = pool.gateways[step % 2].dispatcher
                await run_job(dispatcher, job(step, tag("f", 10.0, step)))
            assert observed[0].numbers == ([1, 2] if broken else [1, 3])
            assert observed[1].numbers == ([1] if broken else [2])
            await asyncio.sleep(10.0 + SETTLE_S)
            assert observed[0].outcomes == {FlowOutcome.MET: 1}
            if not broken:
                assert observed[1].outcomes == {}
                later = pool.gateways[0].dispatcher.flows.history.later("", 1, HopKind("/0", "m"))
                assert [hop.output_tokens for hop in later] == [5, 200]

    run_scenario(scenario())


def test_requests_without_a_flow_do_not_call_the_store_for_flows() -> None:
    """A request without the headers costs no call of the store of flows."""

    async def scenario() -> None:
        remote = FlakyStore()
        store = guarded(remote)
        async with pool_of(simulated({}), 1, (store, store), CONFIG) as pool:
            await run_job(pool.gateways[0].dispatcher, job(0))
            flow_calls = {"BeginHop", "EndHop", "CancelFlow", "TakeFlow"}
            assert not flow_calls & set(remote.calls)
            await run_job(pool.gateways[0].dispatcher, job(0, tag("f", 5.0, 0)))
            assert {name: remote.calls[name] for name in flow_calls & set(remote.calls)} == {
                "BeginHop": 1,
                "EndHop": 1,
            }

    run_scenario(scenario())


def test_unknown_flow_without_a_deadline_is_an_ordinary_request() -> None:
    """A request that names an unknown flow without a deadline is only counted."""

    async def scenario() -> None:
        async with dispatching() as (dispatcher, observed):
            async with dispatcher.run(job(1, tag("f", None, 1))) as run:
                async for _ in run.deltas:
                    pass
                assert run.hop is None
                assert run.job.service == ANYTIME
            assert observed.numbers == [None]

    run_scenario(scenario())


def test_promised_work_is_that_of_other_flows_until_it_expires() -> None:
    """The later hops of a flow count for other flows only, and only while they are expected."""
    promised = PromisedWork()
    one, other = FlowKey("t", "1"), FlowKey("t", "2")
    promised.put(one, 3.0, until_s=10.0)
    promised.put(other, 1.0, until_s=10.0)
    promised.put(one, 2.0, until_s=10.0)
    assert (promised.others_s(one, 0.0), promised.others_s(other, 0.0)) == (1.0, 2.0)
    promised.shorten(one, 5.0)
    promised.shorten(FlowKey("t", "unknown"), 5.0)
    assert promised.others_s(other, 5.0) == 0.0
    assert promised.others_s(one, 9.0) == 1.0
    assert promised.others_s(one, 10.0) == 0.0
