"""Prefixes of new prompts that a node pulls from another node over sockets."""

from __future__ import annotations

import asyncio

import pytest

from draftgate.backends.core.prefix_cache import extend_chain
from draftgate.backends.sim.profile import load_profile
from draftgate.gateway.app import drain
from tests.gateway.harness import client, running, until
from tests.gateway.troubles import NEVER_S
from tests.peer.test_moves_between_nodes import total
from tests.upstream_settings import at

PREFIX_TOKENS = 1024
PREFIX_BYTES = PREFIX_TOKENS * load_profile("cpu-demo").kv_token_bytes
PROMPT = [7 + place * 31 % 500 for place in range(PREFIX_TOKENS)]
BODY = {"prompt": [*PROMPT, 8, 9], "max_tokens": 10, "seed": 1}
HELD = {"prompt": PROMPT, "max_tokens": 7000, "ignore_eos": True}
"""A request that outlasts a test."""


@pytest.mark.usefixtures("_always_pulls")
@pytest.mark.parametrize("leaves", [False, True], ids=["full", "leaves"])
async def test_node_takes_a_prefix_from_a_node_that_accepts_no_requests(*, leaves: bool) -> None:
    """A new prompt takes its prefix from a node that is full or shuts down, and keeps its text."""
    async with (
        running(max_num_seqs=1) as first,
        running(max_num_seqs=1) as second,
        running(backend="peer", upstream=at(first.url, second.url)) as where,
        client(first) as direct,
        client(where) as http,
    ):
        workers = where.node.fleet.workers
        # A leaving node would give a stream of the gateway to the other node.
        held = asyncio.create_task(
            (direct if leaves else http).post("/v1/completions", json=HELD, timeout=60)
        )
        await until(lambda: any(one.usage.load.running for one in workers))
        (source,) = (one for one in workers if one.usage.load.running)
        hashes: list[bytes] = []
        extend_chain(hashes, "", PROMPT, 16)
        async with asyncio.timeout(60):
            while await source.kv.held_blocks(hashes) < len(hashes):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        where.node.dispatcher.queue.router.history.record(source.worker_id, hashes, 0)
        draining = asyncio.create_task(drain(first.node, NEVER_S)) if leaves else None
        await until(lambda: source.leaving == leaves)
        pulled = (await http.post("/v1/completions", json=BODY, timeout=60)).json()
        page = (await http.get("/metrics")).text
        held.cancel()
        if draining is not None:
            assert await draining
        computed = (await http.post("/v1/completions", json=BODY, timeout=60)).json()
    assert pulled["choices"] == computed["choices"]
    assert pulled["usage"]["prompt_tokens_details"]["cached_tokens"] == PREFIX_TOKENS
    assert total(page, "draftgate_kv_fetched_bytes_total") == PREFIX_BYTES
