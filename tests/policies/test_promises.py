"""Tests of announced calls, and of the order of workers for a session."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.policies.registry import routing_policy
from draftgate.policies.routing.preferences import Preferences, by_session
from draftgate.policies.routing.promises import MOST_PROMISES, Promises
from draftgate.policies.routing.types import Candidate, Candidates
from tests.policies.routing_workers import REQUEST, place, worker

SERVERS = {f"w-{number}": f"http://gpu-{number}:8000" for number in range(4)}
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "take", "look"]),
        st.sampled_from("abcde"),
        st.integers(0, 2),
        st.integers(1, 100),
        st.floats(0.1, 30.0),
    ),
    max_size=80,
)


def seen(promises: Promises, now_s: float, number: int = 3) -> list[tuple[int, int]]:
    workers = promises.add_to([worker(n) for n in range(number)], now_s)
    return [(one.promised_sequences, one.sent_tokens) for one in workers]


@given(STEPS)
def test_each_announced_call_counts_until_it_arrives_or_is_late(
    steps: list[tuple[str, str, int, int, float]],
) -> None:
    """The load of a worker has exactly the announced calls that are neither taken nor late."""
    promises, now_s = Promises(), 0.0
    expected: dict[str, tuple[int, int, float]] = {}
    for action, session, number, tokens, seconds in steps:
        if action == "put":
            promises.put(session, f"w-{number}", tokens, now_s + seconds)
            expected[session] = number, tokens, now_s + seconds
        elif action == "take":
            promises.take(session)
            expected.pop(session, None)
        now_s += seconds / 4
        open_ = [call for call in expected.values() if call[2] > now_s]
        assert seen(promises, now_s) == [
            (
                sum(call[0] == n for call in open_),
                sum(call[1] for call in open_ if call[0] == n),
            )
            for n in range(3)
        ]
        assert len(promises._ends) <= 2 * max(len(expected), 1) + 1


def test_number_of_announced_calls_is_bounded() -> None:
    """Further announcements are ignored, and the calls of one session count once."""
    promises = Promises()
    for number in range(MOST_PROMISES + 10):
        promises.put(f"s-{number}", "w-0", 1, 10.0)
    assert seen(promises, 0.0, 1) == [(MOST_PROMISES, MOST_PROMISES)]
    assert seen(promises, 10.0, 1) == [(0, 0)]
    for _ in range(100):
        promises.put("s", "w-0", 1, 20.0)
    assert seen(promises, 10.0, 1) == [(1, 1)]
    assert len(promises._ends) < 5


@pytest.mark.parametrize("spec", ["least_cost", "least_loaded"])
def test_new_requests_avoid_a_worker_that_expects_calls(spec: str) -> None:
    """A worker whose sessions are back soon is not as good as an idle one."""
    promises = Promises()
    promises.put("s", "w-0", 1000, 5.0)
    workers = [worker(0), worker(1)]
    for now_s, expected in ((0.0, 1), (4.9, 1), (5.0, 0)):
        found = Candidates(promises.add_to(workers, now_s))
        assert place(routing_policy(spec), found) == expected


def chosen(session: str, workers: list[Candidate], spec: str = "least_cost") -> str:
    """Return the worker that a new gateway chooses for the first request of a session."""
    policy = routing_policy(spec)
    policy.placed(REQUEST, workers[len(session) % len(workers)])  # it has its own turns
    request = replace(REQUEST, session=session)
    found = Candidates(by_session(request, workers, SERVERS))
    return found.workers[place(policy, found, request)].worker_id


@pytest.mark.parametrize("spec", ["least_cost", "least_loaded", "prefix_affinity"])
def test_gateways_agree_on_the_first_worker_of_a_session(spec: str) -> None:
    """Each session has one of several equal workers, whatever the order of workers and their
    turns, and the sessions of a worker that leaves are divided among the others."""
    workers = [worker(number) for number in range(4)]
    first = {str(n): chosen(str(n), workers, spec) for n in range(200)}
    again = {name: chosen(f"{name}", workers[::-1], spec) for name in first}
    assert again == first
    assert min(Counter(first.values()).values()) > 30
    fewer = {name: chosen(name, workers[:3], spec) for name in first}
    moved = {name for name in first if fewer[name] != first[name]}
    assert moved == {name for name in first if first[name] == "w-3"}


def test_busy_worker_does_not_get_a_session_by_its_order() -> None:
    """The order decides only among workers with equal estimates."""
    for number in range(20):
        workers = [worker(0, running=9), worker(1)]
        assert chosen(str(number), workers) == "w-1"


def test_sessions_follow_the_weights() -> None:
    """Two gateways place the sessions alike, in proportion to the weights."""
    workers = [worker(0), worker(1)]
    found = []
    for _ in range(2):
        preferences = Preferences({"w-0": 3.0, "w-1": 1.0})
        counts = Counter[str]()
        for number in range(2000):
            request = replace(REQUEST, session=f"s-{number}")
            (first,) = preferences.preferred(request, workers, SERVERS)
            counts[first.worker_id] += 1
        found.append(counts)
        preferences.placed(REQUEST, "w-0")
    assert found[0] == found[1]
    assert found[0]["w-0"] / 2000 == pytest.approx(0.75, abs=0.03)
