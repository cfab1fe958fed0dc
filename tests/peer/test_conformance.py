"""Workers of other nodes keep the contract of backends and give the same texts."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from draftgate.backends.delta_reader import generate
from draftgate.backends.errors import RequestRejected
from draftgate.backends.peer.backend import PeerBackend
from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.testing import check_backend, collect, make_request
from draftgate.backends.types import GrammarKind, GrammarSpec, Pace, ResumedChoice
from draftgate.backends.worker_config import WorkerConfig
from tests.gateway.harness import (
    PATIENCE_S,
    ScriptedBackend,
    is_idle,
    load_of,
    needs_engine,
    running,
    until,
)
from tests.peer.harness import SLOW, linked_to

ENGINE = {"backend": "engine", "max_model_len": 512, "kv_bytes": 4 << 20, "threads": 1}


async def test_peer_with_simulator_passes_conformance_suite() -> None:
    """A simulator on a peer passes the suite, and the peer is idle afterwards."""
    async with running() as where:
        await check_backend(PeerBackend(where.url, None))
        await until(lambda: is_idle(where.node))


@pytest.mark.long
@needs_engine
async def test_peer_with_engine_passes_conformance_suite() -> None:
    """An engine on a peer passes the suite with drafts, resumes and embeddings."""
    async with running(**ENGINE) as where:
        await check_backend(PeerBackend(where.url, None))
        await until(lambda: is_idle(where.node))


async def test_card_and_tokenizer_are_those_of_the_worker() -> None:
    """A linked backend has the same card, checks and tokenizer as the remote worker."""
    messages = [{"role": "user", "content": "héllo"}]
    async with running(max_model_len=300) as where, linked_to(where.url) as backend:
        peer = where.node.fleet.workers[0].generating
        assert backend.card == peer.card
        assert backend.epoch == where.node.fleet.workers[0].epoch
        assert backend.tokenizer.encode("def f(x):") == peer.tokenizer.encode("def f(x):")
        assert backend.tokenizer.texts[5] == peer.tokenizer.texts[5]
        rendered = [each.tokenizer.render_chat(messages) for each in (backend, peer)]
        assert rendered[0] == rendered[1]
        for each in (backend, peer):
            with pytest.raises(RequestRejected) as refused:
                each.check(make_request(backend, max_tokens=300))
            assert refused.value.limit_tokens == 300


async def test_texts_equal_those_of_a_local_worker() -> None:
    """A remote worker generates the same texts as a local worker for several seeds and numbers of
    choices."""
    local = SimBackend(WorkerConfig())
    await local.start()
    async with running() as where, linked_to(where.url) as backend:
        generation = [make_request(local, n=1 + seed % 3, seed=seed) for seed in range(6)]
        peer = await asyncio.gather(*(collect(backend, request) for request in generation))
        assert peer == [await collect(local, request) for request in generation]
    await local.stop()


async def test_request_begun_locally_is_resumed_by_peer() -> None:
    """A peer continues the output of a local worker from any token with the same tokens."""
    local = SimBackend(WorkerConfig())
    await local.start()
    async with running() as where, linked_to(where.url) as backend:
        generation = make_request(local, n=2, max_tokens=12)
        first, second = await collect(local, generation)
        for done in range(12):
            begun = (ResumedChoice(1, second.token_ids[:done]),)
            again = replace(generation, request_id=f"again-{done}", resumed=begun)
            (rest,) = await collect(backend, again)
            assert rest.token_ids == second.token_ids[done:]
            assert second.text.endswith(rest.text)
        assert first.token_ids != second.token_ids
    await local.stop()


@pytest.mark.parametrize("read", [True, False], ids=["read", "unread"])
async def test_closing_a_stream_frees_memory_at_the_peer(read: bool) -> None:
    """When the gateway closes a stream, the peer frees the request's memory, before and during
    decoding."""
    async with running(profile=SLOW) as where, linked_to(where.url) as backend:
        async with aclosing(generate(backend, make_request(backend, max_tokens=8000))) as stream:
            if read:
                await anext(stream)
                assert load_of(where.node).running == 1
        await until(lambda: is_idle(where.node))
        await until(lambda: backend.load().kv_blocks_free == backend.load().kv_blocks_total)


async def test_stopping_the_gateway_cancels_its_requests(scripted: ScriptedBackend) -> None:
    """When a connection ends, the peer cancels all requests of the connection."""
    async with running(backends=[scripted]) as where, linked_to(where.url) as backend:
        for _ in range(3):
            generate(backend, make_request(backend))
        requests = {(await scripted.submitted.get()).request_id for _ in range(3)}
        await backend.stop()
        async with asyncio.timeout(PATIENCE_S):
            assert {await scripted.abandoned.get() for _ in range(3)} == requests
        assert is_idle(where.node)


async def test_pace_set_during_the_check_takes_effect(scripted: ScriptedBackend) -> None:
    """The peer applies a pace that arrives while the peer validates the request."""
    async with running(backends=[scripted]) as where, linked_to(where.url) as backend:
        generation = make_request(backend)
        async with aclosing(generate(backend, generation)):
            backend.set_pace(generation.request_id, Pace.SPARING)
            backend.set_pace(generation.request_id, Pace.PAUSED)
            came = await scripted.submitted.get()
            await until(lambda: scripted.paces == [(came.request_id, Pace.PAUSED)])


async def test_each_worker_of_a_node_has_its_own_address() -> None:
    """Every worker has its own address, and the address after the last worker does not exist."""
    async with running(devices=(0, 1)) as where:
        for number in (0, 1):
            address = f"{where.url}/peer/v1/workers/{number}"
            async with (
                linked_to(address) as backend,
                aclosing(generate(backend, make_request(backend))) as stream,
            ):
                await anext(stream)
                assert load_of(where.node, number).running == 1
                assert load_of(where.node, 1 - number).running == 0
            await until(lambda: is_idle(where.node))


@pytest.mark.long
@needs_engine
async def test_grammars_and_texts_equal_those_of_a_local_engine() -> None:
    """The backend checks grammars locally, and texts are the same as from a local engine."""
    regex = GrammarSpec(GrammarKind.REGEX, "(ab|ba){3,9}")
    async with running(**ENGINE) as where, linked_to(where.url) as backend:
        local = where.node.fleet.workers[0].generating
        for number, grammar in enumerate([None, regex]):
            generation = replace(make_request(backend, n=2, max_tokens=24), grammar=grammar)
            backend.check(generation)
            local_output = await collect(local, replace(generation, request_id=f"here-{number}"))
            assert await collect(backend, generation) == local_output
        broken = replace(generation, grammar=GrammarSpec(GrammarKind.REGEX, "("))
        with pytest.raises(RequestRejected, match="regular expression"):
            backend.check(broken)
