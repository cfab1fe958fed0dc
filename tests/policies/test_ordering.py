"""Queue order: classes, shares, deadlines and starvation."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftgate.policies.ordering.fair import LAG_S, Fair
from draftgate.policies.ordering.prefix_sum_queue import PIECE, PrefixSumQueue
from draftgate.policies.protocols import OrderingPolicy
from draftgate.policies.registry import ordering_policy
from draftgate.policies.testing import check_ordering
from draftgate.policies.types import Ticket

PATIENT = 1e9  # no request is overdue


def ticket(key: int, deadline_s: float = 0.0, **others) -> Ticket:
    return Ticket(key, float(key), deadline_s, **others)


def jain(values: list[float]) -> float:
    """Return Jain's fairness index (Jain, Chiu, Hawe, 1984), from 1 / n to 1 for equal values."""
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


@pytest.mark.parametrize("spec", ["fair", "fcfs", "edf"])
def test_shipped_policy_keeps_its_contract(spec: str) -> None:
    """Every shipped policy is found by its name and keeps the contract of `OrderingPolicy`."""
    policy = ordering_policy(spec)
    assert isinstance(policy, OrderingPolicy)
    assert policy.name == spec
    assert ordering_policy(spec) is not policy
    check_ordering(lambda: ordering_policy(spec))
    with pytest.raises(ValueError, match="takes no argument"):
        ordering_policy(f"{spec}:3")


def test_unknown_policy_error_lists_the_known_policies() -> None:
    """The error lists the shipped policies."""
    with pytest.raises(ValueError, match="edf, fair, fcfs"):
        ordering_policy("lottery")


@pytest.mark.parametrize("spec", ["fair", "fcfs", "edf"])
def test_duplicate_key_is_refused(spec: str) -> None:
    """The queue rejects the key of a request that already waits."""
    queue = ordering_policy(spec)
    queue.push(ticket(1))
    with pytest.raises(ValueError, match="already waiting"):
        queue.push(ticket(1))


@given(st.lists(st.tuples(st.floats(0, 10), st.booleans()), max_size=4 * PIECE))
@settings(max_examples=30)
def test_prefix_sum_queue_is_sorted_and_sums_up(moves) -> None:
    """The queue keeps its order and the work before each place after any changes."""
    line, there = PrefixSumQueue(), {}
    for key, (at_s, leaves) in enumerate(moves):
        line.insert((at_s, key), at_s)
        there[(at_s, key)] = at_s
        if leaves:
            victim = sorted(there)[len(there) // 2]
            line.remove(victim)
            del there[victim]
    assert len(line) == len(there)
    assert line.work_s == pytest.approx(sum(there.values()))
    if there:
        assert line.first() == min(there)
    for place in (*list(there)[:5], (5.0, -1), (11.0, 0)):
        before = sum(work_s for other, work_s in there.items() if other < place)
        assert line.work_before(place) == pytest.approx(before)


@pytest.mark.parametrize("seed", range(3))
def test_prefix_sum_queue_of_several_pieces_sums_up(seed) -> None:
    """A queue of several pieces stays sorted and keeps its sums."""
    rng, line = random.Random(seed), PrefixSumQueue()
    places = [(rng.random(), key) for key in range(10 * PIECE)]
    for place in places:
        line.insert(place, place[0])
    for place in places[::3]:
        line.remove(place)
    rest = sorted(set(places) - set(places[::3]))
    for index in range(0, len(rest), 97):
        assert line.work_before(rest[index]) == pytest.approx(sum(at for at, _ in rest[:index]))
    assert line.first() == rest[0]


@given(
    st.lists(st.tuples(st.integers(-2, 2), st.floats(0, 9), st.sampled_from("abc")), max_size=40)
)
def test_better_classes_are_first(requests) -> None:
    """A class precedes all worse classes when no request is overdue or pressing."""
    queue = Fair(PATIENT)
    for key, (priority, deadline_s, tenant) in enumerate(requests):
        queue.push(ticket(key, 200.0 + deadline_s, priority=priority, tenant=tenant, work_s=0.1))
    taken = [queue.take(100.0).priority for _ in requests]
    assert taken == sorted(taken)


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 1)), max_size=40))
def test_requests_of_a_tenant_are_taken_by_deadline(requests) -> None:
    """The queue takes requests of a tenant and class by deadline, then by arrival."""
    queue = Fair(PATIENT)
    for key, (deadline_s, work_s) in enumerate(requests):
        queue.push(ticket(key, deadline_s, work_s=work_s))
    taken = [queue.take(100.0) for _ in requests]
    assert taken == sorted(taken, key=lambda one: (one.deadline_s, one.key))


@given(
    st.lists(st.sampled_from([0.5, 1.0, 1.0, 2.0, 4.0]), min_size=2, max_size=6),
    st.integers(0, 10**6),
    st.booleans(),
)
@settings(max_examples=25)
def test_waiting_tenants_are_served_by_their_shares(shares, seed, early) -> None:
    """Jain's index of work per share is at least 0.98 for tenants that always wait.

    Sizes vary a hundredfold, one tenant floods the queue, and some deadlines are earlier.
    """
    queue, served, key, rng = Fair(PATIENT), [0.0] * len(shares), 0, random.Random(seed)

    def push(tenant: int) -> None:
        nonlocal key
        key += 1
        deadline_s = key - 1e6 * tenant if early else rng.random()
        work_s = 10 ** rng.uniform(-2.5, -0.5)
        queue.push(ticket(key, deadline_s, tenant=str(tenant), share=shares[tenant], work_s=work_s))

    order = [tenant for tenant in range(len(shares)) for _ in range(5)] + [0] * 50
    rng.shuffle(order)
    for tenant in order:
        push(tenant)
    while sum(served) < 30 * LAG_S * sum(shares):
        taken = queue.take(0.0)
        served[int(taken.tenant)] += taken.work_s
        push(int(taken.tenant))
    assert jain([work_s / share for work_s, share in zip(served, shares, strict=True)]) >= 0.98
    fair = [work_s / share for work_s, share in zip(served, shares, strict=True)]
    assert max(fair) - min(fair) <= LAG_S + 2 * 10**-0.5 / min(shares)


def test_absent_tenant_gains_no_credit() -> None:
    """A tenant that arrives late receives its share from that time on, without the missed
    service."""
    queue = Fair(PATIENT)
    for key in range(1000):
        queue.push(ticket(key, tenant="flood", work_s=0.1))
    for _ in range(500):
        queue.take(0.0)
    for key in range(1000, 1500):
        queue.push(ticket(key, deadline_s=-1.0, tenant="new", work_s=0.1))
    tenants = [queue.take(0.0).tenant for _ in range(200)]
    assert 100 - 10 * LAG_S <= tenants.count("flood") <= 100 + 10 * LAG_S


def test_returning_tenant_pays_for_its_last_request() -> None:
    """A tenant with only one waiting request at a time still receives exactly its share."""
    queue, key = Fair(PATIENT), 1000
    for old in range(500):
        queue.push(ticket(old, deadline_s=1e6, tenant="patient", work_s=0.1))
    queue.push(ticket(key, tenant="eager", work_s=0.5))
    served = {"patient": 0.0, "eager": 0.0}
    for _ in range(300):
        taken = queue.take(0.0)
        served[taken.tenant] += taken.work_s
        if taken.tenant == "eager":
            key += 1
            queue.push(ticket(key, tenant="eager", work_s=0.5))
    assert served["eager"] == pytest.approx(served["patient"], abs=LAG_S + 1.0)


@given(
    st.lists(
        st.tuples(st.integers(-1, 2), st.integers(0, 40), st.sampled_from("ab"), st.booleans()),
        min_size=1,
        max_size=120,
    ),
    st.integers(2, 5),
)
def test_overdue_request_is_taken_within_its_bound(moves, every) -> None:
    """The r-th oldest overdue request is among the next `every` x r requests."""
    queue, now_s, starvation_s = Fair(20.0, every), 0.0, 20.0
    waiting, due = {}, {}
    for key, (priority, deadline_s, tenant, takes) in enumerate(moves * 3):
        now_s += 1.0
        late = Ticket(key, now_s, now_s + deadline_s, priority, tenant, 1.0, 0.1)
        queue.push(late)
        waiting[key] = late
        for place, (other, one) in enumerate(sorted(waiting.items()), start=1):
            if other not in due and now_s - one.arrived_s > starvation_s:
                due[other] = every * place
        for _ in range(takes * 2 if key % 3 else 0):
            if not waiting:
                break
            taken = queue.take(now_s)
            del waiting[taken.key]
            for other in due:
                due[other] -= 1
            assert due.pop(taken.key, 0) >= 0
            assert all(left > 0 for left in due.values())


def test_overdue_bulk_gets_one_request_in_four() -> None:
    """The better class still receives three of four turns when bulk requests are overdue."""
    queue = Fair()
    for key in range(400):
        queue.push(ticket(key, priority=5, tenant="bulk", work_s=0.1))
    for key in range(400, 800):
        queue.push(Ticket(key, 1000.0, 1001.0, 0, "people", 1.0, 0.1))
    taken = [queue.take(1000.0).tenant for _ in range(400)]
    assert taken.count("bulk") == 100


@given(st.integers(1, 40), st.integers(2, 5))
def test_pressing_class_gets_one_request_in_four(bulk, every) -> None:
    """A class with half of its time elapsed receives one of `every` turns under endless better
    traffic."""
    queue, key = Fair(PATIENT, every), 0
    for key in range(bulk):
        queue.push(Ticket(key, 0.0, 100.0, 1, "bulk", 1.0, 0.1))
    taken = []
    for now_s in (49.0, 51.0):
        for _ in range(every * bulk):
            key += 1
            queue.push(Ticket(key, now_s, now_s + 100.0, 0, "people", 1.0, 0.1))
            taken.append(queue.take(now_s).priority)
    assert sum(taken[: every * bulk]) == 0
    assert sum(taken) == bulk


@given(
    st.lists(st.tuples(st.floats(0, 9), st.floats(0, 1), st.sampled_from("abcd")), max_size=40),
    st.floats(0, 9),
    st.floats(0, 1),
    st.sampled_from("abcd"),
    st.sampled_from(["fair", "fcfs", "edf"]),
)
def test_work_ahead_never_shrinks_as_others_join(
    requests, deadline_s, work_s, tenant, spec
) -> None:
    """A new request never reduces the work ahead of another request."""
    queue, last_s = ordering_policy(spec), 0.0
    newcomer = Ticket(10**6, 100.0, deadline_s, 0, tenant, 1.0, work_s)
    for key, (at_s, size_s, other) in enumerate(requests):
        queue.push(ticket(key, at_s, tenant=other, work_s=size_s))
        ahead_s = queue.ahead_s(newcomer, 100.0)
        assert ahead_s >= last_s - 1e-9
        assert ahead_s <= queue.work_s + 1e-9
        last_s = ahead_s


def test_flood_delays_another_tenants_first_request_by_at_most_a_lag() -> None:
    """Only a lag and the tenant's own work are ahead, regardless of the flood."""
    queue = Fair()
    for key in range(1000):
        queue.push(ticket(key, tenant="flood", work_s=0.1))
    newcomer = ticket(2000, deadline_s=1e9, tenant="other", work_s=0.1)
    assert queue.ahead_s(newcomer, 0.0) <= LAG_S + 0.1 + 1e-9
    queue.push(newcomer)
    served_s = 0.0
    while (taken := queue.take(0.0)).key != 2000:
        served_s += taken.work_s
    assert served_s <= LAG_S + 0.2


def test_pressing_requests_count_as_ahead_of_better_classes() -> None:
    """Pressing work of worse classes adds at most a third of the better class's own queue."""
    queue = Fair()
    for key in range(30):
        queue.push(ticket(key, deadline_s=2000.0, work_s=0.1))
    newcomer = Ticket(100, 30.0, 2000.0, 0, "", 1.0, 0.1)
    assert queue.ahead_s(newcomer, 30.0) == pytest.approx(3.0)
    for key in range(30, 50):
        queue.push(Ticket(key, 29.0, 31.0, 1, "", 1.0, 0.1))
    assert queue.ahead_s(newcomer, 30.0) == pytest.approx(4.0)
    assert queue.class_ahead_s(newcomer) == pytest.approx(3.0)


def test_work_ahead_of_baselines_is_exact() -> None:
    """The work ahead for `fcfs` and `edf` is exactly the work of the requests taken before."""
    for spec in ("fcfs", "edf"):
        queue, rng = ordering_policy(spec), random.Random(5)
        for key in range(100):
            queue.push(ticket(key, rng.random(), work_s=rng.random()))
        newcomer = ticket(50_000, 0.5, work_s=1.0)
        ahead_s, served_s = queue.ahead_s(newcomer, 0.0), 0.0
        queue.push(newcomer)
        while (taken := queue.take(0.0)) != newcomer:
            served_s += taken.work_s
        assert served_s == pytest.approx(ahead_s)


def test_memory_of_absent_tenants_is_bounded() -> None:
    """Memory stays bounded when many tenants arrive once while another tenant always waits."""
    queue = Fair(PATIENT)
    queue.push(ticket(0, deadline_s=1e9, priority=0, tenant="always", work_s=0.0))
    for key in range(1, 12_000):
        queue.push(ticket(key, tenant=f"t{key}", work_s=0.1))
        queue.remove(key) if key % 2 else queue.take(0.0)
    assert all(len(one._absent_starts) <= 4096 for one in queue._classes.values())
