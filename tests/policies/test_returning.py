"""Returning requests precede all other requests in the queue."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.policies.ordering.single import ReturningFirst
from draftgate.policies.protocols import OrderingPolicy
from draftgate.policies.registry import ordering_policy
from draftgate.policies.testing import check_ordering
from draftgate.policies.types import Ticket

SPECS = ("fair", "fcfs", "edf")


def returning_queue(spec: str) -> ReturningFirst:
    return ReturningFirst(partial(ordering_policy, spec))


@pytest.mark.parametrize("spec", SPECS)
def test_returning_queue_keeps_the_ordering_contract(spec: str) -> None:
    """The wrapper keeps the contract of `OrderingPolicy` and the name of the wrapped policy."""
    queue = returning_queue(spec)
    assert isinstance(queue, OrderingPolicy)
    assert queue.name == spec
    check_ordering(partial(returning_queue, spec))
    queue.push(Ticket(1, 0.0, 1.0, returning=True))
    with pytest.raises(ValueError, match="already waiting"):
        queue.push(Ticket(1, 0.0, 1.0, returning=True))


TICKETS = st.lists(
    st.tuples(st.integers(-2, 2), st.floats(0, 9), st.sampled_from("abc"), st.booleans()),
    max_size=30,
)


@given(st.sampled_from(SPECS), TICKETS)
def test_returning_requests_precede_all_others(spec: str, requests: list[tuple]) -> None:
    """Returning requests precede all others, and the policy orders them among themselves."""
    queue, returning, others = returning_queue(spec), ordering_policy(spec), ordering_policy(spec)
    for key, (priority, deadline_s, tenant, again) in enumerate(requests):
        ticket = Ticket(key, float(key), 50.0 + deadline_s, priority, tenant, 1.0, 0.1, again)
        queue.push(ticket)
        (returning if again else others).push(ticket)
    expected = [policy.take(40.0) for policy in (returning, others) for _ in range(len(policy))]
    assert [queue.take(40.0) for _ in requests] == expected


@given(st.sampled_from(SPECS), TICKETS)
def test_returning_work_is_ahead_of_new_requests(spec: str, requests: list[tuple]) -> None:
    """A returning request never waits for a new request."""
    queue = returning_queue(spec)
    for key, (priority, deadline_s, tenant, again) in enumerate(requests):
        queue.push(Ticket(key, float(key), deadline_s, priority, tenant, 1.0, 0.1, again))
    returning_s = 0.1 * sum(again for *_, again in requests)
    newcomer = Ticket(99, 99.0, 100.0)
    assert queue.ahead_s(newcomer, 99.0) >= returning_s - 1e-9
    assert queue.ahead_s(replace(newcomer, returning=True), 99.0) <= returning_s + 1e-9


def test_tenant_is_charged_once() -> None:
    """The queue charges a tenant when a request first starts, but not when the request returns."""
    queue = returning_queue("fair")
    queue.push(Ticket(0, 0.0, 9.0, tenant="a", work_s=5.0))
    queue.push(Ticket(1, 0.0, 9.0, tenant="b", work_s=5.0))
    queue.push(Ticket(2, 0.0, 9.0, tenant="c", work_s=9.0))
    first, second = queue.take(1.0), queue.take(1.0)
    assert (first.tenant, second.tenant) == ("a", "b")
    returning = replace(first, returning=True)
    queue.push(returning)
    assert queue.take(1.0) is returning
    for key, tenant in ((3, "b"), (4, "a")):
        queue.push(Ticket(key, 2.0, 9.0 if tenant == "b" else 8.9, tenant=tenant, work_s=1.0))
    assert [queue.take(2.0).tenant for _ in range(3)] == ["c", "a", "b"]
