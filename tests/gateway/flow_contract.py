"""The contract tests of stores of flows, which each store's tests subclass."""

from __future__ import annotations

import pytest

from draftgate.gateway.state import flow_store
from draftgate.gateway.state.flow_store import (
    KEEP_S,
    MOST_FLOW_HOPS,
    FlowHop,
    FlowKey,
    FlowStore,
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


async def begun(flows: FlowStore, key: FlowKey = KEY, **fields: object) -> FlowHop:
    """Begin a hop, and assert that it has a place in its flow."""
    hop = await flows.begin_hop(key, arrival(**fields))
    assert hop is not None
    return hop


class FlowContract:
    """The contract of `FlowStore`. Time advances only when a test calls `pass_time`."""

    @pytest.fixture
    def timed(self) -> Timed:
        """A new store with its clock."""
        raise NotImplementedError

    @pytest.fixture
    def flows(self, timed: Timed) -> FlowStore:
        """The flows of the store."""
        return timed.store.flows

    async def test_hops_count_from_the_first_arrival(self, timed: Timed, flows: FlowStore) -> None:
        """The deadline counts from the first arrival, and later deadlines have no effect."""
        first = await begun(flows, ago_s=0.5)
        assert (first.number, first.remaining_s) == (1, pytest.approx(9.5))
        await timed.pass_time(2.0)
        second = await begun(flows, deadline_s=99.0)
        third = await begun(flows, deadline_s=None)
        assert (second.number, third.number) == (2, 3)
        assert second.remaining_s == third.remaining_s == pytest.approx(7.5)
        assert first.life == second.life

    async def test_unknown_flow_without_a_deadline_is_no_flow(self, flows: FlowStore) -> None:
        """A request of an unknown flow without a deadline has no place, and begins no flow."""
        assert await flows.begin_hop(KEY, arrival(None)) is None
        assert (await begun(flows)).number == 1

    async def test_tenants_with_one_id_have_two_flows(self, flows: FlowStore) -> None:
        """Flows of two tenants with the same id have nothing in common."""
        keys = FlowKey("a", "1"), FlowKey("b", "1"), FlowKey("a:b", "1"), FlowKey("a", "b1")
        hops = [await begun(flows, key) for key in keys]
        assert [hop.number for hop in hops] == [1] * len(keys)
        assert await flows.take(keys[0], hops[0]) is not None
        assert (await begun(flows, keys[1])).number == 2

    async def test_take_returns_the_hops_and_ends_the_flow(
        self, timed: Timed, flows: FlowStore
    ) -> None:
        """The hops have their arrivals, ends and lengths, also if they overlap."""
        first = await begun(flows)
        await timed.pass_time(1.0)
        second = await begun(flows, kind=ANSWER)
        third = await begun(flows, kind=ANSWER, ago_s=0.25)
        await timed.pass_time(1.0)
        await flows.end_hop(KEY, second, HopLengths(7, 8, 0.5))
        await timed.pass_time(1.0)
        await flows.end_hop(KEY, first, HopLengths(5, 6, 2.5))
        assert await flows.take(KEY, third) == (
            HopRecord(PLAN, 0.0, pytest.approx(3.0), 5, 6, 2.5),
            HopRecord(ANSWER, pytest.approx(1.0), pytest.approx(2.0), 7, 8, 0.5),
            HopRecord(ANSWER, pytest.approx(0.75)),
        )
        assert await flows.take(KEY, first) is None
        assert (await begun(flows)).number == 1

    async def test_flow_outlives_its_deadline_for_a_bounded_time(
        self, timed: Timed, flows: FlowStore
    ) -> None:
        """A late hop continues the flow, and a hop after the flow is forgotten begins a new one."""
        first = await begun(flows)
        await timed.pass_time(10.0 + KEEP_S - 0.1)
        late = await begun(flows)
        assert (late.number, late.remaining_s) == (2, pytest.approx(0.1 - KEEP_S))
        await timed.pass_time(0.2)
        assert await flows.take(KEY, first) is None
        assert (await begun(flows)).number == 1

    async def test_earlier_life_of_an_id_does_not_change_the_later(
        self, timed: Timed, flows: FlowStore
    ) -> None:
        """The end of a hop does not count for a later flow with the same id."""
        old = await begun(flows)
        await timed.pass_time(10.0 + KEEP_S + 1.0)
        new = await begun(flows)
        await flows.end_hop(KEY, old, HopLengths(1, 1, 1.0))
        assert not await flows.cancel(KEY, old)
        assert await flows.take(KEY, old) is None
        assert await flows.take(KEY, new) == (HopRecord(PLAN, 0.0),)

    async def test_refused_flow_has_not_begun(self, timed: Timed, flows: FlowStore) -> None:
        """After the refusal of its first hop, a flow begins anew with its whole time."""
        assert await flows.cancel(KEY, await begun(flows))
        await timed.pass_time(3.0)
        hop = await begun(flows)
        assert (hop.number, hop.remaining_s) == (1, pytest.approx(10.0))
        await begun(flows)
        assert not await flows.cancel(KEY, hop)
        assert (await begun(flows)).number == 3

    async def test_flows_of_a_tenant_are_bounded(
        self, timed: Timed, flows: FlowStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Further flows of a tenant are no flows until its old flows end."""
        for module in (flow_store, pytest.importorskip("draftgate.gateway.state.redis.flows")):
            monkeypatch.setattr(module, "MOST_FLOWS", 3)
        hops = [await begun(flows, FlowKey("t", str(number))) for number in range(3)]
        assert await flows.begin_hop(FlowKey("t", "3"), arrival()) is None
        assert (await begun(flows, FlowKey("t", "0"))).number == 2
        assert (await begun(flows, FlowKey("other", "3"))).number == 1
        await flows.take(FlowKey("t", "1"), hops[1])
        assert (await begun(flows, FlowKey("t", "3"))).number == 1
        await timed.pass_time(10.0 + KEEP_S + 1.0)
        for number in range(4, 7):
            assert (await begun(flows, FlowKey("t", str(number)))).number == 1

    async def test_hops_of_a_flow_are_bounded(self, flows: FlowStore) -> None:
        """Further requests of a long flow are ordinary requests."""
        for number in range(1, MOST_FLOW_HOPS + 1):
            hop = await begun(flows)
            assert hop.number == number
        assert await flows.begin_hop(KEY, arrival()) is None
        assert len(await flows.take(KEY, hop) or ()) == MOST_FLOW_HOPS
