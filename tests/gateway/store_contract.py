"""The contract tests of state stores, which each store's tests subclass."""

from __future__ import annotations

import pytest

from draftgate.gateway.state.commands import (
    ExchangeSpending,
    FreeSlots,
    HoldSlots,
    ListUsage,
    ListWorkers,
    PublishReport,
    PutUsage,
    ReadKeys,
    ReadTotals,
    ReleaseLeases,
    RenewLeases,
    ReserveLease,
    ReserveQuota,
    SettleQuotas,
    WithdrawWorker,
    WriteKeys,
)
from draftgate.gateway.state.store import Store
from draftgate.gateway.state.values import FORGET_S, STALE_S, Lease, Refusal, Reservation
from draftgate.policies.quotas import (
    Limit,
    Quota,
    QuotaReservation,
    Settlement,
    Shortage,
    Totals,
)
from tests.gateway.stores import (
    Timed,
    claimed,
    granted,
    leased_tokens,
    offer,
    report,
    reserve,
    views,
)

TOKENS = Limit.TOKENS


def ten_tokens(request_id: str, tokens: int) -> QuotaReservation:
    """Return a reservation of a tenant with ten tokens a minute."""
    return QuotaReservation(request_id, "t", tokens, Quota(tokens_per_minute=10))


class StoreContract:
    """The contract of `Store`. Time advances only when a test calls `pass_time`."""

    @pytest.fixture
    def timed(self) -> Timed:
        """A new store with its clock."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, timed: Timed) -> Store:
        """The store without its clock."""
        return timed.store

    # --- reports ----------------------------------------------------------------------------------

    async def test_a_view_has_the_last_report_and_its_age(self, timed: Timed, store: Store) -> None:
        """The view of a worker contains the worker's last report unchanged and the report's age."""
        await store.call(PublishReport(report("b")))
        await store.call(PublishReport(report("a")))
        await timed.pass_time(2.0)
        last = report("b", seq=1, capacity_tokens=7, max_model_len=99, model_id="m")
        assert await store.call(PublishReport(last))
        await timed.pass_time(0.5)
        found = (await store.call(ListWorkers())).workers
        assert [view.report for view in found] == [report("a"), last]
        assert [view.age_s for view in found] == pytest.approx([2.5, 0.5])
        assert [view.worker_id for view in found] == ["a", "b"]

    async def test_a_late_report_changes_nothing(self, timed: Timed, store: Store) -> None:
        """The store drops an overtaken report, which does not reset the worker's age."""
        await store.call(PublishReport(report(seq=5, max_model_len=99)))
        await timed.pass_time(1.0)
        for seq in (5, 4):
            assert not await store.call(PublishReport(report(seq=seq)))
        view = (await views(store))["w"]
        assert (view.report.max_model_len, view.age_s) == (99, pytest.approx(1.0))

    async def test_a_worker_that_leaves_is_gone_until_it_reports_again(self, store: Store) -> None:
        """A withdrawn worker returns only with a later report, and a second withdrawal has no
        effect."""
        await store.call(PublishReport(report()))
        await store.call(WithdrawWorker("w", "1", 2))
        await store.call(WithdrawWorker("w", "1", 2))
        assert not await store.call(PublishReport(report(seq=1)))
        assert await views(store) == {}
        assert (await reserve(store, "r")).refusal is Refusal.GONE
        assert await store.call(PublishReport(report(seq=3)))
        assert set(await views(store)) == {"w"}

    async def test_leases_outlive_the_withdrawal_of_a_worker(self, store: Store) -> None:
        """A withdrawn worker keeps its leases, because it still runs their requests."""
        await store.call(PublishReport(report()))
        await granted(store, "r", 100)
        await store.call(WithdrawWorker("w", "1", 1))
        await store.call(PublishReport(report(seq=2)))
        assert await leased_tokens(store) == 100

    async def test_a_silent_worker_is_forgotten(self, timed: Timed, store: Store) -> None:
        """A silent worker gets no new leases after `STALE_S` and disappears after `FORGET_S`."""
        await store.call(PublishReport(report()))
        await timed.pass_time(STALE_S)
        await granted(store, "r")
        await timed.pass_time(0.001)
        assert (await reserve(store, "s")).refusal is Refusal.STALE
        assert (await views(store))["w"].age_s == pytest.approx(STALE_S + 0.001)
        await timed.pass_time(FORGET_S - STALE_S)
        assert await views(store) == {}

    # --- epochs -----------------------------------------------------------------------------------

    async def test_a_new_epoch_ends_leases_and_reports_of_the_old_epoch(self, store: Store) -> None:
        """A new epoch ends the leases of the old epoch, and the store refuses its reports and
        offers."""
        await store.call(PublishReport(report(seq=7)))
        old = await granted(store, "r", 100)
        assert await store.call(PublishReport(report(epoch="2")))
        assert await leased_tokens(store) == 0
        assert not await store.call(PublishReport(report(seq=8)))
        await store.call(WithdrawWorker("w", "1", 9))
        assert (await views(store))["w"].report.epoch == "2"
        assert (await reserve(store, "s")).refusal is Refusal.FENCED
        assert await store.call(RenewLeases((old,), 30.0)) == {"r"}
        assert await leased_tokens(store) == 0

    async def test_a_renewed_lease_of_a_newer_epoch_fences_the_old(self, store: Store) -> None:
        """The renewal of a lease with a newer epoch fences the worker's old epoch in the store."""
        await store.call(PublishReport(report()))
        await granted(store, "old", 10)
        assert await store.call(RenewLeases((Lease("new", "w", "2", 5, 1),), 30.0)) == frozenset()
        assert await views(store) == {}
        assert not await store.call(PublishReport(report(seq=1)))
        await store.call(PublishReport(report(epoch="2")))
        assert await leased_tokens(store) == 5

    # --- leases -----------------------------------------------------------------------------------

    async def test_leases_add_up_until_released(self, store: Store) -> None:
        """The leased tokens of a worker are the sum of its leases, and a second release has no
        effect."""
        await store.call(PublishReport(report()))
        await granted(store, "r1", 100)
        await granted(store, "r2", 30)
        assert await leased_tokens(store) == 130
        await store.call(ReleaseLeases(("r1", "unknown")))
        await store.call(ReleaseLeases(("r1",)))
        await store.call(ReleaseLeases(()))
        assert await leased_tokens(store) == 30

    async def test_a_second_lease_replaces_the_first(self, store: Store) -> None:
        """A request holds at most one lease when it moves to another worker or is refused."""
        await store.call(PublishReport(report("a")))
        await store.call(PublishReport(report("b")))
        await granted(store, "r", 100, offer("a"))
        await granted(store, "r", 40, offer("a"))
        assert await leased_tokens(store, "a") == 40
        await granted(store, "r", 50, offer("b"))
        assert [view.leased_tokens for view in (await views(store)).values()] == [0, 50]
        assert (await reserve(store, "r", 50, offer("c"))).lease is None
        assert [view.leased_tokens for view in (await views(store)).values()] == [0, 0]

    async def test_a_lease_expires_by_itself(self, timed: Timed, store: Store) -> None:
        """The tokens of a lease become free at its expiry without a release."""
        await store.call(PublishReport(report()))
        await granted(store, "r", 100, ttl_s=5.0)
        await timed.pass_time(4.999)
        assert await leased_tokens(store) == 100
        await timed.pass_time(0.001)
        assert await leased_tokens(store) == 0

    async def test_a_renewal_sets_the_expiry(self, timed: Timed, store: Store) -> None:
        """A renewal sets a new expiry, which may be earlier or later than the old expiry."""
        await store.call(PublishReport(report()))
        lease = await granted(store, "r", 100, ttl_s=5.0)
        await timed.pass_time(4.0)
        assert await store.call(RenewLeases((lease,), 10.0)) == frozenset()
        await timed.pass_time(9.0)
        assert await leased_tokens(store) == 100
        await store.call(RenewLeases((lease,), 0.5))
        await timed.pass_time(0.5)
        assert await leased_tokens(store) == 0

    async def test_a_renewal_restores_lost_leases(self, timed: Timed, store: Store) -> None:
        """A renewal restores leases after the store lost its memory, and the leases expire as
        usual."""
        await store.call(PublishReport(report()))
        leases = [await granted(store, f"r{index}", 100 + index) for index in range(3)]
        await timed.flush()
        store = timed.store
        assert await store.call(RenewLeases(leases, 5.0)) == frozenset()
        assert await views(store) == {}
        assert (await reserve(store, "s")).refusal is Refusal.UNKNOWN
        await store.call(PublishReport(report(watermark=leases[0].number)))
        view = (await views(store))["w"]
        assert (view.leased_tokens, view.behind_tokens) == (303, 203)
        await timed.pass_time(5.0)
        assert await leased_tokens(store) == 0

    async def test_a_renewal_corrects_a_lease(self, timed: Timed, store: Store) -> None:
        """A renewal restores a lease that has expired or that moved to another worker."""
        await store.call(PublishReport(report("a")))
        lease = await granted(store, "r", 100, offer("a"), ttl_s=1.0)
        await timed.pass_time(1.0)
        await store.call(RenewLeases((lease,), 30.0))
        assert await leased_tokens(store, "a") == 100
        await store.call(PublishReport(report("b")))
        await granted(store, "r", 7, offer("b"))
        await store.call(RenewLeases((lease,), 30.0))
        assert [view.leased_tokens for view in (await views(store)).values()] == [100, 0]

    async def test_ids_may_be_any_text(self, store: Store) -> None:
        """The store accepts ids with spaces, colons, braces and non-ASCII letters."""
        worker, request = "w 1:{x} é", "1 2 r:ä {y}"
        await store.call(PublishReport(report(worker)))
        assert (await granted(store, request, 3, offer(worker))).request_id == request
        assert await leased_tokens(store, worker) == 3
        await store.call(ReleaseLeases((request,)))
        assert await leased_tokens(store, worker) == 0

    # --- choice of a worker -----------------------------------------------------------------------

    async def test_leases_never_exceed_the_capacity(self, store: Store) -> None:
        """The store refuses leases beyond the capacity, and a release makes tokens available
        again."""
        await store.call(PublishReport(report(capacity_tokens=100)))
        await granted(store, "r1", 60)
        assert (await reserve(store, "r2", 41)).refusal is Refusal.FULL
        await granted(store, "r3", 40)
        assert (await reserve(store, "r4", 1)).refusal is Refusal.FULL
        await store.call(ReleaseLeases(("r1",)))
        await granted(store, "r5", 60)

    async def test_an_expired_lease_frees_its_tokens_immediately(
        self, timed: Timed, store: Store
    ) -> None:
        """An expired lease frees its tokens without any call between expiry and reservation."""
        await store.call(PublishReport(report(capacity_tokens=100)))
        await granted(store, "r1", 100, ttl_s=1.0)
        await timed.pass_time(1.0)
        await granted(store, "r2", 100)

    async def test_an_idle_worker_accepts_a_request_beyond_its_capacity(self, store: Store) -> None:
        """An idle worker accepts a request beyond its capacity and then no other request."""
        await store.call(PublishReport(report(capacity_tokens=100)))
        await granted(store, "long", 500)
        await granted(store, "long", 600)
        assert (await reserve(store, "r", 1)).refusal is Refusal.FULL

    async def test_an_unknown_capacity_is_no_limit(self, store: Store) -> None:
        """A worker without a known capacity is never full."""
        await store.call(PublishReport(report(capacity_tokens=0)))
        await granted(store, "r1", 10**9)
        await granted(store, "r2", 10**9)

    async def test_the_lowest_score_wins(self, store: Store) -> None:
        """The store chooses the acceptable worker with the lowest score, and the first of equal
        scores."""
        for worker_id in ("a", "b", "c", "full"):
            await store.call(PublishReport(report(worker_id, capacity_tokens=10)))
        await granted(store, "big", 10, offer("full"))
        offers = (offer("full", "1", -9.0), offer("gone", "1", -8.0), offer("c", "1", 0.5))
        offers += (offer("b", "1", 0.25), offer("a", "1", 0.25))
        assert (await granted(store, "r", 1, *offers)).worker_id == "b"

    async def test_leases_after_the_watermark_raise_a_score(self, store: Store) -> None:
        """Leases after the offer's watermark raise the score of a worker."""
        await store.call(PublishReport(report("a")))
        await store.call(PublishReport(report("b")))
        offers = (offer("a", "1", 0.0, 0.01), offer("b", "1", 0.5, 0.01))
        chosen = [(await granted(store, f"r{n}", 30, *offers)).worker_id for n in range(6)]
        assert chosen == ["a", "a", "b", "a", "b", "a"]
        found = await reserve(store, "last", 30, offer("a", "1", 0.0, 0.01))
        assert found.behind_tokens == 120

    async def test_leases_up_to_the_watermark_do_not_count_twice(self, store: Store) -> None:
        """Leases up to the offer's watermark do not raise the score, even after later reports."""
        await store.call(PublishReport(report("a")))
        await store.call(PublishReport(report("b")))
        first = await granted(store, "r1", 100, offer("a"))
        await store.call(PublishReport(report("a", seq=1, watermark=first.number)))
        view = (await views(store))["a"]
        assert (view.leased_tokens, view.behind_tokens) == (100, 0)
        seen = offer("a", "1", 0.0, 1.0, first.number)
        assert (await granted(store, "r2", 1, seen, offer("b", "1", 50.0))).worker_id == "a"
        unseen = offer("a", "1", 0.0, 1.0, 0)
        assert (await granted(store, "r3", 1, unseen, offer("b", "1", 50.0))).worker_id == "b"

    @pytest.mark.parametrize(
        ("offered", "why"),
        [
            (("full", "stale", "unknown", "fenced", "gone"), Refusal.FULL),
            (("gone", "unknown", "stale"), Refusal.STALE),
            (("gone", "fenced", "unknown"), Refusal.UNKNOWN),
            (("gone", "fenced"), Refusal.FENCED),
            (("gone",), Refusal.GONE),
        ],
    )
    async def test_a_refusal_names_the_most_recoverable_reason(
        self, timed: Timed, store: Store, offered: tuple[str, ...], why: Refusal
    ) -> None:
        """The refusal is `full` if any worker is full, and `gone` only if all workers have left."""
        await store.call(PublishReport(report("stale")))
        await timed.pass_time(STALE_S + 1)
        await store.call(PublishReport(report("full", capacity_tokens=1)))
        await store.call(PublishReport(report("fenced", epoch="2")))
        await store.call(PublishReport(report("gone")))
        await store.call(WithdrawWorker("gone", "1", 1))
        await granted(store, "r", 1, offer("full"))
        found = await store.call(ReserveLease("s", 1, [offer(name) for name in offered], 30.0))
        assert (found.lease, found.refusal) == (None, why)

    async def test_reservation_without_offers_is_refused(self, store: Store) -> None:
        """The store refuses a reservation without offers as `unknown`."""
        assert (await store.call(ReserveLease("r", 1, (), 30.0))).refusal is Refusal.UNKNOWN

    # --- leases with quota ------------------------------------------------------------------------

    async def test_a_lease_and_a_quota_are_reserved_together(self, store: Store) -> None:
        """One call leases a worker and reserves quota, which leases without quota leave alone."""
        await store.call(PublishReport(report()))
        found = await store.call(ReserveLease("r-0", 100, [offer()], 30.0, ten_tokens("r", 4)))
        assert found.lease is not None
        assert found.shortage is None
        await granted(store, "other", 100)
        assert await leased_tokens(store) == 200
        assert await store.call(ReadTotals("t")) == Totals(4, 0, 0, 4)

    async def test_a_short_quota_leases_nothing(self, timed: Timed, store: Store) -> None:
        """A request beyond its quota gets no lease, and its shortage names the same wait as without
        a lease."""
        await store.call(PublishReport(report()))
        await store.call(ReserveLease("a-0", 1, [offer()], 30.0, ten_tokens("a", 8)))
        await timed.pass_time(6.0)
        found = await store.call(ReserveLease("b-0", 1, [offer()], 30.0, ten_tokens("b", 5)))
        assert found == Reservation(None, shortage=Shortage(TOKENS, pytest.approx(12.001), 5, 10))
        assert found.shortage == await store.call(ReserveQuota(ten_tokens("b", 5), 30.0))
        never = await store.call(ReserveLease("b-0", 1, [offer()], 30.0, ten_tokens("b", 11)))
        assert never == Reservation(None, shortage=Shortage(TOKENS, None, 11, 10))
        assert await leased_tokens(store) == 1
        assert await store.call(ReadTotals("t")) == Totals(8, 0, 0, 8)

    async def test_a_full_worker_refuses_no_quota(self, timed: Timed, store: Store) -> None:
        """A request that no worker has room for keeps its quota, and pays it once when it
        returns."""
        await store.call(PublishReport(report()))
        await granted(store, "other", 1000)
        for _ in range(3):
            found = await store.call(ReserveLease("r-0", 1, [offer()], 30.0, ten_tokens("r", 10)))
            assert found == Reservation(None, Refusal.FULL)
        assert await store.call(ReadTotals("t")) == Totals(10, 0, 0, 10)
        await store.call(ReleaseLeases(["other"]))
        assert await granted(store, "r-0")
        await store.call(SettleQuotas([Settlement("r", 3)]))
        assert await store.call(ReadTotals("t")) == Totals(10, 3, 7, 0)

    # --- claims -----------------------------------------------------------------------------------

    async def test_a_claimed_worker_grants_no_other_leases(self, store: Store) -> None:
        """A claimed worker has no capacity for other requests, until the request of the claim has
        its lease."""
        await store.call(PublishReport(report(capacity_tokens=100)))
        await granted(store, "r1", 60)
        assert await claimed(store, "long", 90) == "w"
        assert (await reserve(store, "long", 90)).refusal is Refusal.FULL
        assert (await reserve(store, "small", 1)).refusal is Refusal.FULL
        view = (await views(store))["w"]
        assert (view.leased_tokens, view.claimed_tokens) == (60, 90)
        await store.call(ReleaseLeases(("r1",)))
        assert (await reserve(store, "small", 1)).refusal is Refusal.FULL
        await granted(store, "long", 90)
        view = (await views(store))["w"]
        assert (view.leased_tokens, view.claimed_tokens) == (90, 0)
        await granted(store, "small", 10)

    async def test_claims_are_served_in_order(self, store: Store) -> None:
        """The first claim on a worker is served first, and a renewal keeps its place."""
        await store.call(PublishReport(report(capacity_tokens=100)))
        await granted(store, "r1", 100)
        for request, tokens in (("first", 60), ("second", 10), ("first", 60)):
            assert await claimed(store, request, tokens) == "w"
        await store.call(ReleaseLeases(("r1",)))
        assert (await reserve(store, "second", 10)).refusal is Refusal.FULL
        await granted(store, "first", 60)
        await granted(store, "second", 10)

    async def test_a_claim_takes_the_worker_with_the_nearest_room(self, store: Store) -> None:
        """A claim takes the worker with the fewest tokens that must end first, counting earlier
        claims, and the first of equal workers."""
        for worker_id in ("a", "b", "c"):
            await store.call(PublishReport(report(worker_id, capacity_tokens=100)))
        offers = [offer(worker_id) for worker_id in ("a", "b", "c")]
        for worker_id, tokens in (("a", 90), ("b", 60), ("c", 60)):
            await granted(store, f"r-{worker_id}", tokens, offer(worker_id))
        found = [await claimed(store, f"long-{n}", 50, *offers) for n in range(3)]
        assert found == ["b", "c", "a"]

    async def test_other_workers_stay_usable(self, store: Store) -> None:
        """A claim affects only its own worker, and its request may also use another worker."""
        for worker_id in ("a", "b"):
            await store.call(PublishReport(report(worker_id, capacity_tokens=100)))
            await granted(store, f"r-{worker_id}", 50, offer(worker_id))
        assert await claimed(store, "long", 80, offer("a"), offer("b")) == "a"
        offers = (offer("a", "1", -1.0), offer("b"))
        assert (await granted(store, "small", 10, *offers)).worker_id == "b"
        await store.call(ReleaseLeases(("small", "r-b")))
        assert (await granted(store, "long", 80, *offers)).worker_id == "b"
        assert (await granted(store, "small", 10, *offers)).worker_id == "a"

    async def test_a_claim_moves_when_its_worker_leaves(self, store: Store) -> None:
        """A claim moves when its worker leaves or restarts, and keeps its place among claims."""
        for worker_id in ("a", "b"):
            await store.call(PublishReport(report(worker_id, capacity_tokens=100)))
            await granted(store, f"r-{worker_id}", 100, offer(worker_id))
        offers = (offer("a"), offer("b"))
        assert await claimed(store, "first", 50, *offers) == "a"
        assert await claimed(store, "second", 10, *offers) == "b"
        await store.call(WithdrawWorker("a", "1", 1))
        assert await claimed(store, "first", 50, *offers) == "b"
        await store.call(ReleaseLeases(("r-b",)))
        assert (await reserve(store, "second", 10, offer("b"))).refusal is Refusal.FULL
        await granted(store, "first", 50, *offers)
        await store.call(PublishReport(report("b", epoch="2", capacity_tokens=100)))
        assert (await views(store))["b"].claimed_tokens == 0
        await granted(store, "small", 10, offer("b", "2"))

    async def test_a_claim_expires_without_renewals(self, timed: Timed, store: Store) -> None:
        """A claim without a renewal ends after its time, which frees the worker."""
        await store.call(PublishReport(report()))
        assert await claimed(store, "long", 500, ttl_s=2.0) == "w"
        await timed.pass_time(1.5)
        await store.call(PublishReport(report(seq=1)))
        assert await claimed(store, "long", 500, ttl_s=2.0) == "w"
        await timed.pass_time(1.999)
        assert (await reserve(store, "small")).refusal is Refusal.FULL
        await timed.pass_time(0.001)
        await granted(store, "small")

    async def test_a_worker_takes_part_in_one_move(self, store: Store) -> None:
        """A move gets the slots of both workers or none, until the move that has one ends."""
        assert await store.call(HoldSlots("first", ("a", "b"), 10.0))
        assert not await store.call(HoldSlots("second", ("c", "b"), 10.0))
        assert await store.call(HoldSlots("third", ("c", "d"), 10.0))
        await store.call(FreeSlots("second", ("b", "c")))
        assert not await store.call(HoldSlots("second", ("b", "e"), 10.0))
        await store.call(FreeSlots("first", ("a", "b")))
        assert await store.call(HoldSlots("second", ("b", "e"), 10.0))

    async def test_move_slots_expire(self, timed: Timed, store: Store) -> None:
        """The slots of a gateway that has stopped are free after their time."""
        assert await store.call(HoldSlots("first", ("a", "b"), 10.0))
        await timed.pass_time(9.999)
        assert not await store.call(HoldSlots("second", ("a",), 10.0))
        await timed.pass_time(0.001)
        assert await store.call(HoldSlots("second", ("a",), 10.0))

    async def test_spending_is_the_sum_of_all_gateways(self, timed: Timed, store: Store) -> None:
        """A repeated or older report of a gateway changes nothing. An account ends after its
        time."""

        async def spent(source: str, **totals: int) -> tuple[int, ...] | None:
            entries = tuple((name, total, 10.0) for name, total in totals.items())
            return await store.call(ExchangeSpending(source, entries))

        assert await spent("one", a=5, b=0) == (5, 0)
        assert await spent("two", a=1 << 40) == (5 + (1 << 40),)
        assert await spent("two", a=1 << 40) == (5 + (1 << 40),)
        assert await spent("one", a=2, b=7) == (5 + (1 << 40), 7)
        await timed.pass_time(9.9)
        assert await spent("one", b=8) == (8,)
        await timed.pass_time(9.9)
        assert await spent("two", b=1) == (9,)

    async def test_keys_are_replaced_only_at_the_expected_revision(self, store: Store) -> None:
        """Of two changes of one revision, the second has no effect."""
        assert await store.call(ReadKeys("")) == ("", None)
        assert not await store.call(WriteKeys("1-a", "2-a", "wrong"))
        assert await store.call(WriteKeys("", "1-a", "first ä"))
        assert not await store.call(WriteKeys("", "1-b", "late"))
        assert await store.call(ReadKeys("")) == ("1-a", "first ä")
        assert await store.call(ReadKeys("1-a")) == ("1-a", None)
        assert await store.call(WriteKeys("1-a", "2-a", "second"))
        assert await store.call(ReadKeys("1-a")) == ("2-a", "second")

    async def test_usage_of_a_period_is_that_of_all_gateways(self, store: Store) -> None:
        """A gateway replaces its own counts, and each period has its own."""
        await store.call(PutUsage("one", "day", "[1]", 10.0))
        await store.call(PutUsage("two", "day", "[2]", 10.0))
        await store.call(PutUsage("two", "other", "[5]", 10.0))
        await store.call(PutUsage("one", "day", "[3]", 10.0))
        assert sorted(await store.call(ListUsage("day"))) == ["[2]", "[3]"]
        assert await store.call(ListUsage("other")) == ("[5]",)
        assert await store.call(ListUsage("unknown")) == ()

    async def test_a_released_claim_ends(self, store: Store) -> None:
        """A release ends a claim as well as a lease."""
        await store.call(PublishReport(report()))
        await claimed(store, "long", 500)
        await store.call(ReleaseLeases(("long",)))
        await granted(store, "small")
        assert (await views(store))["w"].claimed_tokens == 0

    async def test_a_late_claim_of_a_leased_request_has_no_effect(self, store: Store) -> None:
        """A request with a lease gets no claim, which would block the worker in vain."""
        await store.call(PublishReport(report()))
        lease = await granted(store, "long", 500)
        assert await claimed(store, "long", 500) is None
        await granted(store, "small")
        await store.call(ReleaseLeases(("long",)))
        await claimed(store, "long", 500)
        assert await store.call(RenewLeases((lease,), 30.0)) == frozenset()
        assert (await views(store))["w"].claimed_tokens == 0

    async def test_workers_that_can_never_hold_a_request_are_not_claimed(
        self, timed: Timed, store: Store
    ) -> None:
        """A request claims no worker that is too small, of unknown capacity, fenced or gone."""
        await store.call(PublishReport(report("stale")))
        await timed.pass_time(STALE_S + 1)
        await store.call(PublishReport(report("small", capacity_tokens=99)))
        await store.call(PublishReport(report("unknown", capacity_tokens=0)))
        await store.call(PublishReport(report("fenced", epoch="2")))
        await store.call(PublishReport(report("gone")))
        await store.call(WithdrawWorker("gone", "1", 1))
        names = ("stale", "small", "unknown", "fenced", "gone", "never")
        assert await claimed(store, "long", 100, *map(offer, names)) is None
        assert {view.claimed_tokens for view in (await views(store)).values()} == {0}
        await store.call(PublishReport(report("large", capacity_tokens=100)))
        assert await claimed(store, "long", 100, *map(offer, names), offer("large")) == "large"

    # --- numbers ----------------------------------------------------------------------------------

    async def test_lease_numbers_exceed_all_known_numbers(self, timed: Timed) -> None:
        """The number of a new lease exceeds all known numbers and watermarks, even after a memory
        loss."""
        await timed.store.call(PublishReport(report()))
        leases = [await granted(timed.store, f"r{index}") for index in range(3)]
        numbers = [lease.number for lease in leases]
        assert numbers == sorted(set(numbers))
        far = numbers[-1] + 10**9
        await timed.flush()
        await timed.store.call(PublishReport(report(watermark=far)))
        assert (await granted(timed.store, "s")).number > far
        await timed.flush()
        await timed.store.call(PublishReport(report()))
        await timed.store.call(RenewLeases((Lease("t", "w", "1", 1, far),), 30.0))
        assert (await granted(timed.store, "u")).number > far

    async def test_a_working_store_has_no_outage(self, store: Store) -> None:
        """A working store reports no outage, and its results are not degraded."""
        await store.call(PublishReport(report()))
        assert store.outage is None
        assert not (await store.call(ListWorkers())).degraded
        assert not (await reserve(store, "r")).degraded
