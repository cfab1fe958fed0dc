"""The contract tests of stores of flows, which each store's tests subclass."""

from __future__ import annotations

import pytest

from draftgate.gateway.state.commands import BeginHop, CancelFlow, EndHop, TakeFlow
from draftgate.gateway.state.memory import flows as memory_flows
from draftgate.gateway.state.store import Store
from draftgate.gateway.state.values import (
    KEEP_S,
    MOST_FLOW_HOPS,
    FlowHop,
    FlowKey,
    HopArrival,
    HopLengths,
)
from draftgate.policies.flows.types import HopKind, HopRecord
from tests.gateway.stores import Timed

PLAN, ANSWER = HopKind("/v1/completions", 'a "model"'), HopKind("/v1/chat/completions", "m")
KEY = FlowKey("tenant", "flow: 1")


def arrival(
    deadline_s: float | None = 10.0, ago_s: float = 0.0, kind: HopKind = PLAN
) -> HopArrival:
    """Return a hop that arrives now, by default of a flow with a deadline of 10 s."""
    return HopArrival(kind, ago_s, deadline_s)


async def begun(store: Store, key: FlowKey = KEY, **fields: object) -> FlowHop:
    """Begin a hop, and assert that it has a place in its flow."""
    hop = await store.call(BeginHop(key, arrival(**fields)))
    assert hop is not None
    return hop


class FlowContract:
    """The contract of commands about flows. Time advances only when a test calls `pass_time`."""

    @pytest.fixture
    def timed(self) -> Timed:
        """A new store with its clock."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, timed: Timed) -> Store:
        """The store."""
        return timed.store

    async def test_hops_count_from_the_first_arrival(self, timed: Timed, store: Store) -> None:
        """The deadline counts from the first arrival, and later deadlines have no effect."""
        first = await begun(store, ago_s=0.5)
        assert (first.number, first.remaining_s) == (1, pytest.approx(9.5))
        await timed.pass_time(2.0)
        second = await begun(store, deadline_s=99.0)
        third = await begun(store, deadline_s=None)
        assert (second.number, third.number) == (2, 3)
        assert second.remaining_s == third.remaining_s == pytest.approx(7.5)
        assert first.life == second.life

    async def test_unknown_flow_without_a_deadline_is_no_flow(self, store: Store) -> None:
        """A request of an unknown flow without a deadline has no place, and begins no flow."""
        assert await store.call(BeginHop(KEY, arrival(None))) is None
        assert (await begun(store)).number == 1

    async def test_tenants_with_one_id_have_two_flows(self, store: Store) -> None:
        """Flows of two tenants with the same id have nothing in common."""
        keys = FlowKey("a", "1"), FlowKey("b", "1"), FlowKey("a:b", "1"), FlowKey("a", "b1")
        hops = [await begun(store, key) for key in keys]
        assert [hop.number for hop in hops] == [1] * len(keys)
        assert await store.call(TakeFlow(keys[0], hops[0])) is not None
        assert (await begun(store, keys[1])).number == 2

    async def test_take_returns_the_hops_and_ends_the_flow(
        self, timed: Timed, store: Store
    ) -> None:
        """The hops have their arrivals, ends and lengths, also if they overlap."""
        first = await begun(store)
        await timed.pass_time(1.0)
        second = await begun(store, kind=ANSWER)
        third = await begun(store, kind=ANSWER, ago_s=0.25)
        await timed.pass_time(1.0)
        await store.call(EndHop(KEY, second, HopLengths(7, 8, 0.5)))
        await timed.pass_time(1.0)
        await store.call(EndHop(KEY, first, HopLengths(5, 6, 2.5)))
        assert await store.call(TakeFlow(KEY, third)) == (
            HopRecord(PLAN, 0.0, pytest.approx(3.0), 5, 6, 2.5),
            HopRecord(ANSWER, pytest.approx(1.0), pytest.approx(2.0), 7, 8, 0.5),
            HopRecord(ANSWER, pytest.approx(0.75)),
        )
        assert await store.call(TakeFlow(KEY, first)) is None
        assert (await begun(store)).number == 1

    async def test_flow_outlives_its_deadline_for_a_bounded_time(
        self, timed: Timed, store: Store
    ) -> None:
        """A late hop continues the flow, and a hop after the flow is forgotten begins a new one."""
        first = await begun(store)
        await timed.pass_time(10.0 + KEEP_S - 0.1)
        late = await begun(store)
        assert (late.number, late.remaining_s) == (2, pytest.approx(0.1 - KEEP_S))
        await timed.pass_time(0.2)
        assert await store.call(TakeFlow(KEY, first)) is None
        assert (await begun(store)).number == 1

    async def test_earlier_life_of_an_id_does_not_change_the_later(
        self, timed: Timed, store: Store
    ) -> None:
        """The end of a hop does not count for a later flow with the same id."""
        old = await begun(store)
        await timed.pass_time(10.0 + KEEP_S + 1.0)
        new = await begun(store)
        await store.call(EndHop(KEY, old, HopLengths(1, 1, 1.0)))
        assert not await store.call(CancelFlow(KEY, old))
        assert await store.call(TakeFlow(KEY, old)) is None
        assert await store.call(TakeFlow(KEY, new)) == (HopRecord(PLAN, 0.0),)

    async def test_refused_flow_has_not_begun(self, timed: Timed, store: Store) -> None:
        """After the refusal of its first hop, a flow begins anew with its whole time."""
        assert await store.call(CancelFlow(KEY, await begun(store)))
        await timed.pass_time(3.0)
        hop = await begun(store)
        assert (hop.number, hop.remaining_s) == (1, pytest.approx(10.0))
        await begun(store)
        assert not await store.call(CancelFlow(KEY, hop))
        assert (await begun(store)).number == 3

    async def test_flows_of_a_tenant_are_bounded(
        self, timed: Timed, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Further flows of a tenant are no flows until its old flows end."""
        for module in (memory_flows, pytest.importorskip("draftgate.gateway.state.redis.scripts")):
            monkeypatch.setattr(module, "MOST_FLOWS", 3)
        hops = [await begun(store, FlowKey("t", str(number))) for number in range(3)]
        assert await store.call(BeginHop(FlowKey("t", "3"), arrival())) is None
        assert (await begun(store, FlowKey("t", "0"))).number == 2
        assert (await begun(store, FlowKey("other", "3"))).number == 1
        await store.call(TakeFlow(FlowKey("t", "1"), hops[1]))
        assert (await begun(store, FlowKey("t", "3"))).number == 1
        await timed.pass_time(10.0 + KEEP_S + 1.0)
        for number in range(4, 7):
            assert (await begun(store, FlowKey("t", str(number)))).number == 1

    async def test_hops_of_a_flow_are_bounded(self, store: Store) -> None:
        """Further requests of a long flow are ordinary requests."""
        for number in range(1, MOST_FLOW_HOPS + 1):
            hop = await begun(store)
            assert hop.number == number
        assert await store.call(BeginHop(KEY, arrival())) is None
        assert len(await store.call(TakeFlow(KEY, hop)) or ()) == MOST_FLOW_HOPS
