"""Transfers of KV blocks between simulated workers."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.core.prefix_cache import extend_chain
from draftgate.backends.kv_transfer.transfer import (
    WINDOW_CHUNKS,
    Transfer,
    TransferEnd,
    blocks_per_chunk,
)
from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.sim.kv_link import KvLink
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.testing import collect, make_request
from draftgate.backends.token_ids import compact
from draftgate.backends.worker_config import WorkerConfig
from draftgate.lab.sim.virtual_time import loop_time_s, run_virtual

BLOCK_BYTES = 16 * load_profile("cpu-demo").kv_token_bytes
CONFIG = WorkerConfig(kv_bytes=400 * BLOCK_BYTES)


def transferred(link: KvLink, tokens: int = 3201) -> tuple[Transfer, TransferEnd, float]:
    """Transfer a prompt to a new worker, and return the transfer, its end, and its seconds."""

    async def main():
        source, sink = SimBackend(CONFIG, link=link), SimBackend(CONFIG)
        await source.start()
        await sink.start()
        request = replace(make_request(source), prompt_ids=compact(range(7, 7 + tokens)))
        hashes: list[bytes] = []
        extend_chain(hashes, request.tenant, request.prompt_ids, 16)
        try:
            await collect(source, request)
            began_s = loop_time_s()
            transfer = Transfer(source, sink, hashes)
            end = await transfer.run()
            seconds = loop_time_s() - began_s
            assert await sink.held_blocks(hashes) == transfer.blocks
            return transfer, end, seconds
        finally:
            await source.stop()
            await sink.stop()

    return run_virtual(main())


@pytest.mark.parametrize("bytes_per_s", [1e7, 1e8, 1e9, 1e10])
def test_transfer_takes_the_time_of_its_link(bytes_per_s: float) -> None:
    """Bandwidth determines the time of a slow link, where latency is hidden by the credit."""
    transfer, end, seconds = transferred(KvLink(bytes_per_s, 1e-4))
    assert end is TransferEnd.COMPLETE
    assert transfer.blocks == 200
    sent_s = 200 * BLOCK_BYTES / bytes_per_s
    assert sent_s < seconds <= sent_s + (transfer.chunks / WINDOW_CHUNKS + 1) * 1e-4


def test_latency_limits_a_link_by_the_credit() -> None:
    """On a fast link with a long latency, the credit arrives in each round trip."""
    _, _, seconds = transferred(KvLink(1e15, 0.1))
    chunks = ceil(200 / blocks_per_chunk(BLOCK_BYTES))
    assert seconds == pytest.approx(ceil(chunks / WINDOW_CHUNKS) * 0.1, rel=1e-6)


@given(
    blocks=st.integers(1, 200),
    bytes_per_s=st.floats(1e6, 1e12),
    latency_s=st.floats(0.0, 0.2),
)
def test_blocks_together_take_the_time_of_single_chunks(
    blocks: int, bytes_per_s: float, latency_s: float
) -> None:
    """A transfer ends when the last of its chunks arrives, however few turns of the loop it has."""
    _, end, seconds = transferred(KvLink(bytes_per_s, latency_s), 16 * blocks + 1)
    assert end is TransferEnd.COMPLETE
    size, arrivals = blocks_per_chunk(BLOCK_BYTES), list[float]()
    for index, begin in enumerate(range(0, blocks, size)):
        asked_s = arrivals[index - WINDOW_CHUNKS] if index >= WINDOW_CHUNKS else 0.0
        free_s = arrivals[-1] - latency_s if arrivals else 0.0
        sent_s = min(size, blocks - begin) * BLOCK_BYTES / bytes_per_s
        arrivals.append(max(asked_s, free_s) + sent_s + latency_s)
    assert seconds == pytest.approx(arrivals[-1], rel=1e-9, abs=1e-9)


def test_closed_transfer_leaves_nothing_behind() -> None:
    """A pull that is closed early ends its exports, and the source serves on."""

    async def main():
        source = SimBackend(CONFIG)
        await source.start()
        request = replace(make_request(source), prompt_ids=compact(range(7, 900)))
        hashes: list[bytes] = []
        extend_chain(hashes, request.tenant, request.prompt_ids, 16)
        expected = await collect(source, request)
        async with aclosing(source.pull_blocks(hashes)) as chunks:
            assert (await anext(chunks)).hashes
        assert await collect(source, request) == expected
        assert source.load().kv_blocks_free == source.load().kv_blocks_total
        await source.stop()

    run_virtual(main())
