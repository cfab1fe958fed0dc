"""The contract tests of stores of quotas, which each store's tests subclass."""

from __future__ import annotations

import pytest

from draftgate.gateway.state.commands import (
    ReadLevels,
    ReadTotals,
    RenewQuotas,
    ReserveQuota,
    SettleQuotas,
)
from draftgate.gateway.state.store import Store
from draftgate.policies.quotas import (
    Levels,
    Limit,
    Quota,
    QuotaLevel,
    QuotaReservation,
    Settlement,
    Shortage,
    Totals,
    release_of,
)
from tests.gateway.stores import Timed

SIXTY = Quota(requests_per_minute=60)
TOKENS = Quota(tokens_per_minute=600)
TTL_S = 30.0


def reservation(
    name: str, tokens: int = 1, quota: Quota = SIXTY, tenant: str = "t"
) -> QuotaReservation:
    return QuotaReservation(name, tenant, tokens, quota)


async def granted(store: Store, count: int, begin: int = 0, quota: Quota = SIXTY) -> int:
    """Send requests of one tenant, and return the number of granted requests."""
    found = [
        await store.call(ReserveQuota(reservation(f"r{begin + index}", quota=quota), TTL_S))
        for index in range(count)
    ]
    return found.count(None)


class QuotaContract:
    """The contract of commands about quotas. Time advances only when a test calls `pass_time`."""

    @pytest.fixture
    def timed(self) -> Timed:
        """A new store with its clock."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, timed: Timed) -> Store:
        """The store."""
        return timed.store

    async def test_exactly_the_burst_fits_at_one_time(self, store: Store) -> None:
        """The store grants exactly 60 requests at one time, and names the wait for the next."""
        assert await granted(store, 100) == 60
        short = await store.call(ReserveQuota(reservation("more"), TTL_S))
        assert short == Shortage(Limit.REQUESTS, pytest.approx(1.001), 1, 60)

    async def test_levels_are_what_is_in_use(self, timed: Timed, store: Store) -> None:
        """The store tells the exact units in use, with reservations, and without drained units."""
        quota = Quota(requests_per_minute=60, tokens_per_minute=600)
        assert await store.call(ReadLevels("t")) == Levels()
        await store.call(ReserveQuota(reservation("a", 100, quota), TTL_S))
        await store.call(ReserveQuota(reservation("b", 50, quota), TTL_S))
        found = (await store.call(ReadLevels("t"))).of(quota)
        assert found[Limit.REQUESTS] == QuotaLevel(60, 58, 2.0)
        assert found[Limit.TOKENS] == QuotaLevel(600, 450, 15.0)
        await store.call(SettleQuotas([Settlement("b", 10)]))
        await timed.pass_time(1.5)
        found = (await store.call(ReadLevels("t"))).of(quota)
        assert found[Limit.REQUESTS] == QuotaLevel(60, 59, pytest.approx(0.5))
        assert found[Limit.TOKENS] == QuotaLevel(600, 505, pytest.approx(9.5))

    async def test_the_rate_refills_the_burst(self, timed: Timed, store: Store) -> None:
        """The store grants one more request for each second that passes."""
        assert await granted(store, 100) == 60
        for second in range(5):
            await timed.pass_time(0.999999)
            assert await granted(store, 5, 100 * second + 100) == 0
            await timed.pass_time(0.000001)
            assert await granted(store, 5, 100 * second + 110) == 1

    async def test_a_reservation_beyond_the_burst_never_fits(self, store: Store) -> None:
        """The shortage of a reservation that never fits has no time, and the totals stay zero."""
        short = await store.call(ReserveQuota(reservation("r", 601, TOKENS), TTL_S))
        assert short == Shortage(Limit.TOKENS, None, 601, 600)
        assert await store.call(ReadTotals("t")) == Totals()

    async def test_unused_tokens_return_at_once(self, store: Store) -> None:
        """A settled reservation returns its unused tokens, and excess tokens of another count."""
        assert await store.call(ReserveQuota(reservation("a", 600, TOKENS), TTL_S)) is None
        assert await store.call(ReserveQuota(reservation("b", 1, TOKENS), TTL_S)) is not None
        await store.call(SettleQuotas([Settlement("a", 100)]))
        assert await store.call(ReserveQuota(reservation("b", 500, TOKENS), TTL_S)) is None
        await store.call(SettleQuotas([Settlement("b", 700)]))
        short = await store.call(ReserveQuota(reservation("c", 1, TOKENS), TTL_S))
        assert short is not None
        assert short.retry_after_s == pytest.approx(20.101)
        assert await store.call(ReadTotals("t")) == Totals(1300, 800, 500, 0)

    async def test_a_refund_takes_nothing_that_later_reservations_use(
        self, timed: Timed, store: Store
    ) -> None:
        """A refund of units that time has drained returns no units of later reservations."""
        assert await store.call(ReserveQuota(reservation("a", 600, TOKENS), TTL_S)) is None
        await timed.pass_time(20.0)
        assert await store.call(ReserveQuota(reservation("b", 200, TOKENS), TTL_S)) is None
        await store.call(SettleQuotas([Settlement("a", 0)]))
        assert await store.call(ReserveQuota(reservation("c", 401, TOKENS), TTL_S)) is not None
        assert await store.call(ReserveQuota(reservation("c", 400, TOKENS), TTL_S)) is None

    async def test_repeated_calls_have_no_further_effect(self, store: Store) -> None:
        """A repeated reservation, renewal or settlement changes no total."""
        for _ in range(2):
            assert await store.call(ReserveQuota(reservation("a", 10, TOKENS), TTL_S)) is None
            await store.call(RenewQuotas([reservation("a", 10, TOKENS)], TTL_S))
        assert await store.call(ReadTotals("t")) == Totals(10, 0, 0, 10)
        for _ in range(2):
            await store.call(SettleQuotas([Settlement("a", 4), Settlement("unknown", 9)]))
            assert await store.call(ReadTotals("t")) == Totals(10, 4, 6, 0)

    async def test_a_released_request_counts_against_no_quota(self, store: Store) -> None:
        """The quota of requests ignores a released request."""
        assert await granted(store, 60) == 60
        await store.call(SettleQuotas([release_of("r7")]))
        assert await granted(store, 5, 100) == 1

    async def test_an_expired_reservation_is_charged_in_full(
        self, timed: Timed, store: Store
    ) -> None:
        """An expired reservation is charged in full, and a renewed reservation is not."""
        for name in ("dead", "live"):
            assert await store.call(ReserveQuota(reservation(name, 200, TOKENS), TTL_S)) is None
        await timed.pass_time(TTL_S - 1)
        await store.call(RenewQuotas([reservation("live", 200, TOKENS)], TTL_S))
        await timed.pass_time(1.0)
        assert await store.call(ReadTotals("t")) == Totals(400, 200, 0, 200)
        await store.call(SettleQuotas([Settlement("dead", 0), Settlement("live", 50)]))
        assert await store.call(ReadTotals("t")) == Totals(400, 250, 150, 0)

    async def test_a_lost_reservation_is_restored(self, timed: Timed) -> None:
        """A renewal restores a lost reservation, even beyond the quota."""
        held = [reservation(name, 400, TOKENS) for name in "ab"]
        await timed.store.call(ReserveQuota(held[0], TTL_S))
        await timed.flush()
        store = timed.store
        await store.call(RenewQuotas(held, TTL_S))
        assert await store.call(ReadTotals("t")) == Totals(800, 0, 0, 800)
        short = await store.call(ReserveQuota(reservation("c", 1, TOKENS), TTL_S))
        assert short is not None
        assert short.retry_after_s == pytest.approx(20.101)

    async def test_a_changed_quota_counts_what_was_used(self, store: Store) -> None:
        """Earlier requests count against a changed quota, but not against a new limit."""
        assert await granted(store, 60) == 60
        raised = Quota(requests_per_minute=100)
        assert await granted(store, 60, 100, raised) == 40
        assert await granted(store, 5, 200, SIXTY) == 0
        assert await granted(store, 5, 300, Quota(tokens_per_minute=3)) == 3
        assert await granted(store, 100, 400, SIXTY) == 60

    async def test_tenants_are_separate(self, store: Store) -> None:
        """The use of one tenant does not count against another, whatever their names are."""
        names = ["t", "", "t:requests", "a b\nc", "ä 1 2"]
        for name in names:
            assert (
                await store.call(ReserveQuota(reservation(f"{name}-1", 600, TOKENS, name), TTL_S))
                is None
            )
            assert (
                await store.call(ReserveQuota(reservation(f"{name}-2", 1, TOKENS, name), TTL_S))
                is not None
            )
            await store.call(SettleQuotas([Settlement(f"{name}-1", 9)]))
            assert await store.call(ReadTotals(name)) == Totals(600, 9, 591, 0)

    async def test_a_working_store_counts_its_gateways(self, store: Store) -> None:
        """A store with one user counts one gateway."""
        assert await store.call(RenewQuotas((), TTL_S)) == 1
