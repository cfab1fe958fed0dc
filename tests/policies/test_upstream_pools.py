"""The choice between replicas with and without speculation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from draftgate.policies.registry import speculation_policy
from draftgate.policies.speculation.upstream_speculation import (
    ReplicaPool,
    UpstreamPoolState,
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


def choose(
    request: RequestView = REQUEST,
    policy: str = "auto",
    *,
    price: float = 0.1,
    capacity: tuple[bool, bool] = (True, True),
    plain: WorkerLoad = PLAIN,
    drafting: WorkerLoad = DRAFTING,
):
    """Return the choice between a speculating and a plain pool with these capacities."""
    offer = UpstreamPoolState(structs.replace(drafting, price=price), capacity[0])
    return choose_pool(
        request, speculation_policy(policy), offer, UpstreamPoolState(plain, capacity[1])
    )


@pytest.mark.parametrize("capacity", [(True, True), (False, True)])
def test_request_without_drafts_goes_to_a_plain_replica(capacity: tuple[bool, bool]) -> None:
    """A request without drafts uses a plain replica with capacity, regardless of the gain of
    drafts."""
    for request in (
        replace(REQUEST, mode=SpeculationMode.OFF),
        replace(REQUEST, max_draft_tokens=0),
        replace(REQUEST, max_draft_tokens=3),  # the engine always drafts four
    ):
        choice = choose(request, capacity=capacity)
        assert choice.pool is ReplicaPool.PLAIN
        assert (choice.plan.proposer, choice.plan.max_draft_tokens) == (None, 0)
        assert "asked for" in choice.plan.reason
    assert choose(policy="off", capacity=capacity).pool is ReplicaPool.PLAIN
    named = choose(replace(REQUEST, mode=SpeculationMode.NGRAM), capacity=capacity)
    assert named.pool is ReplicaPool.PLAIN
    assert "no proposer 'ngram'" in named.plan.reason


def test_drafting_replica_is_chosen_below_the_break_even_price() -> None:
    """A drafting replica is chosen below the break-even price, and a plain replica above that
    price."""
    means = draft_means(DRAFTING)
    even = means.accepted / means.drafted
    paid, unpaid = choose(price=even * 0.99), choose(price=even * 1.01)
    assert paid.pool is ReplicaPool.SPECULATING
    assert paid.plan.proposer == "upstream"
    assert paid.plan.price == even * 0.99
    assert "drafts pay: 1.77 of 4" in paid.plan.reason
    assert unpaid.pool is ReplicaPool.PLAIN
    assert unpaid.plan.proposer is None
    assert "drafts do not pay" in unpaid.plan.reason


def test_long_enough_cap_allows_drafts() -> None:
    """The policy allows drafts if the client's cap covers the usual length."""
    assert choose(replace(REQUEST, max_draft_tokens=4)).pool is ReplicaPool.SPECULATING


def test_policies_without_a_price_always_speculate() -> None:
    """`fixed:K` always chooses the drafting replica."""
    assert choose(policy="fixed:3", price=0.99).pool is ReplicaPool.SPECULATING
    assert choose(policy="smartspec", price=0.99).pool is ReplicaPool.SPECULATING


def test_request_without_drafts_does_not_wait_for_a_plain_replica() -> None:
    """A request without drafts uses a drafting replica if no plain replica has capacity."""
    choice = choose(replace(REQUEST, mode=SpeculationMode.OFF), capacity=(True, False))
    assert (choice.pool, choice.plan.proposer) == (ReplicaPool.SPECULATING, None)
    assert "only speculating replicas have capacity" in choice.plan.reason


@pytest.mark.parametrize(
    ("price", "capacity", "pool", "word"),
    [
        (0.1, (False, True), ReplicaPool.PLAIN, "only plain replicas have capacity"),
        (0.9, (True, False), ReplicaPool.SPECULATING, "only speculating replicas have capacity"),
        (0.1, (False, False), None, "the first replica with capacity"),
        (0.9, (False, False), None, "the first replica with capacity"),
    ],
)
def test_capacity_decides_before_price(
    price: float, capacity: tuple[bool, bool], pool: ReplicaPool | None, word: str
) -> None:
    """No request waits for a kind of replica while the other kind is free."""
    choice = choose(price=price, capacity=capacity)
    assert choice.pool is pool
    assert word in choice.plan.reason


def test_known_token_times_decide() -> None:
    """An idle plain replica wins against a drafting replica even if drafts pay."""
    idle = structs.replace(PLAIN, running=0, speed=WorkerSpeed(tpot_s=0.02, sequence_s=0.0001))
    busy = structs.replace(PLAIN, running=90, speed=WorkerSpeed(tpot_s=0.03, sequence_s=0.0001))
    fast = structs.replace(DRAFTING, running=9, speed=WorkerSpeed(tpot_s=0.022, sequence_s=0.001))
    choice = choose(plain=idle, drafting=fast)
    assert choice.pool is ReplicaPool.PLAIN
    assert "a token costs 32 ms in all with drafts, 20.1 ms without" in choice.plan.reason
    assert choose(plain=busy, drafting=fast, price=0.9).pool is ReplicaPool.SPECULATING


class _Replica:
    """An engine whose steps take `fixed_s` plus `token_s` per token, with or without drafts."""

    def __init__(self, fixed_s: float, token_s: float, drafted: float, chance: float) -> None:
        self.fixed_s, self.token_s = fixed_s, token_s
        self.drafted, self.chance = drafted, chance
        self.accepted = expected_accepted(chance, drafted)
        self.running = 0

    def tpot_s(self, running: int) -> float:
        step_s = self.fixed_s + self.token_s * running * (1 + self.drafted)
        return step_s / (1 + self.accepted)

    def rate(self, running: int) -> float:
        return running / self.tpot_s(running)

    def load(self, *, known: bool = True) -> WorkerLoad:
        """Return the load, without a speed if no stream has shown it."""
        slope_s = self.token_s * (1 + self.drafted) / (1 + self.accepted)
        tpot_s = self.tpot_s(self.running)
        drafts = {"draft_tokens": float(self.drafted), "acceptance": self.chance}
        base = structs.replace(DRAFTING, **drafts) if self.drafted else PLAIN
        speed = WorkerSpeed(tpot_s, 0.0, slope_s) if known else WorkerSpeed()
        return structs.replace(base, running=self.running, speed=speed)


@settings(max_examples=25)
@given(
    st.integers(1, 300),
    st.floats(0.3, 0.95),
    st.integers(1, 8),
    st.floats(10.0, 500.0),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_split_between_replicas_is_nearly_optimal(
    clients: int, chance: float, drafted: int, knee_tokens: float, known: bool, draw
) -> None:
    """The throughput of one replica of each kind is close to that of the best split.

    The throughput is within 7%, or 10% for few clients. It is at most 0.5% below that of one pool.
    This also holds while the speed of the plain replica is unknown.
    """
    token_s = 0.02 / knee_tokens
    fast = _Replica(0.02, token_s, drafted, chance)
    slow = _Replica(0.02, token_s, 0.0, 0.0)
    for _ in range(3 * clients):
        if fast.running + slow.running == clients:  # one request ends and another starts
            gone = fast if draw.random() * clients < fast.running else slow
            gone.running -= 1
        loads = fast.load(), slow.load(known=known)
        offers = (UpstreamPoolState(load, has_capacity=True) for load in loads)
        choice = choose_pool(REQUEST, AUTO, *offers)
        (slow if choice.pool is ReplicaPool.PLAIN else fast).running += 1
    got = fast.rate(fast.running) + slow.rate(slow.running)
    rates = [
        fast.rate(drafting_clients) + slow.rate(clients - drafting_clients)
        for drafting_clients in range(clients + 1)
    ]
    assert got >= (0.93 if clients >= 20 else 0.9) * max(rates)
    assert got >= 0.995 * max(rates[0], rates[-1])


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
    capacity: tuple[bool, bool],
) -> None:
    """Plain replicas receive no draft plan, and the better pool is chosen when both have
    capacity."""
    request = replace(REQUEST, mode=mode, max_draft_tokens=cap)
    load = structs.replace(DRAFTING, acceptance=acceptance, draft_tokens=drafted)
    choice = choose(request, price=price, capacity=capacity, drafting=load)
    assert choice.plan.mode is mode
    if choice.pool is ReplicaPool.PLAIN:
        assert choice.plan.proposer is None
    willing = mode is SpeculationMode.AUTO and (cap is None or cap >= drafted)
    speculates = willing and drafts_pay(price, draft_means(load))
    if all(capacity):
        assert choice.pool is (ReplicaPool.SPECULATING if speculates else ReplicaPool.PLAIN)
    elif any(capacity):
        assert choice.pool is (ReplicaPool.SPECULATING if capacity[0] else ReplicaPool.PLAIN)
    else:
        assert choice.pool is None
