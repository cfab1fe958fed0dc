"""When a hot prefix is copied, and to which worker."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from draftgate.policies.replication import (
    BYTES_PER_S,
    CopyBudget,
    PrefixHolder,
    ReplicaTarget,
    choose_target,
    is_cool,
    is_hot,
)

HOLDERS = st.lists(st.builds(PrefixHolder, st.integers(0, 64), st.integers(1, 64)), min_size=1)
TARGET = ReplicaTarget("w", 0, 8, 1 << 30)


@given(HOLDERS)
def test_prefix_is_never_hot_and_cool_at_once(holders: list[PrefixHolder]) -> None:
    """The two thresholds leave a gap, also just after a prefix got another holder of equal size."""
    if is_hot(holders):
        assert not is_cool(holders)
        sequences = min(holder.sequences for holder in holders)
        assert not is_cool([*holders, PrefixHolder(0, sequences)])


@given(HOLDERS)
def test_new_holder_without_requests_ends_the_heat(holders: list[PrefixHolder]) -> None:
    """A prefix is copied again only when its requests also fill half of the last copy."""
    assert not is_hot([*holders, PrefixHolder(0, 8)])
    assert is_hot([*holders, PrefixHolder(4, 8)]) == is_hot(holders)


def test_unknown_capacity_and_single_requests_are_never_hot() -> None:
    """A worker with an unknown capacity or a single request keeps its prefixes for itself."""
    assert not is_hot([PrefixHolder(100, 0)])
    assert not is_hot([PrefixHolder(1, 1)])
    assert is_hot([PrefixHolder(2, 2)])


@given(st.lists(st.tuples(st.integers(1, 10**9), st.floats(0.0, 5.0)), min_size=1, max_size=30))
def test_copies_take_a_bounded_bandwidth(copies: list[tuple[int, float]]) -> None:
    """All copies except the last fit into the bandwidth since the first copy began."""
    budget, now_s, begun = CopyBudget(), 0.0, []
    for num_bytes, pause_s in copies:
        now_s += pause_s
        if budget.allows(now_s):
            budget = budget.spent(num_bytes, now_s)
            begun.append((now_s, num_bytes))
    before = sum(num_bytes for _, num_bytes in begun[:-1])
    assert before <= BYTES_PER_S * (begun[-1][0] - begun[0][0]) * (1 + 1e-9)


def test_copy_goes_to_the_least_busy_worker_with_room() -> None:
    """A worker gets a copy only if it is less than half full, has twice the memory, and pulls
    faster than it computes."""
    busy = replace(TARGET, worker_id="busy", busy=3)
    idle = replace(TARGET, worker_id="idle", busy=1)
    assert choose_target([busy, idle], 1 << 20) == "idle"
    half = replace(TARGET, busy=4)
    small = replace(TARGET, free_bytes=(2 << 20) - 1)
    slow = replace(TARGET, pays=False)
    assert choose_target([half, small, slow], 1 << 20) is None
    assert choose_target([half, small, slow, busy], 1 << 20) == "busy"
    assert choose_target([], 1 << 20) is None
