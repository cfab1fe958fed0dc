"""The quota ledger: sums agree, and admitted tokens never exceed the quotas."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from draftgate.policies.leaky_bucket import UNITS
from draftgate.policies.quotas import (
    UNLIMITED,
    Limit,
    Quota,
    QuotaLedger,
    QuotaReservation,
    Settlement,
    Shortage,
    Totals,
    release_of,
)

QUOTA = Quota(requests_per_minute=7, tokens_per_minute=1000, burst_requests=5, burst_tokens=600)

steps = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "settle", "settle", "release", "wait"]),
        st.sampled_from("abc"),
        st.integers(0, 9),
        st.integers(0, 700),
        st.floats(0, 40),
    ),
    max_size=80,
)


class Ledger(QuotaLedger):
    """A ledger with a quota for each tenant, which settles at the time of the last reservation."""

    def __init__(self, quotas=None, default: Quota = UNLIMITED, most_tenants: int = 4096) -> None:
        super().__init__(most_tenants)
        self.quotas, self.default, self.now_s = quotas or {}, default, 0.0

    def reserve(self, tenant: str, name: str, tokens: int, now_s: float) -> Shortage | None:
        self.now_s = now_s
        reservation = QuotaReservation(name, tenant, tokens, self.quotas.get(tenant, self.default))
        return super().reserve(reservation, now_s)

    def settle(self, name: str, tokens: int) -> None:
        super().settle(Settlement(name, tokens), self.now_s)

    def release(self, name: str) -> None:
        super().settle(release_of(name), self.now_s)


def balances(totals: Totals) -> bool:
    return totals.reserved == totals.settled + totals.released + totals.open


@given(steps)
def test_ledger_balances_after_any_sequence_of_calls(moves) -> None:
    """The sums agree and stay non-negative after any reserve, settle, error and release."""
    ledger, now_s = Ledger({"a": QUOTA, "b": Quota(tokens_per_minute=300)}), 0.0
    for move, tenant, request, tokens, wait_s in moves:
        name = f"{tenant}{request}"
        if move == "reserve":
            before, known = ledger.totals(tenant), ledger.holds(name)
            shortage = ledger.reserve(tenant, name, tokens, now_s)
            taken = 0 if shortage or known else tokens
            assert ledger.totals(tenant).open == before.open + taken
        elif move == "settle":
            ledger.settle(name, tokens)
        elif move == "release":
            ledger.release(name)
        else:
            now_s += wait_s
        for one in "abc":
            assert balances(ledger.totals(one))
            assert min(ledger.totals(one)) >= 0


@given(
    st.lists(
        st.tuples(st.integers(1, 600), st.floats(0, 30), st.floats(0, 1), st.integers(0, 5)),
        max_size=40,
    )
)
def test_no_interval_holds_more_than_burst_and_rate(moves) -> None:
    """The ledger keeps at most burst + rate x length in any interval, even with late releases."""
    ledger, now_s, kept, ends = Ledger({"a": QUOTA}), 0.0, [], []
    for number, (tokens, wait_s, used, later) in enumerate(moves):
        if ledger.reserve("a", str(number), tokens, now_s) is None:
            kept.append((now_s, int(tokens * used)))
            ends.append((number + later, str(number), int(tokens * used)))
        for end, name, settled in ends:
            if end == number:
                ledger.settle(name, settled)
        now_s += wait_s
    for first, (begin_s, _) in enumerate(kept):
        for last in range(first, len(kept)):
            within = kept[first : last + 1]
            seconds = within[-1][0] - begin_s
            assert sum(tokens for _, tokens in within) <= 600 + 1000 / 60 * seconds + 1e-3
            assert len(within) <= 5 + 7 / 60 * seconds + 1e-6


@given(
    st.lists(st.tuples(st.integers(0, 60), st.floats(0, 90)), min_size=1, max_size=12),
    st.integers(0, 60),
)
def test_released_tokens_count_as_never_reserved(moves, probe) -> None:
    """The ledger accepts as much after settling as if only the used tokens had been reserved."""
    quota = {"a": Quota(tokens_per_minute=60, burst_tokens=120)}
    ledger, exact, now_s, taken = Ledger(quota), Ledger(quota), 0.0, []
    for number, (tokens, wait_s) in enumerate(moves):
        if ledger.reserve("a", str(number), tokens, now_s) is None:
            used = tokens // (number % 3 + 1)
            taken.append((str(number), used))
            assert exact.reserve("a", str(number), used, now_s) is None
        now_s += wait_s
    for name, used in taken[::2] + taken[1::2]:
        ledger.settle(name, used)
    assert ledger.reserve("a", "probe", probe, now_s) == exact.reserve("a", "probe", probe, now_s)


@given(st.lists(st.integers(1, 600), min_size=1, max_size=30), st.floats(0, 1e6))
def test_request_fits_exactly_after_retry_after(sizes, begin_s) -> None:
    """The request fits at `retry_after` and does not fit two milliseconds earlier."""
    ledger, now_s = Ledger({"a": QUOTA}), begin_s
    for number, tokens in enumerate(sizes):
        shortage = ledger.reserve("a", str(number), tokens, now_s)
        if shortage is not None:
            early_s = now_s + shortage.retry_after_s - 2e-3
            if early_s > now_s:
                assert ledger.reserve("a", str(number), tokens, early_s) is not None
            now_s += shortage.retry_after_s
            assert ledger.reserve("a", str(number), tokens, now_s) is None


@given(st.integers(0, 600), st.integers(0, 600), st.floats(0, 200))
def test_released_tokens_can_be_used_at_once_and_only_once(first, used, later_s) -> None:
    """Released tokens never exceed the burst after a refill."""
    used = min(first, used)
    ledger = Ledger({"a": Quota(tokens_per_minute=1000, burst_tokens=600)})
    assert ledger.reserve("a", "1", first, 0.0) is None
    ledger.settle("1", used)
    assert ledger.reserve("a", "2", 600 - used, 0.0) is None
    ledger.settle("2", 600 - used)
    assert ledger.reserve("a", "3", 600, 60.0) is None
    ledger.settle("3", 0)
    assert ledger.reserve("a", "4", 601, 60.0 + later_s).retry_after_s is None
    assert ledger.reserve("a", "5", 600, 60.0 + later_s) is None
    assert ledger.reserve("a", "6", 1, 60.0 + later_s) is not None


def test_shortage_names_the_limit_with_the_longest_wait() -> None:
    """If a request can never fit, the shortage contains the largest amount that fits."""
    ledger = Ledger({"a": QUOTA})
    never = ledger.reserve("a", "x", 601, 0.0)
    assert (never.limit, never.retry_after_s, never.requested, never.most) == (
        "tokens",
        None,
        601,
        600,
    )
    for number in range(5):
        assert ledger.reserve("a", str(number), 0, 0.0) is None
    short = ledger.reserve("a", "6", 1, 0.0)
    assert short.limit is Limit.REQUESTS
    assert short.retry_after_s == pytest.approx(60 / 7, abs=2e-3)
    assert ledger.totals("a") == Totals()


def test_released_request_counts_against_no_quota() -> None:
    """The quota of requests includes a settled request, but not a released request."""
    ledger = Ledger({"a": Quota(requests_per_minute=1)})
    assert ledger.reserve("a", "1", 5, 0.0) is None
    ledger.release("1")
    ledger.release("1")
    assert ledger.reserve("a", "2", 5, 0.0) is None
    ledger.settle("2", 0)
    assert ledger.reserve("a", "3", 5, 0.0) is not None
    assert ledger.totals("a") == Totals(10, 0, 10, 0)


def test_tokens_beyond_the_reservation_count_against_the_quota() -> None:
    """Excess tokens count against the quota, and the sums still agree."""
    ledger = Ledger({"a": Quota(tokens_per_minute=60)})
    assert ledger.reserve("a", "1", 10, 0.0) is None
    ledger.settle("1", 90)
    assert ledger.totals("a") == Totals(90, 90, 0, 0)
    assert ledger.reserve("a", "2", 10, 0.0).retry_after_s == pytest.approx(40, abs=2e-3)


def test_unlimited_tenant_is_counted_but_never_short() -> None:
    """The totals include the tokens of an unlimited tenant."""
    ledger = Ledger()
    for number in range(1000):
        assert ledger.reserve("a", str(number), 10**9, 0.0) is None
    assert ledger.totals("a").open == 1000 * 10**9


def test_only_idle_tenants_are_forgotten() -> None:
    """The ledger forgets only tenants with full buckets and no open reservation."""
    ledger = Ledger(default=Quota(tokens_per_minute=60), most_tenants=10)
    assert ledger.reserve("open", "open", 1, 0.0) is None
    assert ledger.reserve("owes", "owes", 60, 0.0) is None
    ledger.settle("owes", 60)
    for number in range(200):
        tenant = f"t{number}"
        assert ledger.reserve(tenant, tenant, 0, number * 0.1) is None
        ledger.settle(tenant, 0)
    assert ledger.totals("open").open == 1
    assert ledger.reserve("owes", "again", 60, 20.0) is not None
    assert len(ledger._accounts) <= 12


def test_invalid_quotas_are_refused() -> None:
    """Limits below 1 and bursts without a limit raise an error."""
    for wrong in ({"requests_per_minute": 0}, {"tokens_per_minute": -1}, {"burst_tokens": 5}):
        with pytest.raises(ValueError, match=r"quota|burst"):
            Quota(**wrong)
    assert UNITS == 60 * 10**6


QUOTAS = st.builds(
    Quota,
    requests_per_minute=st.none() | st.integers(1, 20),
    tokens_per_minute=st.none() | st.integers(1, 2000),
)


def play(ledger: Ledger, move: tuple[str, str, int, int, float], now_s: float) -> object:
    """Apply one step to a ledger, and return its result."""
    kind, tenant, request, tokens, _ = move
    name = f"{tenant}{request}"
    if kind == "reserve":
        return ledger.reserve(tenant, name, tokens, now_s)
    if kind != "wait":
        (ledger.settle(name, tokens) if kind == "settle" else ledger.release(name))
    return None


@given(steps, st.lists(st.tuples(st.integers(0, 79), QUOTAS), max_size=4))
def test_a_quota_that_applies_for_no_time_changes_nothing(moves, changes) -> None:
    """A changed quota that returns at the same time has no effect on any later request."""
    quotas = {"a": QUOTA, "b": Quota(300, 300)}
    changed, plain = Ledger(quotas), Ledger(quotas)
    now_s = 0.0
    for index, move in enumerate(moves):
        now_s += move[-1]
        for at, other in changes:
            if at == index and None not in (other.requests_per_minute, other.tokens_per_minute):
                for changed.quotas in ({"a": other, "b": other}, quotas):
                    for tenant in "ab":
                        changed.reserve(tenant, "probe", 0, now_s)
                        changed.release("probe")
        assert play(changed, move, now_s) == play(plain, move, now_s)
        assert [changed.totals(one) for one in "abc"] == [plain.totals(one) for one in "abc"]


@given(steps, st.lists(st.tuples(st.integers(0, 79), st.sampled_from("abc"), QUOTAS), max_size=6))
def test_ledger_balances_when_quotas_come_and_go(moves, changes) -> None:
    """The sums agree when limits are added, changed or removed while requests are open."""
    ledger, now_s = Ledger({"a": QUOTA}), 0.0
    for index, move in enumerate(moves):
        now_s += move[-1]
        for at, tenant, quota in changes:
            if at == index:
                ledger.quotas = {tenant: quota}
        play(ledger, move, now_s)
        assert all(balances(ledger.totals(one)) for one in "abc")


@given(used=st.integers(1, 600), rate=st.integers(1, 5000), now_s=st.floats(0, 1e6))
def test_used_tokens_count_against_a_changed_quota(used: int, rate: int, now_s: float) -> None:
    """Right after a change, exactly the rest of the new quota is free."""
    ledger = Ledger({"a": Quota(tokens_per_minute=600)})
    assert ledger.reserve("a", "first", used, now_s) is None
    ledger.quotas = {"a": Quota(tokens_per_minute=rate)}
    rest = max(rate - used, 0)
    if rest < rate:
        shortage = ledger.reserve("a", "more", rest + 1, now_s)
        assert shortage is not None
    assert (ledger.reserve("a", "rest", rest, now_s) is None) == (used <= rate)


def test_removed_quota_no_longer_limits() -> None:
    """A tenant whose quota was removed is not short, and its open request settles."""
    ledger = Ledger({"a": Quota(tokens_per_minute=10)})
    assert ledger.reserve("a", "first", 10, 0.0) is None
    ledger.quotas = {}
    assert ledger.reserve("a", "second", 10_000, 0.0) is None
    ledger.settle("first", 4)
    assert ledger.totals("a") == Totals(10_010, 4, 6, 10_000)


def test_added_quota_ignores_earlier_requests() -> None:
    """A new limit is free at first, and open requests return nothing to it."""
    ledger = Ledger({})
    assert ledger.reserve("a", "before", 100, 0.0) is None
    ledger.quotas = {"a": Quota(tokens_per_minute=10)}
    assert ledger.reserve("a", "first", 10, 0.0) is None
    ledger.settle("before", 0)
    assert ledger.reserve("a", "second", 1, 0.0) is not None


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 40), st.integers(0, 9), st.integers(0, 20)),
        max_size=60,
    )
)
@example([(0, 0, 1, 0), (0, 1, 2, 0), (0, 1, 3, 0), (1, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 0)])
def test_usage_is_the_longest_backlog_of_any_reservation(moves) -> None:
    """The usage equals the formula of Reich over all reservations, however they end."""
    rate, ledger, now_s = 60, Ledger({"a": Quota(tokens_per_minute=60)}), 0
    reservations = []  # [second, tokens]
    for index, (wait_s, tokens, which, used) in enumerate(moves):
        now_s += wait_s
        name = str(index)
        if ledger.reserve("a", name, tokens, now_s) is None:
            reservations.append([name, now_s, tokens])
        open_reservations = [
            reservation for reservation in reservations if ledger.holds(reservation[0])
        ]
        if which < len(open_reservations):
            ended = open_reservations[which]
            ended[2] = min(used, ended[2])
            ledger.settle(ended[0], ended[2])
        backlogs = [
            sum(later for _, _, later in reservations[first:]) - rate // 60 * (now_s - begin_s)
            for first, (_, begin_s, _) in enumerate(reservations)
        ]
        ((_, usage),) = ledger.usage(now_s)
        assert usage[Limit.TOKENS] == max(0, *backlogs, 0)


def test_only_open_reservations_use_memory() -> None:
    """A bucket that is never empty has one entry more than the tenant has open reservations."""
    ledger = Ledger({"a": Quota(tokens_per_minute=60)})
    for index in range(1000):
        ledger.reserve("a", str(index), 7, index * 0.1)
        if index >= 3:
            ledger.settle(str(index - 3), 1)
        assert len(ledger._accounts["a"].buckets[Limit.TOKENS].numbers) <= 4
