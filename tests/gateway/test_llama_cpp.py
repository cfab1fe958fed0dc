"""Tests with llama.cpp's server as an upstream, with and without speculation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest
from openai import AsyncOpenAI

from draftgate.backends.openai.upstream import OpenAIUpstream
from draftgate.backends.upstream_testing import check_upstream
from draftgate.backends.worker_config import UpstreamSettings, WorkerConfig
from draftgate.gateway.app import Listening
from tests.gateway.clients import openai_client
from tests.gateway.harness import client, running, until
from tests.gateway.llama_server import SLOT_TOKENS, SLOTS, LlamaServer, find_server, llama_server
from tests.gateway.random_gguf import write_random_gguf
from tests.upstream_settings import at

pytestmark = pytest.mark.skipif(find_server() is None, reason="no llama-server, or no gguf package")

ENDLESS = {"max_tokens": SLOT_TOKENS - 100, "extra_body": {"ignore_eos": True}}
SPECULATING = ("--spec-type", "draft-simple", "--spec-draft-n-max", "3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model file with random weights."""
    path = tmp_path_factory.mktemp("gguf") / "random.gguf"
    write_random_gguf(path)
    return path


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[LlamaServer]:
    """A server that never drafts."""
    with llama_server(model) as server:
        yield server


@pytest.fixture(scope="module")
def drafting(model: Path) -> Iterator[LlamaServer]:
    """A server that drafts with its own model, so most drafts are accepted."""
    with llama_server(model, *SPECULATING, "--spec-draft-model", str(model)) as server:
        yield server


@pytest.fixture
async def gateway(plain: LlamaServer) -> AsyncIterator[Listening]:
    """A node with the plain server as its upstream, idle at the start."""
    await plain.wait_idle()
    async with running(backend="openai", upstream=at(plain.url)) as listening:
        yield listening


@pytest.fixture
async def api(gateway: Listening) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's client of the node."""
    async with openai_client(gateway.url) as opened:
        yield opened


async def test_upstream_passes_conformance_suite(plain: LlamaServer) -> None:
    """The backend of llama.cpp's server passes the conformance suite."""
    await check_upstream(
        OpenAIUpstream(WorkerConfig(upstream=UpstreamSettings(url=plain.url)), poll_s=3600.0)
    )


async def test_whole_and_streamed_texts_are_equal(gateway: Listening, api: AsyncOpenAI) -> None:
    """Completions and chats have the same text and usage as whole responses and as streams."""
    assert gateway.node.models[0].name.endswith("random.gguf")
    common = {"model": gateway.node.models[0].name, "max_tokens": 24, "temperature": 0.0}
    options = {"include_usage": True}
    whole = await api.completions.create(**common, prompt="def f(x):")
    stream = await api.completions.create(
        **common, prompt="def f(x):", stream=True, stream_options=options
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].text != ""
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    messages = [{"role": "user", "content": "say it"}]
    response = await api.chat.completions.create(**common, messages=messages)
    stream = await api.chat.completions.create(**common, messages=messages, stream=True)
    pieces = [c.choices[0].delta.content or "" async for c in stream if c.choices]
    assert "".join(pieces) == response.choices[0].message.content != ""


async def test_closed_stream_frees_its_slot(
    gateway: Listening, api: AsyncOpenAI, plain: LlamaServer
) -> None:
    """A closed stream stops the generation on the server and frees the gateway's request."""
    before = plain.metric("tokens_predicted_total")
    stream = await api.completions.create(
        model=gateway.node.models[0].name, prompt="x", stream=True, **ENDLESS
    )
    await anext(aiter(stream))
    assert plain.metric("requests_processing") == 1
    await stream.close()
    await plain.wait_idle()
    await until(lambda: gateway.node.in_flight == 0)
    assert plain.metric("tokens_predicted_total") - before < ENDLESS["max_tokens"]


async def test_abandoned_whole_response_frees_its_slot(
    gateway: Listening, api: AsyncOpenAI, plain: LlamaServer
) -> None:
    """The server stops a whole response when its client disconnects before the response arrives."""
    before = plain.metric("tokens_predicted_total")
    pending = asyncio.create_task(
        api.completions.create(model=gateway.node.models[0].name, prompt="x", **ENDLESS)
    )
    await until(lambda: plain.metric("requests_processing") == 1)
    pending.cancel()
    await plain.wait_idle()
    await until(lambda: gateway.node.in_flight == 0)
    assert plain.metric("tokens_predicted_total") - before < ENDLESS["max_tokens"]


async def test_server_errors_reach_the_client(gateway: Listening, api: AsyncOpenAI) -> None:
    """The client receives the server's own error messages for invalid requests."""
    request = {"model": gateway.node.models[0].name, "max_tokens": 4}
    with pytest.raises(openai.BadRequestError, match="must be number"):
        await api.completions.create(**request, prompt="x", temperature="hot")
    with pytest.raises(openai.BadRequestError, match="context size"):
        await api.completions.create(**request, prompt="x y " * SLOT_TOKENS)
    assert gateway.node.fleet.outage is None


async def test_slots_and_load_are_read(
    gateway: Listening, api: AsyncOpenAI, plain: LlamaServer
) -> None:
    """The gateway reads slots and context from the server and counts requests of other clients."""
    worker = gateway.node.fleet.workers[0].backend
    assert (worker.load().max_sequences, worker.card.max_model_len) == (SLOTS, SLOT_TOKENS)
    assert worker.load().age_s is not None
    assert worker.load().proposers == ()
    async with openai_client(plain.url) as direct_api:
        requests = [
            direct_api.completions.create(model="m", prompt="x", **ENDLESS) for _ in range(3)
        ]
        pending = [asyncio.create_task(request) for request in requests]
        await until(lambda: plain.metric("requests_deferred") == 1)
        await worker.poll()
        load = worker.load()
        assert (load.running, load.waiting, load.others) == (SLOTS, 1, SLOTS + 1)
        for task in pending:
            task.cancel()
        await plain.wait_idle()
    await worker.poll()
    assert worker.load().others == 0


async def test_requests_without_a_slot_wait_in_the_gateway(
    gateway: Listening, api: AsyncOpenAI, plain: LlamaServer
) -> None:
    """Requests without a free slot wait in the gateway and not on the server."""
    request = {"model": gateway.node.models[0].name, "prompt": "x", **ENDLESS}
    streams = [await api.completions.create(**request, stream=True) for _ in range(SLOTS)]
    waiting = asyncio.create_task(api.completions.create(**{**request, "max_tokens": 3}))
    await until(lambda: len(gateway.node.dispatcher.queue) == 1)
    assert plain.metric("requests_deferred") == 0
    await streams[0].close()
    assert (await waiting).usage.completion_tokens == 3
    await streams[1].close()
    await plain.wait_idle()


async def test_speculation_chooses_the_server(plain: LlamaServer, drafting: LlamaServer) -> None:
    """The gateway sends a request to the plain or the drafting server by its speculation mode."""
    upstreams = at(plain.url, drafting.url)
    async with running(backend="openai", upstream=upstreams) as gateway, client(gateway) as http:
        request = {"prompt": "def f(x):", "max_tokens": 60, "temperature": 0.0}
        for worker in gateway.node.fleet.workers:  # a counter is 0 before the first draft
            await http.post("/v1/completions", json=request)
            await worker.backend.poll()
        responses = {}
        for mode, pool in (("off", "plain"), ("auto", "speculating")):
            drafts = drafting.metric("spec_decode_num_drafts_total")
            body = {**request, "speculation": {"mode": mode}}
            response = await http.post("/v1/completions", json=body)
            assert response.headers["x-speculation-pool"] == pool
            drafted = drafting.metric("spec_decode_num_drafts_total") > drafts
            assert drafted == (mode == "auto")
            responses[mode] = response.json()["choices"][0]["text"]
        assert responses["off"] == responses["auto"] != ""
        worker = gateway.node.fleet.workers[1].backend
        await worker.poll()
        load = worker.load()
    assert load.proposers == ("upstream",)
    assert load.acceptance > 0.6, "most drafts of a model by itself survive"
    assert 1.0 < load.draft_tokens <= 4.0


async def test_restarted_server_serves_again(model: Path) -> None:
    """Requests fail while the server is down and succeed after its restart."""
    with llama_server(model) as first:
        worker = OpenAIUpstream(
            WorkerConfig(upstream=UpstreamSettings(url=first.url)), probe_s=0.05
        )
        async with (
            running(backends=[worker]) as gateway,
            openai_client(gateway.url) as api,
        ):
            stream = await api.completions.create(model="m", prompt="x", stream=True, **ENDLESS)
            chunks = aiter(stream)
            await anext(chunks)
            first.process.kill()
            first.process.wait()
            with pytest.raises(openai.APIError, match="the upstream failed"):
                async for _ in chunks:
                    pass
            await until(lambda: gateway.node.fleet.outage is not None)
            with pytest.raises(openai.InternalServerError) as failed:
                await api.completions.create(model="m", prompt="x", max_tokens=2)
            assert failed.value.code == "upstream_unavailable"
            with llama_server(model, port=int(first.url.rpartition(":")[2])):
                await until(lambda: gateway.node.fleet.outage is None)
                response = await api.completions.create(model="m", prompt="x", max_tokens=2)
                assert response.usage.completion_tokens == 2
