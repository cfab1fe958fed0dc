"""Routing by cached prompt prefixes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from draftgate.policies.registry import routing_policy
from draftgate.policies.routing.placement_history import STRIDE, PlacementHistory
from draftgate.policies.routing.scoring import OVERLOAD
from draftgate.policies.routing.types import Candidates
from tests.policies.routing_workers import (
    chain,
    place,
    prompt,
    worker,
    workers_with_tokens,
)


def test_prefix_affinity_follows_the_prompt_until_overload() -> None:
    """A prefix returns to its worker until that worker is overloaded."""
    policy = routing_policy("prefix_affinity")
    assert policy.reads_prompts

    def chosen(sent_tokens: int, cached_tokens: int) -> int:
        holder = replace(worker(1, sent_tokens), cached_tokens=cached_tokens)
        return place(policy, Candidates((worker(0), holder, worker(2))), prompt("a", 100))

    assert chosen(900, 1024) == 1
    assert chosen(900, 0) != 1
    assert chosen(int(3 * OVERLOAD * 2000) + 1, 1024) != 1


def test_prefix_affinity_without_hashes_is_least_loaded() -> None:
    """The policy chooses by tokens when a request has no hashes."""
    policy = routing_policy("prefix_affinity")
    assert [place(policy, workers_with_tokens(9, 4, 7)) for _ in range(3)] == [1, 1, 1]


CHAINS = st.lists(
    st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("xyz"), st.integers(0, 200)), max_size=40
)


@given(CHAINS, st.integers(1, 40))
def test_history_is_bounded_and_never_overstates_the_cache(placements, cache_entries) -> None:
    """A worker's history is no larger than its cache and counts only prompts sent to that
    worker."""
    index, longest = PlacementHistory(), Counter[tuple[str, str]]()
    for tenant, name, blocks in placements:
        index.record(name, chain(tenant, blocks), cache_entries * STRIDE)
        longest[tenant, name] = max(longest[tenant, name], blocks)
        assert len(index) <= 3 * cache_entries
        known = index.cached_blocks([name], chain(tenant, blocks)).get(name, 0)
        # The history keeps the beginning of a prompt longest.
        assert known == min(blocks // STRIDE, cache_entries) * STRIDE
        for other in "abcdefgh":
            for elsewhere in "xyz":
                known = index.cached_blocks([elsewhere], chain(other, 200)).get(elsewhere, 0)
                assert known <= longest[other, elsewhere]
                assert known % STRIDE == 0


def test_history_forgets_workers_that_left() -> None:
    """The history forgets the workers that left the pool."""
    index = PlacementHistory(most_in_all=30)
    for number in range(10):
        index.record(f"w-{number}", chain("a", 80), 0)
        index.record("stays", chain("b", 80), 0)
    assert index.cached_blocks(["stays", "w-0"], chain("b", 80)) == {"stays": 80}
    assert index.cached_blocks(["w-1", "w-9"], chain("a", 80)) == {"w-9": 80}
    assert len(index) == 30


def test_history_remembers_every_worker_of_a_large_pool() -> None:
    """The history remembers a prompt on each of 1,000 workers."""
    index, ids = PlacementHistory(), [f"w-{number}" for number in range(1000)]
    for worker_id in ids:
        index.record(worker_id, chain(worker_id, 80), 28_000)
    assert all(index.cached_blocks(ids, chain(one, 80)) == {one: 80} for one in ids[::100])


@given(CHAINS, st.integers(1, 40))
def test_history_of_all_workers_is_bounded(placements, most_in_all) -> None:
    """All workers together have at most the given number of entries, or those of one prompt.

    The history still has the latest prompt.
    """
    index = PlacementHistory(most_in_all=most_in_all)
    for tenant, name, blocks in placements:
        index.record(name, chain(tenant, blocks), 0)
        own = sum(map(len, index._placed.values()))
        assert len(index) == own
        assert own <= most_in_all or len(index._placed) == 1
        found = index.cached_blocks([name], chain(tenant, blocks)).get(name, 0)
        assert found == blocks // STRIDE * STRIDE
