"""llama.cpp's server as an upstream, plain and speculating."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest
from openai import AsyncOpenAI

from draftgate.backends.openai.upstream import OpenAIUpstream
from draftgate.backends.upstream_testing import check_upstream
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.app import Listening
from tests.gateway.harness import client, running, until
from tests.gateway.llama_server import SLOT_TOKENS, SLOTS, LlamaServer, find_server, llama_server
from tests.gateway.random_gguf import write_random_gguf

pytestmark = pytest.mark.skipif(find_server() is None, reason="no llama-server, or no gguf package")

ENDLESS = {"max_tokens": SLOT_TOKENS - 100, "extra_body": {"ignore_eos": True}}
SPECULATING = ("--spec-type", "draft-simple", "--spec-draft-n-max", "3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with random weights."""
    path = tmp_path_factory.mktemp("gguf") / "random.gguf"
    write_random_gguf(path)
    return path


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[LlamaServer]:
    """Yield a server that never drafts."""
    with llama_server(model) as server:
        yield server


@pytest.fixture(scope="module")
def drafting(model: Path) -> Iterator[LlamaServer]:
    """Yield a server that drafts with the model itself, so that most drafts are accepted."""
    with llama_server(model, *SPECULATING, "--spec-draft-model", str(model)) as server:
        yield server


@pytest.fixture
async def where(plain: LlamaServer) -> AsyncIterator[Listening]:
    """Yield a node in front of the plain server, without work from other tests."""
    await plain.settled()
    async with running(backend="openai", upstream=(plain.url,)) as listening:
        yield listening


@pytest.fixture
async def api(where: Listening) -> AsyncIterator[AsyncOpenAI]:
    """Yield OpenAI's client for the node."""
    async with AsyncOpenAI(base_url=f"{where.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


async def test_upstream_passes_conformance_suite(plain: LlamaServer) -> None:
    """The suite runs against llama.cpp's server."""
    await check_upstream(OpenAIUpstream(WorkerConfig(upstream=plain.url), poll_s=3600.0))


async def test_whole_and_streamed_texts_are_equal(where: Listening, api: AsyncOpenAI) -> None:
    """Completions and chat give the same text and usage in both forms."""
    assert where.node.model_name.endswith("random.gguf")
    common = {"model": where.node.model_name, "max_tokens": 24, "temperature": 0.0}
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
    answer = await api.chat.completions.create(**common, messages=messages)
    stream = await api.chat.completions.create(**common, messages=messages, stream=True)
    pieces = [c.choices[0].delta.content or "" async for c in stream if c.choices]
    assert "".join(pieces) == answer.choices[0].message.content != ""


async def test_closed_stream_frees_its_slot(
    where: Listening, api: AsyncOpenAI, plain: LlamaServer
) -> None:
    """The engine stops long before the end, and the gateway holds nothing."""
    before = plain.metric("tokens_predicted_total")
    stream = await api.completions.create(
        model=where.node.model_name, prompt="x", stream=True, **ENDLESS
    )
    await anext(aiter(stream))
    assert plain.metric("requests_processing") == 1
    await stream.close()
    await plain.settled()
    await until(lambda: where.node.dispatcher.in_flight == 0)
    assert plain.metric("tokens_predicted_total") - before < ENDLESS["max_tokens"]


async def test_abandoned_whole_answer_frees_its_slot(
    where: Listening, api: AsyncOpenAI, plain: LlamaServer
) -> None:
    """The client leaves before anything has arrived."""
    before = plain.metric("tokens_predicted_total")
    asking = asyncio.create_task(
        api.completions.create(model=where.node.model_name, prompt="x", **ENDLESS)
    )
    await until(lambda: plain.metric("requests_processing") == 1)
    asking.cancel()
    await plain.settled()
    await until(lambda: where.node.dispatcher.in_flight == 0)
    assert plain.metric("tokens_predicted_total") - before < ENDLESS["max_tokens"]


async def test_server_errors_reach_the_client(where: Listening, api: AsyncOpenAI) -> None:
    """An invalid field and a prompt that is too long give the server's own messages."""
    ask = {"model": where.node.model_name, "max_tokens": 4}
    with pytest.raises(openai.BadRequestError, match="must be number"):
        await api.completions.create(**ask, prompt="x", temperature="hot")
    with pytest.raises(openai.BadRequestError, match="context size"):
        await api.completions.create(**ask, prompt="x y " * SLOT_TOKENS)
    assert where.node.fleet.outage is None


async def test_slots_and_load_are_read(
    where: Listening, api: AsyncOpenAI, plain: LlamaServer
) -> None:
    """Slots and context need no setting, and the work of other clients shows."""
    worker = where.node.fleet.workers[0].backend
    assert (worker.load().max_sequences, worker.card.max_model_len) == (SLOTS, SLOT_TOKENS)
    assert worker.load().age_s is not None
    assert worker.load().proposers == ()
    async with AsyncOpenAI(base_url=f"{plain.url}/v1", api_key="x", max_retries=0) as past_us:
        asks = [past_us.completions.create(model="m", prompt="x", **ENDLESS) for _ in range(3)]
        asking = [asyncio.create_task(ask) for ask in asks]
        await until(lambda: plain.metric("requests_deferred") == 1)
        await worker.poll()
        load = worker.load()
        assert (load.running, load.waiting, load.others) == (SLOTS, 1, SLOTS + 1)
        for task in asking:
            task.cancel()
        await plain.settled()
    await worker.poll()
    assert worker.load().others == 0


async def test_requests_without_a_slot_wait_in_the_gateway(
    where: Listening, api: AsyncOpenAI, plain: LlamaServer
) -> None:
    """None waits at the engine."""
    ask = {"model": where.node.model_name, "prompt": "x", **ENDLESS}
    streams = [await api.completions.create(**ask, stream=True) for _ in range(SLOTS)]
    waiting = asyncio.create_task(api.completions.create(**{**ask, "max_tokens": 3}))
    await until(lambda: len(where.node.dispatcher.queue) == 1)
    assert plain.metric("requests_deferred") == 0
    await streams[0].close()
    assert (await waiting).usage.completion_tokens == 3
    await streams[1].close()
    await plain.settled()


async def test_speculation_chooses_the_server(plain: LlamaServer, drafting: LlamaServer) -> None:
    """Counters show which server drafts; wishes are kept, and texts are the same."""
    upstreams = (plain.url, drafting.url)
    async with running(backend="openai", upstream=upstreams) as where, client(where) as http:
        ask = {"prompt": "def f(x):", "max_tokens": 60, "temperature": 0.0}
        for worker in where.node.fleet.workers:  # its counters are 0 before the first draft
            await http.post("/v1/completions", json=ask)
            await worker.backend.poll()
        answers = {}
        for mode, pool in (("off", "plain"), ("auto", "speculating")):
            drafts = drafting.metric("spec_decode_num_drafts_total")
            body = {**ask, "speculation": {"mode": mode}}
            answer = await http.post("/v1/completions", json=body)
            assert answer.headers["x-speculation-pool"] == pool
            drafted = drafting.metric("spec_decode_num_drafts_total") > drafts
            assert drafted == (mode == "auto")
            answers[mode] = answer.json()["choices"][0]["text"]
        assert answers["off"] == answers["auto"] != ""
        worker = where.node.fleet.workers[1].backend
        await worker.poll()
        load = worker.load()
    assert load.proposers == ("upstream",)
    assert load.acceptance > 0.6, "most drafts of a model by itself survive"
    assert 1.0 < load.draft_tokens <= 4.0


async def test_restarted_server_serves_again(model: Path) -> None:
    """Its stream ends with one error event, the next request gets 503, later ones a text."""
    with llama_server(model) as first:
        worker = OpenAIUpstream(WorkerConfig(upstream=first.url), probe_s=0.05)
        async with (
            running(backends=[worker]) as where,
            AsyncOpenAI(base_url=f"{where.url}/v1", api_key="x", max_retries=0) as api,
        ):
            stream = await api.completions.create(model="m", prompt="x", stream=True, **ENDLESS)
            chunks = aiter(stream)
            await anext(chunks)
            first.process.kill()
            first.process.wait()
            with pytest.raises(openai.APIError, match="the upstream failed"):
                async for _ in chunks:
                    pass
            await until(lambda: where.node.fleet.outage is not None)
            with pytest.raises(openai.InternalServerError) as failed:
                await api.completions.create(model="m", prompt="x", max_tokens=2)
            assert failed.value.code == "upstream_unavailable"
            with llama_server(model, port=int(first.url.rpartition(":")[2])):
                await until(lambda: where.node.fleet.outage is None)
                answer = await api.completions.create(model="m", prompt="x", max_tokens=2)
                assert answer.usage.completion_tokens == 2
