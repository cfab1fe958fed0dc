"""Tests of flows in memory, in shared stores and in Redis, and of their guard during an outage."""

from __future__ import annotations

import pytest

from draftgate.gateway.state.commands import BeginHop, CancelFlow, EndHop, TakeFlow
from draftgate.gateway.state.values import HopLengths
from draftgate.lab.sim.virtual_time import run_virtual
from draftgate.policies.flows.types import HopRecord
from tests.gateway.flaky_store import FlakyStore, guarded
from tests.gateway.flow_contract import KEY, PLAN, FlowContract, arrival, begun
from tests.gateway.stores import OnLocal, OnMemory, OnRedis


class TestMemoryFlows(OnMemory, FlowContract):
    """The flows of a node without a pool."""


class TestLocalFlows(OnLocal, FlowContract):
    """The flows that the processes of a node share."""


class TestRedisFlows(OnRedis, FlowContract):
    """The flows of a pool."""


def test_flow_continues_during_an_outage() -> None:
    """A flow keeps its time and its hops while the store does not respond."""

    async def scenario() -> None:
        remote = FlakyStore()
        store = guarded(remote)
        first = await begun(store)
        await store.call(EndHop(KEY, first, HopLengths(1, 2, 0.1)))
        remote.failure = "refused"
        second = await begun(store)
        assert (second.number, second.life) == (2, first.life)
        assert second.remaining_s == pytest.approx(first.remaining_s)
        await store.call(EndHop(KEY, second, HopLengths(3, 4, 0.1)))
        found = await store.call(TakeFlow(KEY, first))
        assert [hop.output_tokens for hop in found or ()] == [2, 4]
        await store.close()

    run_virtual(scenario())


def test_flow_that_began_during_an_outage_is_not_new_afterwards() -> None:
    """The hops after an outage continue a flow that only this gateway knows."""

    async def scenario() -> None:
        remote = FlakyStore()
        store = guarded(remote)
        remote.failure = "refused"
        first = await begun(store)
        remote.failure = None
        second = await begun(store)
        assert (second.number, second.life) == (2, first.life)
        assert not await store.call(CancelFlow(KEY, first))
        assert await store.call(TakeFlow(KEY, second)) == (
            HopRecord(PLAN, 0.0),
            HopRecord(PLAN, 0.0),
        )
        assert await remote.inner.call(BeginHop(KEY, arrival(None))) is None
        await store.close()

    run_virtual(scenario())


def test_refused_flow_has_not_begun_during_an_outage() -> None:
    """A gateway alone forgets a flow whose first hop it refuses."""

    async def scenario() -> None:
        remote = FlakyStore()
        store = guarded(remote)
        remote.failure = "refused"
        assert await store.call(CancelFlow(KEY, await begun(store)))
        assert (await begun(store)).number == 1
        await store.close()

    run_virtual(scenario())
