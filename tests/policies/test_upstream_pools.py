"""The choice between replicas that draft and plain ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from draftgate.policies.registry import speculation_policy
from draftgate.policies.speculation.upstream_speculation import (
    PoolState,
    ReplicaPool,
    choose_pool,
    draft_means,
    drafts_pay,
    expected_accepted,
)
from draftgate.policies.types import RequestView, SpeculationMode, WorkerLoad, WorkerSpeed

REQUEST = RequestView(100, 50, 0.0)
AUTO = speculation_policy("auto")
DRAFTING = WorkerLoad(8, 0, 0, 0, 0.1, 0.7, ("upstream",), draft_tokens=4.0)
PLAIN = WorkerLoad(8, 0, 0, 0, 0.0, 0.0, ())


def chosen(
    request: RequestView = REQUEST,
    policy: str = "auto",
    *,
    price: float = 0.1,
    rooms: tuple[bool, bool] = (True, True),
    plain: WorkerLoad = PLAIN,
    drafting: WorkerLoad = DRAFTING,
):
    """Return the choice; `rooms` says which pools have capacity, the speculating one first."""
    offer = PoolState(structs.replace(drafting, price=price), rooms[0])
    return choose_pool(request, speculation_policy(policy), offer, PoolState(plain, rooms[1]))


@pytest.mark.parametrize("rooms", [(True, True), (False, True)])
def test_request_without_drafts_goes_to_a_plain_replica(rooms: tuple[bool, bool]) -> None:
    """A plain replica with capacity is used, however well drafts pay."""
    for request in (
        replace(REQUEST, mode=SpeculationMode.OFF),
        replace(REQUEST, max_draft_tokens=0),
        replace(REQUEST, max_draft_tokens=3),  # the engine always drafts four
    ):
        choice = chosen(request, rooms=rooms)
        assert choice.pool is ReplicaPool.PLAIN
        assert (choice.plan.proposer, choice.plan.max_draft_tokens) == (None, 0)
        assert "asked for" in choice.plan.reason
    assert chosen(policy="off", rooms=rooms).pool is ReplicaPool.PLAIN
    named = chosen(replace(REQUEST, mode=SpeculationMode.NGRAM), rooms=rooms)
    assert named.pool is ReplicaPool.PLAIN
    assert "no proposer 'ngram'" in named.plan.reason


def test_drafting_replica_is_chosen_below_the_break_even_price() -> None:
    """Above that price, a plain replica is chosen."""
    means = draft_means(DRAFTING)
    even = means.accepted / means.drafted
    paid, unpaid = chosen(price=even * 0.99), chosen(price=even * 1.01)
    assert paid.pool is ReplicaPool.SPECULATING
    assert paid.plan.proposer == "upstream"
    assert paid.plan.price == even * 0.99
    assert "drafts pay: 1.77 of 4" in paid.plan.reason
    assert unpaid.pool is ReplicaPool.PLAIN
    assert unpaid.plan.proposer is None
    assert "drafts do not pay" in unpaid.plan.reason


def test_long_enough_cap_allows_drafts() -> None:
    """Drafting is allowed if the client's cap covers the usual length."""
    assert chosen(replace(REQUEST, max_draft_tokens=4)).pool is ReplicaPool.SPECULATING


def test_policies_without_a_price_always_speculate() -> None:
    """With `fixed:K` the operator has already decided."""
    assert chosen(policy="fixed:3", price=0.99).pool is ReplicaPool.SPECULATING
    assert chosen(policy="smartspec", price=0.99).pool is ReplicaPool.SPECULATING


def test_request_without_drafts_does_not_wait_for_a_plain_replica() -> None:
    """If only a drafting replica has capacity, it is used, and the reason says so."""
    choice = chosen(replace(REQUEST, mode=SpeculationMode.OFF), rooms=(True, False))
    assert (choice.pool, choice.plan.proposer) == (ReplicaPool.SPECULATING, None)
    assert "only speculating replicas have capacity" in choice.plan.reason


@pytest.mark.parametrize(
    ("price", "rooms", "pool", "word"),
    [
        (0.1, (False, True), ReplicaPool.PLAIN, "only plain replicas have capacity"),
        (0.9, (True, False), ReplicaPool.SPECULATING, "only speculating replicas have capacity"),
        (0.1, (False, False), None, "the first replica with capacity"),
        (0.9, (False, False), None, "the first replica with capacity"),
    ],
)
def test_capacity_decides_before_price(
    price: float, rooms: tuple[bool, bool], pool: ReplicaPool | None, word: str
) -> None:
    """No request waits for one kind of replica while the other is free."""
    choice = chosen(price=price, rooms=rooms)
    assert choice.pool is pool
    assert word in choice.plan.reason


def test_known_token_times_decide() -> None:
    """A drafting replica loses to an idle plain one even if its drafts pay."""
    idle = structs.replace(PLAIN, running=0, speed=WorkerSpeed(tpot_s=0.02, sequence_s=0.0001))
    busy = structs.replace(PLAIN, running=90, speed=WorkerSpeed(tpot_s=0.03, sequence_s=0.0001))
    fast = structs.replace(DRAFTING, running=9, speed=WorkerSpeed(tpot_s=0.022, sequence_s=0.001))
    choice = chosen(plain=idle, drafting=fast)
    assert choice.pool is ReplicaPool.PLAIN
    assert "a token costs 32 ms in all with drafts, 20.1 ms without" in choice.plan.reason
    assert chosen(plain=busy, drafting=fast, price=0.9).pool is ReplicaPool.SPECULATING


class _Replica:
    """An engine whose steps take a + c x tokens, with or without drafts."""

    def __init__(self, fixed_s: float, token_s: float, drafted: float, accepted: float) -> None:
        self.fixed_s, self.token_s = fixed_s, token_s
        self.drafted, self.accepted = drafted, accepted
        self.running = 0

    def tpot_s(self, running: int) -> float:
        step_s = self.fixed_s + self.token_s * running * (1 + self.drafted)
        return step_s / (1 + self.accepted)

    def rate(self, running: int) -> float:
        return running / self.tpot_s(running)

    def load(self) -> WorkerLoad:
        slope_s = self.token_s * (1 + self.drafted) / (1 + self.accepted)
        tpot_s = self.tpot_s(self.running)
        base = DRAFTING if self.drafted else PLAIN
        return structs.replace(base, running=self.running, speed=WorkerSpeed(tpot_s, 0.0, slope_s))


@settings(max_examples=25)
@given(
    st.integers(1, 300),
    st.floats(0.3, 0.95),
    st.integers(1, 8),
    st.floats(10.0, 500.0),
    st.randoms(use_true_random=False),
)
def test_split_between_replicas_is_nearly_optimal(
    clients: int, chance: float, drafted: int, knee_tokens: float, draw
) -> None:
    """With one replica of each kind, throughput is near the best split.

    It is within 5%, or 10% for few clients, and never below that of one pool.
    """
    token_s = 0.02 / knee_tokens
    fast = _Replica(0.02, token_s, drafted, expected_accepted(chance, drafted))
    slow = _Replica(0.02, token_s, 0.0, 0.0)
    for _ in range(3 * clients):
        if fast.running + slow.running == clients:  # one request ends and another starts
            gone = fast if draw.random() * clients < fast.running else slow
            gone.running -= 1
        offers = (PoolState(one.load(), has_capacity=True) for one in (fast, slow))
        choice = choose_pool(REQUEST, AUTO, *offers)
        (slow if choice.pool is ReplicaPool.PLAIN else fast).running += 1
    got = fast.rate(fast.running) + slow.rate(slow.running)
    rates = [fast.rate(there) + slow.rate(clients - there) for there in range(clients + 1)]
    assert got >= (0.95 if clients >= 20 else 0.9) * max(rates)
    assert got >= 0.999 * max(rates[0], rates[-1])


@given(
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.floats(1.0, 16.0),
    st.sampled_from(list(SpeculationMode)),
    st.one_of(st.none(), st.integers(0, 20)),
    st.tuples(st.booleans(), st.booleans()),
)
def test_plan_and_pool_agree(
    price: float,
    acceptance: float,
    drafted: float,
    mode: SpeculationMode,
    cap: int | None,
    rooms: tuple[bool, bool],
) -> None:
    """Plain replicas get no draft plan, and with free capacity the better pool is chosen."""
    request = replace(REQUEST, mode=mode, max_draft_tokens=cap)
    load = structs.replace(DRAFTING, acceptance=acceptance, draft_tokens=drafted)
    choice = chosen(request, price=price, rooms=rooms, drafting=load)
    assert choice.plan.mode is mode
    if choice.pool is ReplicaPool.PLAIN:
        assert choice.plan.proposer is None
    willing = mode is SpeculationMode.AUTO and (cap is None or cap >= drafted)
    speculates = willing and drafts_pay(price, draft_means(load))
    if all(rooms):
        assert choice.pool is (ReplicaPool.SPECULATING if speculates else ReplicaPool.PLAIN)
    elif any(rooms):
        assert choice.pool is (ReplicaPool.SPECULATING if rooms[0] else ReplicaPool.PLAIN)
    else:
        assert choice.pool is None
