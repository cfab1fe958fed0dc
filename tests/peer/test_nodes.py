"""A node without its own worker, connected to other nodes with `--backend peer --upstream URL`."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.gateway.app import StartError, build_node, drain, start_workers
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.lifecycle import NodeState
from tests.gateway.harness import (
    ScriptedBackend,
    client,
    events,
    is_idle,
    open_stream,
    running,
    until,
)
from tests.gateway.tcp_proxy import proxied
from tests.peer.harness import SLOW
from tests.upstream_settings import at

BODY = {"prompt": "def f(x):", "max_tokens": 24, "seed": 3, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": 3}


async def test_clients_receive_the_responses_of_a_local_worker() -> None:
    """Clients receive the same text, usage, model and tokens as from the node with the worker."""
    async with (
        running() as peer,
        running(backend="peer", upstream=at(peer.url)) as where,
        client(peer) as direct,
        client(where) as http,
    ):
        for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", CHAT)):
            theirs = (await direct.post(path, json=body)).json()
            ours = (await http.post(path, json=body)).json()
            assert ours["choices"] == theirs["choices"]
            assert ours["usage"]["completion_tokens"] == theirs["usage"]["completion_tokens"]
            streamed = await http.post(path, json={**body, "stream": True})
            assert events(streamed.text)[-1] == "[DONE]"
        tokens = {"prompt": "def f(x): return x"}
        for path, body in (("/tokenize", tokens), ("/detokenize", {"tokens": [5, 6, 7]})):
            assert (await http.post(path, json=body)).json() == (
                await direct.post(path, json=body)
            ).json()
        models = (await http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in models] == [peer.node.served.name]
        too_long = {**BODY, "max_tokens": 1 << 20}
        refused = await http.post("/v1/completions", json=too_long)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert is_idle(peer.node)
        assert where.node.in_flight == 0


async def test_disconnected_client_frees_memory_at_the_peer() -> None:
    """The remote sequence ends when the client closes its HTTP stream."""
    body = {**BODY, "max_tokens": 4000, "stream": True}
    async with (
        running(profile=SLOW) as peer,
        running(backend="peer", upstream=at(peer.url)) as where,
        client(where) as http,
    ):
        async with open_stream(http, "/v1/completions", body):
            assert not is_idle(peer.node)
        await until(lambda: is_idle(peer.node))
        await until(lambda: where.node.in_flight == 0)


async def test_requests_of_peers_count_against_capacity() -> None:
    """While requests of another node fill the worker, requests of the node's own clients wait."""
    async with (
        running(max_num_seqs=1, profile=SLOW) as peer,
        running(backend="peer", upstream=at(peer.url)) as where,
        client(peer) as direct,
        client(where) as http,
    ):
        long = {**BODY, "max_tokens": 4000, "stream": True}
        async with open_stream(http, "/v1/completions", long):
            direct_request = asyncio.create_task(direct.post("/v1/completions", json=BODY))
            await until(lambda: len(peer.node.dispatcher.queue) == 1)
        assert (await direct_request).status_code == 200


async def test_node_survives_the_outage_of_all_peers() -> None:
    """The node is not ready during the outage and serves again with the first peer."""
    async with (
        running() as peer,
        proxied(peer.url) as proxy,
        running(backend="peer", upstream=at(proxy.url)) as where,
        client(where) as http,
    ):
        proxy.cut(refuse=True)
        (worker,) = where.node.fleet.workers
        await until(lambda: worker.backend.failure is not None)
        ready = await http.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "unavailable")
        assert "the peer is lost" in ready.json()["reason"]
        refused = await http.post("/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "worker_failed"
        assert "127.0.0.1" not in ready.text + refused.text
        assert (await http.get("/health")).status_code == 200
        proxy.accept()
        await until(lambda: worker.backend.failure is None)
        assert where.node.state is NodeState.READY
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200


async def test_draining_peer_gets_no_new_requests() -> None:
    """The second peer serves every request while the first peer restarts."""
    async with (
        running() as first,
        running() as second,
        running(backend="peer", upstream=at(first.url, second.url)) as where,
        client(where) as http,
    ):
        workers = where.node.fleet.workers
        draining = asyncio.create_task(drain(first.node, 30))
        await until(lambda: workers[0].backend.failure is not None)
        responses = [http.post("/v1/completions", json=BODY) for _ in range(8)]
        assert {response.status_code for response in await asyncio.gather(*responses)} == {200}
        assert await draining


async def test_peers_with_different_models_fail_the_start(tmp_path: Path) -> None:
    """The start fails with an error that names both models."""
    other = tmp_path / "another"
    shutil.copytree(SHIPPED_MODEL, other)
    async with running() as first, running(model=str(other)) as second:
        with pytest.raises(StartError, match="different models: another, draftgate-demo"):
            async with running(backend="peer", upstream=at(first.url, second.url)):
                pass


async def test_node_offers_only_its_own_workers() -> None:
    """A node does not offer the workers of its peers, which prevents request loops."""
    async with (
        running() as peer,
        running(backend="peer", upstream=at(peer.url)) as where,
        client(where) as http,
    ):
        assert (await http.get("/peer/v1/workers/0")).status_code == 404
        with pytest.raises(StartError, match="does not accept peers"):
            async with running(backend="peer", upstream=at(where.url)):
                pass


async def test_worker_number_beyond_the_last_is_not_found(scripted: ScriptedBackend) -> None:
    """The path of a worker number beyond the last worker does not exist."""
    async with running(backends=[scripted]) as peer:
        with pytest.raises(StartError, match="does not accept peers"):
            async with running(backend="peer", upstream=at(f"{peer.url}/peer/v1/workers/1")):
                pass


def test_missing_address_fails_the_start() -> None:
    """The error names the missing setting."""
    config = ServeConfig(backend="peer")
    node = build_node(config)
    with pytest.raises(StartError, match="needs --upstream URL"):
        asyncio.run(start_workers(node))


def test_peer_backend_does_not_import_torch() -> None:
    """A gateway with the peer backend does not import torch."""
    code = (
        "import sys; from tests.upstream_settings import at\n"
        "from draftgate.backends.worker_config import WorkerConfig\n"
        "from draftgate.backends.registry import backend_factory\n"
        "backend_factory('peer')(WorkerConfig(upstream=at('http://127.0.0.1:1')[0]))\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
