"""The prefix cache: hash chains, and hit rates on recorded traffic."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from draftgate.backends.core.kv_blocks import KvBlocks, OutOfBlocks
from draftgate.backends.core.prefix_cache import HASH_BYTES, PendingPrefixes, extend_chain
from draftgate.policies.values import replace
from tests.core.fakes import request

TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "mooncake"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the recorded traces are missing")


def chain(tokens: Iterable[int], tenant: str = "", block_size: int = 4) -> list[bytes]:
    hashes: list[bytes] = []
    extend_chain(hashes, tenant, list(tokens), block_size)
    return hashes


def test_equal_prefixes_have_equal_hashes_and_others_do_not() -> None:
    """A changed token changes the hashes of its block and of all later blocks."""
    tokens = list(range(100, 120))
    known = chain(tokens)
    assert len(known) == 5
    assert {len(digest) for digest in known} == {HASH_BYTES}
    assert chain([*tokens, 7]) == known  # A partial block has no hash.
    for place in range(20):
        changed = chain([*tokens[:place], 5, *tokens[place + 1 :]])
        same = [a == b for a, b in zip(known, changed, strict=True)]
        assert same == [index < place // 4 for index in range(5)]
    assert len(set(known)) == 5


def test_tenants_have_different_hashes() -> None:
    """Blocks of different tenants never have the same hash."""
    assert not set(chain(range(40), "a")) & set(chain(range(40), "b"))


def test_a_chain_can_be_extended_step_by_step() -> None:
    """Hashes that are computed as tokens arrive equal the hashes of the whole sequence."""
    tokens, growing = list(range(30)), []
    for length in range(31):
        extend_chain(growing, "t", tokens[:length], 4)
    assert growing == chain(tokens, "t")


def test_requests_share_prefixes_only_with_equal_tenant_adapter_and_salt() -> None:
    """A salt, which clients choose, cannot imitate an adapter."""
    owners = [
        ("a", "", ""), ("b", "", ""), ("a", "0f", ""), ("a", "", "0f"), ("a", "0f", "s"),
        ("a", "1e", ""), ("a", "", "\x000f"), ("a", "", "0f\x00s"), ("a", "0f", "\x00s"),
    ]  # fmt: skip
    requests = [
        replace(request([1]), tenant=tenant, adapter=adapter, cache_salt=salt)
        for tenant, adapter, salt in owners
    ]
    assert len({one.cache_owner for one in requests}) == len(owners)


def test_eviction_keeps_the_beginning_of_a_prefix() -> None:
    """The cache evicts the last block of an unused prefix first."""
    blocks = KvBlocks(4, 4)
    hashes = chain(range(16))
    table: list[int] = []
    blocks.admit(table, hashes, 16)
    blocks.confirm(table, hashes, range(4))
    blocks.release(table)
    other: list[int] = []
    blocks.extend(other, 4)
    assert blocks.num_cached(hashes) == 3


def test_blocks_in_use_are_not_evicted() -> None:
    """Allocation takes all unused blocks and then fails."""
    blocks = KvBlocks(3, 4)
    hashes = chain(range(8))
    table: list[int] = []
    blocks.admit(table, hashes, 8)
    blocks.confirm(table, hashes, range(2))
    blocks.extend([], 4)
    with pytest.raises(OutOfBlocks):
        blocks.extend([], 4)
    assert blocks.num_cached(hashes) == 2


def test_a_pending_block_belongs_to_the_first_sequence() -> None:
    """A block is pending until the first sequence that computes it advances or leaves."""
    pending = PendingPrefixes()
    pending.advance(1, b"a")
    pending.advance(2, b"a")
    pending.drop(2)
    assert b"a" in pending
    pending.advance(1, b"b")
    assert b"a" not in pending
    assert b"b" in pending
    pending.drop(1)
    pending.drop(1)
    assert b"b" not in pending


def test_repeated_lookup_sees_confirmed_and_evicted_blocks() -> None:
    """A second lookup of a chain finds blocks confirmed since the first lookup, but no evicted
    blocks."""
    blocks = KvBlocks(4, 4)
    hashes = chain(range(16))
    table: list[int] = []
    blocks.admit(table, hashes, 16)
    for known in range(5):
        assert blocks.num_cached(hashes) == known
        assert blocks.num_cached(hashes[:2]) == min(known, 2)
        blocks.confirm(table, hashes, range(min(known + 1, 4)))
    blocks.release(table)
    for expected in (3, 2):
        blocks.extend([], 4)
        assert blocks.num_cached(hashes) == expected


def test_request_without_a_full_block_needs_only_its_own_blocks() -> None:
    """A short request needs one block, also after a lookup of a long cached prefix."""
    blocks, table = KvBlocks(4, 4), []
    hashes = chain(range(12))
    blocks.admit(table, hashes, 12)
    blocks.confirm(table, hashes, range(3))
    blocks.release(table)
    assert blocks.needed(hashes, 13) == 4
    assert blocks.needed([], 3) == 1


# --- recorded traffic --------------------------------------------------------------------------


@cache
def trace(name: str) -> tuple[tuple[int, ...], ...]:
    """Read the prefix-block ids of each request, where a block of the trace counts as a token."""
    lines = (TRACES / f"{name}_trace.jsonl").read_text().splitlines()
    return tuple(tuple(json.loads(line)["hash_ids"]) for line in lines)


def replay(requests: Iterable[tuple[int, ...]], num_blocks: int) -> list[int]:
    """Return the cached blocks of each request, or -1 for a request that is too long."""
    blocks = KvBlocks(num_blocks, 1)
    cached = []
    for ids in requests:
        table: list[int] = []
        hashes = chain(ids, block_size=1)
        try:
            cached.append(blocks.admit(table, hashes, len(ids)))
        except OutOfBlocks:
            cached.append(-1)
            continue
        blocks.confirm(table, hashes, range(len(ids)))
        blocks.release(table)
    blocks.check_integrity([])
    return cached


def simulate(requests: Iterable[tuple[int, ...]], capacity: int) -> list[int]:
    """Return the cached blocks of each request by an LRU dictionary without blocks and hashes.

    An entry is a whole prefix. A request uses its prefixes from the longest to the shortest.
    """
    used: OrderedDict[tuple[int, ...], None] = OrderedDict()
    cached = []
    for ids in requests:
        if len(ids) > capacity:
            cached.append(-1)
            continue
        prefixes = [ids[:length] for length in range(len(ids), 0, -1)]
        hits = next((len(prefix) for prefix in prefixes if prefix in used), 0)
        cached.append(hits)
        for prefix in prefixes:
            used.pop(prefix, None)
        while len(used) + len(ids) > capacity:
            used.popitem(last=False)
        used.update(dict.fromkeys(prefixes))
    return cached


def hit_rate(requests: tuple[tuple[int, ...], ...], cached: list[int]) -> float:
    return sum(cached) / sum(map(len, requests))


@needs_traces
@pytest.mark.parametrize(
    ("name", "rate"),
    [pytest.param("conversation", 0.366, marks=pytest.mark.long), ("synthetic", 0.640)],
)
def test_hit_rate_of_an_infinite_cache_equals_the_published_rate(name: str, rate: float) -> None:
    """The cache finds 36.6% and 64.0% of the recorded blocks with unlimited memory."""
    requests = trace(name)
    cached = replay(requests, sum(map(len, requests)))
    assert hit_rate(requests, cached) == pytest.approx(rate, abs=0.0005)


@needs_traces
@pytest.mark.parametrize("capacity", [100, 1000, 5000])
@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_a_finite_cache_is_lru(name: str, capacity: int) -> None:
    """Each request finds exactly the blocks that an independent LRU simulation finds."""
    requests = tuple(ids[:64] for ids in trace(name)[:1500])
    cached = replay(requests, capacity)
    assert cached == simulate(requests, capacity)
    assert max(cached) > 0
