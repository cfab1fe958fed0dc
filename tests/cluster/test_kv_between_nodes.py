"""KV blocks between node processes, one of which is killed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from draftgate.backends.checkpoints import SHIPPED_MODEL_ID
from draftgate.backends.core.prefix_cache import extend_chain
from draftgate.backends.delta_reader import generate
from draftgate.backends.errors import BackendFailed
from draftgate.backends.kv_transfer.transfer import Transfer, TransferEnd
from draftgate.backends.peer.backend import PeerBackend
from draftgate.backends.testing import make_request
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest
from tests.cluster.nodes import NodeProcess
from tests.gateway.harness import until
from tests.peer.harness import linked_to

BLOCK_TOKENS = 16


@asynccontextmanager
async def nodes(folder: Path, number: int, *flags: str) -> AsyncIterator[list[NodeProcess]]:
    """Run some nodes that accept peers of this machine."""
    started = [NodeProcess(f"node-{index}", folder, *flags) for index in range(number)]
    try:
        for node in started:
            await node.start()
        for node in started:
            await node.until_ready()
        yield started
    finally:
        for node in started:
            await node.close()


async def run(backend: PeerBackend, request: GenerationRequest) -> tuple[tuple[int, ...], int]:
    """Return the tokens of a request, and the prompt tokens found in the cache."""
    tokens: list[int] = []
    async with aclosing(generate(backend, request)) as deltas:
        async for delta in deltas:
            tokens.extend(delta.token_ids)
            cached = delta.cached_tokens
    return tuple(tokens), cached


@pytest.mark.parametrize(
    "flags",
    [
        ("--backend", "sim"),
        pytest.param(
            ("--backend", "engine", "--own-process", "--kv-bytes", "32MiB"), marks=pytest.mark.long
        ),
    ],
    ids=["sim", "engine"],
)
async def test_killed_source_leaves_a_usable_prefix(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """A node takes the blocks of another node directly, and computes what a killed node had."""
    engine = (SHIPPED_MODEL_ID, "--threads", "1", *flags)
    async with nodes(tmp_path, 3, *engine) as processes, AsyncExitStack() as stack:
        source, sink, other = [
            await stack.enter_async_context(linked_to(process.url)) for process in processes
        ]
        prompt = compact([300 + place * 31 % 1500 for place in range(500)])
        request = replace(make_request(source, max_tokens=20, seed=5), prompt_ids=prompt)
        expected, _ = await run(source, request)
        hashes: list[bytes] = []
        extend_chain(hashes, request.tenant, list(prompt)[:-1], BLOCK_TOKENS)
        assert await source.held_blocks(hashes) == len(hashes)
        # The order of these transfers leaves the third node with a part of the prefix.
        assert await Transfer(source, sink, hashes).run() is TransferEnd.COMPLETE
        assert await Transfer(source, other, hashes[:9]).run() is TransferEnd.COMPLETE
        await processes[0].kill()
        await until(lambda: source.failure is not None)
        assert await Transfer(source, other, hashes, first=9).run() is TransferEnd.FAILED
        with pytest.raises(BackendFailed):
            await source.held_blocks(hashes)
        for backend, blocks in ((sink, len(hashes)), (other, 9)):
            found = await run(backend, replace(request, request_id=f"again {blocks}"))
            assert found == (expected, blocks * BLOCK_TOKENS)
