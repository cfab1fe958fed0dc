"""Transfer of KV blocks between engines: equal bits, faults, and memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace

import pytest
import torch
from msgspec import structs

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.core.prefix_cache import extend_chain
from draftgate.backends.delta_reader import generate
from draftgate.backends.engine.backend import EngineBackend
from draftgate.backends.engine.config import read_model_config
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS, KvPool
from draftgate.backends.engine.shared_memory import shared_memory
from draftgate.backends.errors import BackendFailed
from draftgate.backends.kv_transfer.exchange import AdoptBlocks
from draftgate.backends.kv_transfer.format import KvChunk, chunk_of, format_refusal
from draftgate.backends.kv_transfer.transfer import Transfer, TransferEnd
from draftgate.backends.testing import make_request
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, ResumedChoice
from draftgate.backends.worker_config import WorkerConfig
from tests.gateway.harness import until

CONFIG = WorkerConfig(device="cpu", max_model_len=1024, kv_bytes=16 << 20, threads=1)
TARGET = read_model_config(SHIPPED_MODEL)


@asynccontextmanager
async def engines(*configs: WorkerConfig) -> AsyncIterator[list[EngineBackend]]:
    """Start one engine on the shipped model for each configuration."""
    started = [EngineBackend(config) for config in configs]
    await asyncio.gather(*(engine.start() for engine in started))
    try:
        yield started
    finally:
        await asyncio.gather(*(engine.stop() for engine in started))


def long_request(engine: EngineBackend, tokens: int = 500, **changes: object) -> GenerationRequest:
    prompt = engine.tokenizer.encode("def area(width, height):\n    return width * height\n" * 99)
    request = make_request(engine, **{"max_tokens": 40, "seed": 5, **changes})
    return replace(request, prompt_ids=compact(prompt[:tokens]))


def chain(request: GenerationRequest, output: tuple[int, ...] = ()) -> list[bytes]:
    hashes: list[bytes] = []
    extend_chain(hashes, request.tenant, [*request.prompt_ids, *output][:-1], BLOCK_TOKENS)
    return hashes


async def run(engine: EngineBackend, request: GenerationRequest) -> tuple[tuple[int, ...], int]:
    """Return the tokens of the only choice, and the prompt tokens found in the cache."""
    tokens: list[int] = []
    async with aclosing(generate(engine, request)) as deltas:
        async for delta in deltas:
            tokens.extend(delta.token_ids)
            cached = delta.cached_tokens
    return tuple(tokens), cached


async def pulled(engine: EngineBackend, hashes: list[bytes]) -> bytes:
    """Return the bytes of the blocks of a chain."""
    async with aclosing(engine.pull_blocks(hashes)) as chunks:
        return b"".join([bytes(chunk.data) async for chunk in chunks])


async def drain(chunks: AsyncIterator[KvChunk]) -> None:
    async for _ in chunks:
        pass


def is_free(engine: EngineBackend) -> bool:
    load = engine.load()
    return load.kv_blocks_free == load.kv_blocks_total


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_blocks_are_written_as_they_were_read(dtype: str) -> None:
    """Bytes that are read from some blocks of a pool make other blocks of a pool equal."""
    kind = getattr(torch, dtype)
    source, target = KvPool(TARGET, 12, kind), KvPool(TARGET, 12, kind)
    source.memory.copy_(torch.randn(source.memory.shape))
    data = source.read([7, 2, 3])
    assert len(data) == 3 * source.block_bytes == 3 * source.format("c").block_bytes
    before = target.cells.clone()
    target.write([0, 9, 4], bytes(data))
    for old, new in ((7, 0), (2, 9), (3, 4)):
        slots, moved = (slice(b * BLOCK_TOKENS, (b + 1) * BLOCK_TOKENS) for b in (old, new))
        assert torch.equal(source.cells[:, slots], target.cells[:, moved])
        before[:, moved] = target.cells[:, moved]
    assert torch.equal(before, target.cells)  # no other block changed


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"), [("float32", "auto"), ("bfloat16", "auto"), ("float32", "fp8")]
)
async def test_imported_blocks_equal_computed_blocks(dtype: str, kv_cache_dtype: str) -> None:
    """A request on imported blocks computes nothing of them, and has the text of an undisturbed
    run."""
    config = structs.replace(CONFIG, dtype=dtype, kv_cache_dtype=kv_cache_dtype, exact=True)
    async with engines(config, config, config) as (source, sink, other):
        assert format_refusal(source.card.kv_format, sink.card.kv_format) is None
        request = long_request(source)
        expected, _ = await run(source, request)
        hashes = chain(request, expected)
        transfer = Transfer(source, sink, hashes)
        assert await transfer.run() is TransferEnd.COMPLETE
        assert transfer.blocks == len(hashes) == await sink.held_blocks(hashes)
        resumed = replace(request, resumed=(ResumedChoice(0, expected[:30]),), request_id="rest")
        assert (await run(other, request))[0] == expected
        assert await pulled(sink, hashes) == await pulled(other, hashes)
        tokens, cached = await run(sink, resumed)
        assert tokens == expected[30:]
        assert cached == len(request.prompt_ids)
        await until(lambda: is_free(sink))


@pytest.mark.parametrize(
    "own",
    [
        (True, False),
        pytest.param((False, True), marks=pytest.mark.long),
        pytest.param((True, True), marks=pytest.mark.long),
    ],
    ids=["from_own", "to_own", "both_own"],
)
@pytest.mark.parametrize("slots", [64, pytest.param(2, marks=pytest.mark.long)])
async def test_engine_processes_exchange_blocks(
    own: tuple[bool, bool], slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine in its own process exchanges blocks with any other engine, in shared memory or, if
    its slots are all reserved, over the socket. All slots are free afterwards."""
    memory = shared_memory()
    free = memory._free[:slots]
    monkeypatch.setattr(memory, "_free", free)
    configs = [structs.replace(CONFIG, own_process=flag) for flag in own]
    async with engines(*configs) as (source, sink):
        request = long_request(source)
        expected, _ = await run(source, request)
        hashes = chain(request)
        transfer = Transfer(source, sink, hashes)
        assert await transfer.run() is TransferEnd.COMPLETE
        assert await pulled(source, hashes) == await pulled(sink, hashes)
        tokens, cached = await run(sink, replace(request, request_id="again"))
        assert (tokens, cached) == (expected, len(hashes) * BLOCK_TOKENS)
        del transfer
    await until(lambda: len(free) == slots)


class Flipping:
    """A source in whose n-th block one bit is flipped on the way."""

    def __init__(self, source: EngineBackend, block: int) -> None:
        self._source = source
        self._block = block

    async def pull_blocks(self, hashes, *, urgent=False):
        block_bytes = self._source.card.kv_format.block_bytes
        seen = 0
        async with aclosing(self._source.pull_blocks(hashes, urgent=urgent)) as chunks:
            async for chunk in chunks:
                data = bytearray(chunk.data)
                if seen <= self._block < seen + len(chunk.hashes):
                    data[(self._block - seen) * block_bytes + 77] ^= 0x10
                seen += len(chunk.hashes)
                yield structs.replace(chunk, data=memoryview(data))


@pytest.mark.parametrize(
    "block", [pytest.param(0, marks=pytest.mark.long), 6, pytest.param(30, marks=pytest.mark.long)]
)
async def test_damaged_block_is_never_served(block: int) -> None:
    """The blocks before a damaged block are used, and the text stays the same."""
    async with engines(CONFIG, CONFIG) as (source, sink):
        request = long_request(source)
        expected, _ = await run(source, request)
        transfer = Transfer(Flipping(source, block), sink, chain(request))
        assert await transfer.run() is TransferEnd.DAMAGED
        assert transfer.blocks == await sink.held_blocks(chain(request)) == block
        tokens, cached = await run(sink, replace(request, request_id="again"))
        assert (tokens, cached) == (expected, block * BLOCK_TOKENS)


async def test_malformed_chunks_are_dropped_and_the_engine_serves_on() -> None:
    """A chunk with too few bytes or a strange strip range stores nothing."""
    async with engines(CONFIG) as (sink,):
        size = sink.card.kv_format.block_bytes
        good = chunk_of((b"h" * 16,), memoryview(bytes(size)))
        for chunk in (
            KvChunk(good.hashes, good.checksums, good.data[:-1]),
            KvChunk(good.hashes, good.checksums, good.data, first_strip=1),
            KvChunk(good.hashes, (), good.data),
            KvChunk((), good.checksums, good.data),
        ):
            stored = await sink.adopt_blocks(chunk, b"")
            assert stored.blocks == 0
        assert await sink.held_blocks(good.hashes) == 0
        assert (await sink.adopt_blocks(good, b"")).blocks == 1
        assert (await run(sink, long_request(sink)))[0]


async def test_transfer_stops_where_the_source_or_the_memory_ends() -> None:
    """A source without the rest of the prefix, and a destination without room, end a transfer with
    a useful beginning."""
    small = structs.replace(CONFIG, kv_bytes=2 << 20)
    async with engines(CONFIG, small) as (source, sink):
        request = long_request(source, max_tokens=1)
        await run(source, request)
        known = chain(request)
        more = [*known, b"unknown hash 16b"]
        assert await Transfer(source, source, more).run() is TransferEnd.MISSING
        full = Transfer(source, sink, known)
        assert await full.run() is TransferEnd.FULL
        assert full.blocks == sink.load().kv_blocks_total < len(known)
        await until(lambda: is_free(sink))


async def test_worker_of_another_tenant_cannot_name_the_blocks() -> None:
    """A chain of equal tokens under another tenant finds no block at the source."""
    async with engines(CONFIG) as (source,):
        request = replace(long_request(source), tenant="a")
        await run(source, request)
        assert await source.held_blocks(chain(request)) == len(chain(request))
        for tenant in ("", "b"):
            theirs = chain(replace(request, tenant=tenant))
            assert await source.held_blocks(theirs) == 0
            assert await pulled(source, theirs) == b""


@pytest.mark.parametrize("own_process", [False, True])
async def test_stopped_engine_ends_transfers_with_an_error(own_process: bool) -> None:
    """A transfer from an engine that stops ends instead of waiting forever, and later operations
    raise `BackendFailed`."""
    config = structs.replace(CONFIG, own_process=own_process)
    async with engines(config) as (source,):
        request = long_request(source)
        await run(source, request)
        async with aclosing(source.pull_blocks(chain(request))) as chunks:
            await anext(chunks)
            await source.stop()
            with suppress(BackendFailed):  # unless all chunks were copied before the stop
                await drain(chunks)
        with pytest.raises(BackendFailed):
            await source.held_blocks(chain(request))


async def test_transfer_proceeds_while_both_engines_serve() -> None:
    """A transfer between busy engines ends, and the texts of all requests stay the same."""
    async with engines(CONFIG, CONFIG) as (source, sink):
        request = long_request(source)
        expected, _ = await run(source, request)
        plain = long_request(source, tokens=40, max_tokens=200)
        alone, _ = await run(source, plain)
        busy = [
            asyncio.create_task(run(engine, replace(plain, request_id="busy")))
            for engine in (source, sink)
        ]
        transfer = Transfer(source, sink, chain(request))
        assert await transfer.run() is TransferEnd.COMPLETE
        assert [(await task)[0] for task in busy] == [alone, alone]
        assert (await run(sink, replace(request, request_id="again")))[0] == expected


def test_adoption_is_a_message() -> None:
    """An operation with its chunk survives the encoding of the engine's socket."""
    from draftgate.backends.framing import Codec
    from draftgate.backends.remote_worker import Command, KvCall

    call = KvCall(3, AdoptBlocks(chunk_of((b"h" * 16,), memoryview(b"abcd")), b"p" * 16))
    codec = Codec(Command)
    assert codec.decode(codec.encode(call)) == call
