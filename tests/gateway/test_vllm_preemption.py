"""A test of a stream that a real vLLM server loses to a request of a higher class.

It needs `vllm/` and `smollm2/` in the folder `REAL_MODELS`.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.harness.vllm import MODEL, is_installed, vllm_server
from draftgate.backends.openai.upstream import OpenAIUpstream
from draftgate.backends.worker_config import UpstreamSettings, WorkerConfig
from tests.gateway.harness import client, running

REAL = Path(os.environ.get("REAL_MODELS", ""))

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not is_installed(REAL), reason="needs vLLM in REAL_MODELS"),
]

TEXTS = "/v1/completions"
BODY: dict[str, Any] = {
    "model": MODEL,
    "prompt": "A story about a lighthouse:",
    "max_tokens": 96,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "priority": 5,
}
URGENT = {"model": MODEL, "prompt": "Bread is", "max_tokens": 8, "temperature": 0}


async def read(http: httpx.AsyncClient, begun: asyncio.Event) -> list[Any]:
    """Return the events of the stream, of which some have arrived when the event is set."""
    found = []
    async with http.stream("POST", TEXTS, json=BODY) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                found.append(json.loads(line.removeprefix("data: ")))
            if len(found) == 10:
                begun.set()
    return found


def text_of(chunks: list[Any]) -> str:
    """Return the text of a stream."""
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


async def test_greedy_text_of_a_preempted_stream_is_that_of_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    """vLLM stops a stream whose connection is closed, the request of the higher class precedes it,
    and its text and usage are those of a stream without the other request."""
    with vllm_server(REAL, tmp_path / "vllm.log") as server:
        upstream = UpstreamSettings(url=server.url, concurrency=1, preemptible=True)
        backend = OpenAIUpstream(WorkerConfig(upstream=upstream))
        async with (
            running(backends=[backend], upstream_preemptible=True) as gateway,
            client(gateway) as http,
        ):
            http.timeout = httpx.Timeout(240.0)
            undisturbed = await read(http, asyncio.Event())
            begun = asyncio.Event()
            low = asyncio.create_task(read(http, begun))
            await begun.wait()
            urgent = await http.post(TEXTS, json=URGENT)
            assert urgent.status_code == 200
            assert not low.done()
            preempted = await low
        assert text_of(preempted) == text_of(undisturbed)
        assert preempted[-1]["usage"] == undisturbed[-1]["usage"]
        assert len(preempted[-1]["metrics"]["resumes"]) == 1
        assert undisturbed[-1].get("metrics") is None
