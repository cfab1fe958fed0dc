"""Transfers of KV blocks between simulated workers."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from math import ceil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.core.prefix_cache import extend_chain
from draftgate.backends.delta_reader import generate
from draftgate.backends.errors import BackendFailed
from draftgate.backends.kv_transfer.transfer import (
    WINDOW_CHUNKS,
    Transfer,
    TransferEnd,
    blocks_per_chunk,
)
from draftgate.backends.kv_transfer.turns import SERVING_SHARE, TURN_S
from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.sim.kv_link import KvLink
from draftgate.backends.sim.profile import PROFILES, load_profile
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


def profile_with(folder: Path, **fields: object) -> str:
    """Write `cpu-demo` with other fields to a file, and return its path."""
    path = folder / "worker.json"
    profile = json.loads((PROFILES / "cpu-demo.json").read_text(encoding="utf-8"))
    path.write_text(json.dumps(profile | fields), encoding="utf-8")
    return str(path)


def copied(profile: str, *, busy: bool, tokens: int = 1601) -> tuple[float, list[float]]:
    """Transfer a prompt from a worker that is idle or generates, over a link without delay.

    Returns:
        The seconds of the transfer, and the gaps between the tokens that the source generates.
    """
    config = WorkerConfig(kv_bytes=400 * BLOCK_BYTES, profile=profile, speculation="off")

    async def main():
        source, sink = SimBackend(config, link=KvLink(1e15, 0.0)), SimBackend(config)
        await source.start()
        await sink.start()
        request = replace(make_request(source), prompt_ids=compact(range(7, 7 + tokens)))
        hashes: list[bytes] = []
        extend_chain(hashes, request.tenant, request.prompt_ids, 16)
        times_s: list[float] = []

        async def generating() -> None:
            nonlocal times_s
            async for delta in generate(source, make_request(source, max_tokens=2000)):
                times_s += [loop_time_s()] * bool(delta.token_ids)

        await collect(source, request)
        task = asyncio.create_task(generating()) if busy else None
        await asyncio.sleep(1.0)
        began_s = loop_time_s()
        transfer = Transfer(source, sink, hashes)
        assert await transfer.run() is TransferEnd.COMPLETE
        seconds = loop_time_s() - began_s
        if task is not None:
            assert not task.done()
            task.cancel()
        await source.stop()
        await sink.stop()
        return seconds, [b - a for a, b in pairwise(times_s) if a >= began_s]

    return run_virtual(main())


@pytest.mark.parametrize("bytes_per_s", [1e8, 1e9])
def test_idle_worker_copies_blocks_without_a_pause(tmp_path: Path, bytes_per_s: float) -> None:
    """A transfer between idle workers takes the time of its copies, which overlap on the two.

    A result arrives at the begin of its turn, so a transfer may end a turn early.
    """
    profile = profile_with(tmp_path, kv_copy_bytes_s=bytes_per_s)
    seconds, _ = copied(profile, busy=False)
    copy_s = 100 * BLOCK_BYTES / bytes_per_s
    assert copy_s - TURN_S <= seconds <= copy_s + 2 * TURN_S + WINDOW_CHUNKS * copy_s / 25


@pytest.mark.parametrize("bytes_per_s", [1e8, 1e9])
def test_busy_worker_copies_blocks_for_a_share_of_its_time(
    tmp_path: Path, bytes_per_s: float
) -> None:
    """A busy source serves a transfer with its share, which lengthens its own steps no further."""
    profile = profile_with(tmp_path, kv_copy_bytes_s=bytes_per_s)
    seconds, gaps_s = copied(profile, busy=True)
    copy_s = 100 * BLOCK_BYTES / bytes_per_s
    assert seconds == pytest.approx(copy_s / SERVING_SHARE, rel=0.1)
    during_s = gaps_s[: int(seconds / max(gaps_s))]
    plain_s = min(gaps_s)
    assert sum(during_s) == pytest.approx(len(during_s) * plain_s * (1 + SERVING_SHARE), rel=0.02)


def test_worker_without_a_rate_copies_blocks_at_once(tmp_path: Path) -> None:
    """A profile without a rate of copies has transfers that take no time of a worker."""
    seconds, _ = copied(profile_with(tmp_path), busy=True)
    assert seconds < 1e-6


def test_operation_on_a_worker_that_stops_fails(tmp_path: Path) -> None:
    """An operation that waits for a turn fails when the worker stops."""
    config = WorkerConfig(profile=profile_with(tmp_path, kv_copy_bytes_s=1e9))

    async def main():
        backend = SimBackend(config)
        await backend.start()
        waiting = asyncio.create_task(backend.held_blocks([b"x"]))
        await asyncio.sleep(0)
        await backend.stop()
        with pytest.raises(BackendFailed):
            await waiting

    run_virtual(main())


@pytest.mark.parametrize("fields", [{}, {"kv_copy_bytes_s": 1e9}], ids=["at once", "in turns"])
def test_pull_ends_at_the_first_missing_block(tmp_path: Path, fields: dict[str, float]) -> None:
    """Blocks after a missing one are not sent, although the source holds them."""
    profile = profile_with(tmp_path, **fields)
    config = WorkerConfig(kv_bytes=400 * BLOCK_BYTES, profile=profile, speculation="off")

    async def main():
        source = SimBackend(config)
        await source.start()
        request = replace(make_request(source), prompt_ids=compact(range(7, 1607)))
        hashes: list[bytes] = []
        extend_chain(hashes, request.tenant, request.prompt_ids, 16)
        await collect(source, request)
        asked = [*hashes[:20], b"missing", *hashes[21:90]]
        async with aclosing(source.pull_blocks(asked)) as chunks:
            found = [one async for chunk in chunks for one in chunk.hashes]
        await source.stop()
        assert found == hashes[:20]

    run_virtual(main())
