"""The contract tests of the exchange between gateways, which each store's tests subclass."""

from __future__ import annotations

import pytest

from draftgate.gateway.state.commands import ExchangeNews, PublishReport, ReleaseLeases
from draftgate.gateway.state.memory.exchange import HISTORY_S, MOST_NEWS
from draftgate.gateway.state.store import Store
from draftgate.gateway.state.values import News
from draftgate.policies.admission.appointments import BookingNote
from draftgate.policies.speculation.acceptance_history import MOST_KEYS, Key, KeyTally, Tally
from tests.gateway.stores import Timed, claimed, granted, report

KEY: Key = ("t", "m", True)
ALL: Key = (None, "m", True)
ONE = Tally(1, 30.0, 5.0)
NOTE = BookingNote("a-1", (1 << 64) - 1, -1, "t", 0.25, 20.0, 1.0, share=2.0)


async def start_of(store: Store) -> int:
    """Return the start of a store's memory."""
    news = await store.call(ExchangeNews("reader", 1, 0, 0))
    assert news is not None
    return news.start


async def told(
    store: Store,
    source: str,
    number: int,
    *history: KeyTally,
    cursor: int = 0,
    restored: tuple[KeyTally, ...] = (),
    bookings: tuple[BookingNote, ...] = (),
) -> News:
    """Send an update to a store whose start is known, and return the news."""
    start = await start_of(store)
    update = ExchangeNews(source, number, start, cursor, history, restored, bookings)
    news = await store.call(update)
    assert news is not None
    assert news.start == update.start
    return news


def numbered(count: int, tally: Tally = ONE) -> list[KeyTally]:
    """Return a tally for each of many tenants."""
    return [((f"t{index}", "m", False), tally) for index in range(count)]


class ExchangeContract:
    """The contract of `ExchangeNews`. Time advances only when a test calls `pass_time`."""

    @pytest.fixture
    def timed(self) -> Timed:
        """A new store with its clock."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, timed: Timed) -> Store:
        """The store."""
        return timed.store

    async def test_tallies_of_gateways_add_up(self, store: Store) -> None:
        """A total contains the choices of all gateways, and old choices decay by the new ones."""
        await told(store, "a", 1, (KEY, Tally(3, 30.0, 5.0)), (ALL, ONE))
        news = await told(store, "b", 1, (KEY, Tally(2, 10.0, 1.5)))
        found = dict(news.history)
        assert found[ALL] == ONE
        assert found[KEY].choices == 5
        assert found[KEY][1:] == pytest.approx((30 * 0.99**2 + 10, 5 * 0.99**2 + 1.5), rel=1e-12)

    async def test_a_repeated_update_counts_once(self, store: Store) -> None:
        """An update whose answer was lost has no further effect when it is repeated."""
        for _ in range(3):
            news = await told(store, "a", 1, (KEY, ONE))
        assert dict(news.history) == {KEY: ONE}
        news = await told(store, "a", 2, (KEY, ONE))
        assert dict(news.history)[KEY].choices == 2

    async def test_news_begin_after_the_cursor(self, store: Store) -> None:
        """A gateway gets each change once, and nothing if nothing has changed."""
        first = await told(store, "a", 1, (KEY, ONE))
        assert dict(first.history) == {KEY: ONE}
        second = await told(store, "b", 1, (ALL, ONE), cursor=first.cursor)
        assert dict(second.history) == {ALL: ONE}
        assert (await told(store, "a", 2, cursor=second.cursor)).history == ()

    async def test_long_news_come_in_parts(self, store: Store) -> None:
        """A gateway that knows nothing reads all totals in several exchanges."""
        sent = numbered(MOST_NEWS + 3)
        await told(store, "a", 1, *sent)
        part = await told(store, "b", 1)
        assert part.more
        assert len(part.history) == MOST_NEWS
        rest = await told(store, "b", 2, cursor=part.cursor)
        assert not rest.more
        assert len(rest.history) == 3
        assert {**dict(part.history), **dict(rest.history)} == dict(sent)

    async def test_the_total_with_most_choices_is_restored(self, store: Store) -> None:
        """Copies of a total count once, and tallies that arrived before them count in addition."""
        total = Tally(7, 70.0, 3.0)
        await told(store, "a", 1, (KEY, ONE), restored=((KEY, Tally(6, 60.0, 3.0)),))
        news = await told(store, "b", 1, restored=((KEY, total), (ALL, ONE)))
        assert dict(news.history) == {KEY: total.then(ONE), ALL: ONE}
        assert await told(store, "c", 1, restored=((KEY, total),), cursor=news.cursor) == News(
            news.start, news.cursor
        )

    async def test_news_count_expired_claims(self, timed: Timed) -> None:
        """The store counts claims that expire, but no claims that are released or become leases."""
        await timed.store.call(PublishReport(report()))
        for name in ("leased", "released", "expired", "renewed"):
            await claimed(timed.store, name)
        await timed.store.call(ReleaseLeases(("released",)))
        await granted(timed.store, "leased")
        await timed.pass_time(1.0)
        await claimed(timed.store, "renewed")
        await timed.pass_time(1.0)
        assert (await told(timed.store, "a", 1)).expired_claims == 1
        await timed.pass_time(1.0)
        assert (await told(timed.store, "a", 2)).expired_claims == 2

    async def test_bookings_move_to_the_time_of_the_reader(self, timed: Timed) -> None:
        """A gateway gets the bookings of others, with times relative to its own exchange."""
        await told(timed.store, "a", 1, bookings=(NOTE, NOTE._replace(name="late", again=True)))
        await timed.pass_time(3.0)
        found = (await told(timed.store, "b", 1)).bookings
        assert [one.name for one in found] == ["a-1", "late"]
        assert found[0] == NOTE.later(3.0)
        assert (found[0].due_in_s, found[0].booked_ago_s) == (17.0, 4.0)

    async def test_a_closed_booking_never_opens_again(self, store: Store) -> None:
        """A gateway learns that a client has returned, whatever a slower gateway tells later."""
        first = await told(store, "a", 1, bookings=(NOTE,))
        closed = NOTE._replace(closed=True)
        second = await told(store, "b", 1, bookings=(closed,), cursor=first.cursor)
        assert second.bookings == (closed,)
        last = await told(store, "c", 1, bookings=(NOTE,), cursor=second.cursor)
        assert last.bookings == ()
        assert (await told(store, "d", 1)).bookings == (closed,)

    async def test_bookings_end_when_their_clients_are_no_longer_expected(
        self, timed: Timed
    ) -> None:
        """The store forgets a booking at the end of its client's grace."""
        await told(timed.store, "a", 1, bookings=(NOTE, NOTE._replace(name="closed", closed=True)))
        await timed.pass_time(NOTE.ends_in_s - 0.001)
        assert len((await told(timed.store, "b", 1)).bookings) == 2
        await timed.pass_time(0.001)
        over = NOTE.later(60.0)._replace(name="over")
        assert (await told(timed.store, "b", 2, bookings=(over,))).bookings == ()

    async def test_long_news_of_bookings_come_in_parts(self, store: Store) -> None:
        """A gateway that knows nothing reads all bookings and totals in several exchanges."""
        notes = tuple(NOTE._replace(name=f"a-{number}") for number in range(MOST_NEWS + 3))
        await told(store, "a", 1, (KEY, ONE), bookings=notes[:MOST_NEWS])
        await told(store, "a", 2, (ALL, ONE), bookings=notes[MOST_NEWS:])
        part = await told(store, "b", 1)
        assert part.more
        rest = await told(store, "b", 2, cursor=part.cursor)
        assert not rest.more
        assert {one.name for one in (*part.bookings, *rest.bookings)} == {one.name for one in notes}
        assert {key for key, _ in (*part.history, *rest.history)} == {KEY, ALL}

    async def test_an_empty_store_has_another_start(self, timed: Timed) -> None:
        """A store that has lost its memory ignores an update for its earlier memory."""
        start = await start_of(timed.store)
        await told(timed.store, "a", 1, (KEY, ONE))
        await timed.pass_time(1.0)
        await timed.flush()
        late = await timed.store.call(ExchangeNews("a", 2, start, 0, ((KEY, ONE),)))
        assert late == News(await start_of(timed.store))
        assert late.start != start
        assert (await told(timed.store, "b", 1)).history == ()

    async def test_old_totals_are_forgotten(self, timed: Timed) -> None:
        """The store forgets a total a day after its last choice."""
        await told(timed.store, "a", 1, (KEY, ONE))
        await timed.pass_time(HISTORY_S / 2)
        await told(timed.store, "a", 2, (ALL, ONE))
        await timed.pass_time(HISTORY_S / 2)
        assert dict((await told(timed.store, "b", 1)).history) == {ALL: ONE}

    async def test_the_least_recently_used_totals_are_forgotten(self, store: Store) -> None:
        """The store keeps the most recently used totals of a bounded number of keys."""
        sent = numbered(MOST_KEYS)
        for number, begin in enumerate(range(0, MOST_KEYS, 1000), start=1):
            await told(store, "a", number, *sent[begin : begin + 1000])
        await told(store, "b", 1, sent[0], (KEY, ONE), (ALL, ONE))
        found: dict[Key, Tally] = {}
        cursor, more = 0, True
        while more:
            news = await told(store, "c", 1, cursor=cursor)
            found |= dict(news.history)
            cursor, more = news.cursor, news.more
        assert len(found) == MOST_KEYS
        assert found[sent[0][0]].choices == 2
        assert sent[1][0] not in found
        assert sent[2][0] not in found
        assert sent[3][0] in found
