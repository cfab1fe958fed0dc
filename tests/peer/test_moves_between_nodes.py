"""Moves of streams between nodes."""

from __future__ import annotations

import asyncio

from draftgate.backends.sim.profile import load_profile
from draftgate.gateway.app import drain
from tests.gateway.harness import client, is_idle, running, until
from tests.upstream_settings import at

PROMPT_TOKENS = 600
BODY = {
    "prompt": [7 + place * 31 % 500 for place in range(PROMPT_TOKENS)],
    "max_tokens": 400,
    "seed": 1,
    "ignore_eos": True,
}


async def test_draining_node_gives_its_stream_and_blocks_to_another_node() -> None:
    """The stream continues on the other node with the blocks of the first one, which is then empty,
    and the text stays the same."""
    async with (
        running() as first,
        running() as second,
        running(backend="peer", upstream=at(first.url, second.url)) as where,
        client(where) as http,
    ):
        workers = where.node.fleet.workers
        request = asyncio.create_task(http.post("/v1/completions", json=BODY, timeout=60))
        await until(lambda: any(one.usage.started for one in workers))
        nodes = (first.node, second.node)
        (source,) = (node for node, one in zip(nodes, workers, strict=True) if one.usage.started)
        draining = asyncio.create_task(drain(source, 60))
        response = (await request).json()
        assert await draining
        assert is_idle(source)
        page = (await http.get("/metrics")).text
        again = (await http.post("/v1/completions", json=BODY, timeout=60)).json()
    assert response["choices"] == again["choices"]
    assert response["usage"]["completion_tokens"] == BODY["max_tokens"]
    assert len(response["metrics"]["resumes"]) == 1
    assert total(page, "draftgate_moves_total", 'end="moved"') == 1
    fetched = total(page, "draftgate_kv_fetched_bytes_total")
    block_bytes = 16 * load_profile("cpu-demo").kv_token_bytes
    assert fetched >= PROMPT_TOKENS // 16 * block_bytes
    assert fetched % block_bytes == 0


def total(page: str, name: str, label: str = "") -> float:
    """Return the sum of the series of a metric that have a label."""
    lines = (line for line in page.splitlines() if line.startswith(name) and label in line)
    return sum(float(line.rpartition(" ")[2]) for line in lines)
