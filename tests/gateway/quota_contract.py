"""The contract tests of stores of quotas, which each store's tests subclass."""

from __future__ import annotations

import pytest

from draftgate.gateway.state.quota_store import QuotaStore
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


async def granted(quotas: QuotaStore, count: int, begin: int = 0, quota: Quota = SIXTY) -> int:
    """Send requests of one tenant, and return the number of granted requests."""
    found = [
        await quotas.reserve(reservation(f"r{begin + index}", quota=quota), TTL_S)
        for index in range(count)
    ]
    return found.count(None)


class QuotaContract:
    """The contract of `QuotaStore`. Time advances only when a test calls `pass_time`."""

    @pytest.fixture
    def timed(self) -> Timed:
        """A new store with its clock."""
        raise NotImplementedError

    @pytest.fixture
    def quotas(self, timed: Timed) -> QuotaStore:
        """The quotas of the store."""
        return timed.store.quotas

    async def test_exactly_the_burst_fits_at_one_time(self, quotas: QuotaStore) -> None:
        """The store grants exactly 60 requests at one time, and names the wait for the next."""
        assert await granted(quotas, 100) == 60
        short = await quotas.reserve(reservation("more"), TTL_S)
        assert short == Shortage(Limit.REQUESTS, pytest.approx(1.001), 1, 60)

    async def test_levels_are_what_is_in_use(self, timed: Timed, quotas: QuotaStore) -> None:
        """The store tells the exact units in use, with reservations, and without drained units."""
        quota = Quota(requests_per_minute=60, tokens_per_minute=600)
        assert await quotas.levels("t") == Levels()
        await quotas.reserve(reservation("a", 100, quota), TTL_S)
        await quotas.reserve(reservation("b", 50, quota), TTL_S)
        found = (await quotas.levels("t")).of(quota)
        assert found[Limit.REQUESTS] == QuotaLevel(60, 58, 2.0)
        assert found[Limit.TOKENS] == QuotaLevel(600, 450, 15.0)
        await quotas.settle([Settlement("b", 10)])
        await timed.pass_time(1.5)
        found = (await quotas.levels("t")).of(quota)
        assert found[Limit.REQUESTS] == QuotaLevel(60, 59, pytest.approx(0.5))
        assert found[Limit.TOKENS] == QuotaLevel(600, 505, pytest.approx(9.5))

    async def test_the_rate_refills_the_burst(self, timed: Timed, quotas: QuotaStore) -> None:
        """The store grants one more request for each second that passes."""
        assert await granted(quotas, 100) == 60
        for second in range(5):
            await timed.pass_time(0.999999)
            assert await granted(quotas, 5, 100 * second + 100) == 0
            await timed.pass_time(0.000001)
            assert await granted(quotas, 5, 100 * second + 110) == 1

    async def test_a_reservation_beyond_the_burst_never_fits(self, quotas: QuotaStore) -> None:
        """The shortage of a reservation that never fits has no time, and the totals stay zero."""
        short = await quotas.reserve(reservation("r", 601, TOKENS), TTL_S)
        assert short == Shortage(Limit.TOKENS, None, 601, 600)
        assert await quotas.totals("t") == Totals()

    async def test_unused_tokens_return_at_once(self, quotas: QuotaStore) -> None:
        """A settled reservation returns its unused tokens, and excess tokens of another count."""
        assert await quotas.reserve(reservation("a", 600, TOKENS), TTL_S) is None
        assert await quotas.reserve(reservation("b", 1, TOKENS), TTL_S) is not None
        await quotas.settle([Settlement("a", 100)])
        assert await quotas.reserve(reservation("b", 500, TOKENS), TTL_S) is None
        await quotas.settle([Settlement("b", 700)])
        short = await quotas.reserve(reservation("c", 1, TOKENS), TTL_S)
        assert short is not None
        assert short.retry_after_s == pytest.approx(20.101)
        assert await quotas.totals("t") == Totals(1300, 800, 500, 0)

    async def test_a_refund_takes_nothing_that_later_reservations_use(
        self, timed: Timed, quotas: QuotaStore
    ) -> None:
        """A refund of units that time has drained returns no units of later reservations."""
        assert await quotas.reserve(reservation("a", 600, TOKENS), TTL_S) is None
        await timed.pass_time(20.0)
        assert await quotas.reserve(reservation("b", 200, TOKENS), TTL_S) is None
        await quotas.settle([Settlement("a", 0)])
        assert await quotas.reserve(reservation("c", 401, TOKENS), TTL_S) is not None
        assert await quotas.reserve(reservation("c", 400, TOKENS), TTL_S) is None

    async def test_repeated_calls_have_no_further_effect(self, quotas: QuotaStore) -> None:
        """A repeated reservation, renewal or settlement changes no total."""
        for _ in range(2):
            assert await quotas.reserve(reservation("a", 10, TOKENS), TTL_S) is None
            await quotas.renew([reservation("a", 10, TOKENS)], TTL_S)
        assert await quotas.totals("t") == Totals(10, 0, 0, 10)
        for _ in range(2):
            await quotas.settle([Settlement("a", 4), Settlement("unknown", 9)])
            assert await quotas.totals("t") == Totals(10, 4, 6, 0)

    async def test_a_released_request_counts_against_no_quota(self, quotas: QuotaStore) -> None:
        """The quota of requests ignores a released request."""
        assert await granted(quotas, 60) == 60
        await quotas.settle([release_of("r7")])
        assert await granted(quotas, 5, 100) == 1

    async def test_an_expired_reservation_is_charged_in_full(
        self, timed: Timed, quotas: QuotaStore
    ) -> None:
        """An expired reservation is charged in full, and a renewed reservation is not."""
        for name in ("dead", "live"):
            assert await quotas.reserve(reservation(name, 200, TOKENS), TTL_S) is None
        await timed.pass_time(TTL_S - 1)
        await quotas.renew([reservation("live", 200, TOKENS)], TTL_S)
        await timed.pass_time(1.0)
        assert await quotas.totals("t") == Totals(400, 200, 0, 200)
        await quotas.settle([Settlement("dead", 0), Settlement("live", 50)])
        assert await quotas.totals("t") == Totals(400, 250, 150, 0)

    async def test_a_lost_reservation_is_restored(self, timed: Timed) -> None:
        """A renewal restores a lost reservation, even beyond the quota."""
        held = [reservation(name, 400, TOKENS) for name in "ab"]
        await timed.store.quotas.reserve(held[0], TTL_S)
        await timed.flush()
        quotas = timed.store.quotas
        await quotas.renew(held, TTL_S)
        assert await quotas.totals("t") == Totals(800, 0, 0, 800)
        short = await quotas.reserve(reservation("c", 1, TOKENS), TTL_S)
        assert short is not None
        assert short.retry_after_s == pytest.approx(20.101)

    async def test_a_changed_quota_counts_what_was_used(self, quotas: QuotaStore) -> None:
        """Earlier requests count against a changed quota, but not against a new limit."""
        assert await granted(quotas, 60) == 60
        raised = Quota(requests_per_minute=100)
        assert await granted(quotas, 60, 100, raised) == 40
        assert await granted(quotas, 5, 200, SIXTY) == 0
        assert await granted(quotas, 5, 300, Quota(tokens_per_minute=3)) == 3
        assert await granted(quotas, 100, 400, SIXTY) == 60

    async def test_tenants_are_separate(self, quotas: QuotaStore) -> None:
        """The use of one tenant does not count against another, whatever their names are."""
        names = ["t", "", "t:requests", "a b\nc", "ä 1 2"]
        for name in names:
            assert await quotas.reserve(reservation(f"{name}-1", 600, TOKENS, name), TTL_S) is None
            assert (
                await quotas.reserve(reservation(f"{name}-2", 1, TOKENS, name), TTL_S) is not None
            )
            await quotas.settle([Settlement(f"{name}-1", 9)])
            assert await quotas.totals(name) == Totals(600, 9, 591, 0)

    async def test_a_working_store_counts_its_gateways(self, quotas: QuotaStore) -> None:
        """A store with one user counts one gateway."""
        assert await quotas.renew((), TTL_S) == 1
