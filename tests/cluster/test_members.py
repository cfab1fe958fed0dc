"""Members of a pool: nodes that join, leave, restart, or are ignored."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from draftgate.gateway import fleet
from draftgate.gateway.app import Listening, StartError, build_node, drain, start_workers
from draftgate.gateway.cluster.access import advertised_url, is_local
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.dispatch.recovery import RECOVERY_S
from draftgate.gateway.lifecycle import NodeState
from draftgate.gateway.state.commands import ListWorkers
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.gateway.state.values import Snapshot, new_epoch
from tests.gateway.harness import (
    JOIN,
    PATIENCE_S,
    ScriptedBackend,
    client,
    events,
    is_idle,
    running,
    until,
)
from tests.gateway.redis_server import free_port
from tests.gateway.tcp_proxy import proxied
from tests.peer.harness import SLOW
from tests.upstream_settings import at

BODY = {"prompt": "def f(x):", "max_tokens": 24, "seed": 3, "ignore_eos": True}
PATH = "/v1/completions"


class HidingStore(MemoryStore):
    """A store that hides its workers from readers while `forgets` is true."""

    forgets = False

    def forget(self) -> None:
        """Delete all data."""
        self.__init__()

    def list_workers(self, command: ListWorkers) -> Snapshot:
        snapshot = super().list_workers(command)
        return replace(snapshot, workers=()) if self.forgets else snapshot


@pytest.fixture
def store() -> HidingStore:
    """The store that all nodes of a test share."""
    return HidingStore()


@asynccontextmanager
async def member(store: MemoryStore, **settings: Any) -> AsyncIterator[Listening]:
    """Yield a node of the pool that has reported its worker."""
    async with running(store=store, join=JOIN, **settings) as where:
        await where.node.heartbeat.beat()
        yield where


def ids(where: Listening) -> list[str]:
    """Return the ids of the workers that a node may send requests to."""
    return sorted(worker.worker_id for worker in where.node.fleet.serving)


async def until_linked(where: Listening, count: int) -> None:
    """Let a node read the store until it has this many workers, and fail after a while."""
    async with asyncio.timeout(PATIENCE_S):
        while len(where.node.fleet.serving) != count:
            await where.node.heartbeat.beat()
            await asyncio.sleep(0.01)


async def test_a_gateway_without_a_worker_uses_the_workers_of_the_pool(
    store: HidingStore,
) -> None:
    """The gateway returns the texts of a pool's worker and leaves no request on any node."""
    async with (
        member(store) as worker_node,
        member(store) as other,
        member(store, no_worker=True) as where,
        client(worker_node) as direct,
        client(where) as http,
    ):
        await until_linked(where, 2)
        assert ids(where) == sorted(w.node.fleet.own[0].worker_id for w in (worker_node, other))
        theirs = (await direct.post(PATH, json=BODY)).json()["choices"]
        assert (await http.post(PATH, json=BODY)).json()["choices"] == theirs
        streamed = await http.post(PATH, json={**BODY, "stream": True})
        assert events(streamed.text)[-1] == "[DONE]"
        assert (await http.get("/ready")).status_code == 200
        await until(lambda: is_idle(worker_node.node) and is_idle(other.node))
        assert sum(view.leased_tokens for view in (await store.call(ListWorkers())).workers) == 0


async def test_a_gateway_is_not_ready_until_a_worker_joins(store: HidingStore) -> None:
    """The gateway is not ready, and gives a reason, until the first worker joins."""
    async with running(store=store, join=JOIN, no_worker=True, start=False) as where:
        starting = asyncio.create_task(start_workers(where.node))
        async with client(where) as http:
            assert (await http.get("/health")).json()["workers"] == []
            assert (await http.get("/ready")).status_code == 503
            async with member(store):
                await starting
                assert (await http.get("/ready")).status_code == 200
                assert (await http.post(PATH, json=BODY)).status_code == 200
        assert where.node.state is NodeState.READY


async def test_every_node_uses_all_workers(store: HidingStore) -> None:
    """Two nodes use each other's workers, and each node reports only its own worker."""
    async with member(store) as first, member(store) as other:
        await until_linked(first, 2)
        await until_linked(other, 2)
        assert ids(first) == ids(other)
        reports = {
            view.worker_id: view.report for view in (await store.call(ListWorkers())).workers
        }
        assert sorted(reports) == ids(first)
        for where in (first, other):
            worker = where.node.fleet.own[0]
            reported = reports[worker.worker_id]
            assert reported.address == f"{where.url}/peer/v1/workers/0"
            assert reported.epoch == worker.epoch


async def test_a_draining_worker_finishes_its_streams_and_gets_no_requests(
    store: HidingStore,
) -> None:
    """The gateway removes a draining worker once its streams have ended."""
    body = {**BODY, "max_tokens": 40, "stream": True}
    async with (
        member(store, profile=SLOW) as worker_node,
        member(store, no_worker=True) as where,
        client(where) as http,
        http.stream("POST", PATH, json=body) as response,
    ):
        lines = response.aiter_lines()
        await anext(lines)
        async with member(store) as other:
            await until_linked(where, 2)
            await worker_node.node.heartbeat.leave()
            draining = asyncio.create_task(drain(worker_node.node, PATIENCE_S))
            await until(lambda: ids(where) == ids(other)[:1])
            for _ in range(3):
                assert (await http.post(PATH, json=BODY)).status_code == 200
            assert [line async for line in lines if line][-1] == "data: [DONE]"
            assert await draining
            await where.node.heartbeat.beat()
            assert [worker.worker_id for worker in where.node.fleet.workers] == ids(other)


async def test_a_long_stream_survives_any_number_of_restarts(store: HidingStore) -> None:
    """A worker that leaves in order does not count against a request's resumes."""
    body = {"prompt": [1] * 10, "max_tokens": 50, "stream": True}
    async with (
        running(store=store, join=JOIN, no_worker=True, start=False) as where,
        client(where) as http,
        AsyncExitStack() as present,
    ):
        scripted = ScriptedBackend()
        worker_node = await present.enter_async_context(member(store, backends=[scripted]))
        await start_workers(where.node)
        response_task = asyncio.create_task(http.post(PATH, json=body))
        # The request loses more workers in order than it may lose by failure.
        for word in ("one", "two", "three", "four", "five"):
            request = await scripted.submitted.get()
            scripted.emit(request, word)
            await until(lambda: where.node.fleet.serving[0].usage.started == 1)
            following = ScriptedBackend()
            successor = await present.enter_async_context(member(store, backends=[following]))
            await until_linked(where, 2)
            await worker_node.node.heartbeat.leave()
            assert not await drain(worker_node.node, 0.0)
            await worker_node.node.stop()
            scripted, worker_node = following, successor
        request = await scripted.submitted.get()
        assert [len(choice.output_ids) for choice in request.resumed] == [5]
        scripted.emit(request, "six", last=True)
        response = await response_task
        assert events(response.text)[-1] == "[DONE]"
        assert response.text.count("error") == 0


async def test_a_broken_link_that_is_restored_loses_no_stream(
    store: HidingStore, scripted: ScriptedBackend
) -> None:
    """A stream continues when the broken link to the only worker is restored."""
    port = free_port()
    body = {"prompt": [1] * 10, "max_tokens": 50, "stream": True}
    async with (
        proxied(f"http://127.0.0.1:{port}") as proxy,
        member(store, backends=[scripted], port=port, advertise=proxy.url),
        member(store, no_worker=True) as where,
        client(where) as http,
    ):
        response_task = asyncio.create_task(http.post(PATH, json=body))
        scripted.emit(await scripted.submitted.get(), "one")
        await until(lambda: where.node.fleet.workers[0].usage.started == 1)
        proxy.cut(refuse=True)
        await until(lambda: not where.node.fleet.serving)
        await scripted.abandoned.get()  # The worker ended the sequence with its connection.
        proxy.accept()
        resumed_request = await scripted.submitted.get()
        assert [choice.output_ids for choice in resumed_request.resumed] == [(0,)]
        scripted.emit(resumed_request, "two", last=True)
        assert events((await response_task).text)[-1] == "[DONE]"


async def test_a_restarted_worker_replaces_its_earlier_epoch(store: HidingStore) -> None:
    """A worker restarted at the same address has the same id and a greater epoch."""
    async with member(store, no_worker=True, start=False) as where:
        starting = asyncio.create_task(start_workers(where.node))
        async with member(store) as worker_node:
            await starting
            (before,) = where.node.fleet.workers
            port = worker_node.node.port
        async with member(store, port=port) as worker_node, client(where) as http:
            await until(lambda: before.backend.failure is not None)
            async with asyncio.timeout(PATIENCE_S):
                while before in where.node.fleet.workers or not where.node.fleet.serving:
                    await where.node.heartbeat.beat()
                    await asyncio.sleep(0.01)
            (after,) = where.node.fleet.workers
            assert after.worker_id == before.worker_id == worker_node.node.fleet.own[0].worker_id
            assert after.epoch > before.epoch
            assert (await http.post(PATH, json=BODY)).status_code == 200


async def test_a_worker_that_restarts_after_its_clock_went_back_is_used(
    store: HidingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker with an earlier epoch than before its restart joins once the store lists it."""
    async with member(store, no_worker=True, start=False) as where:
        starting = asyncio.create_task(start_workers(where.node))
        async with member(store) as worker_node:
            await starting
            (before,) = where.node.fleet.workers
            port = worker_node.node.port
        await until(lambda: before.backend.failure is not None)
        store.forget()  # as it does after a minute without a report
        monkeypatch.setattr(fleet, "new_epoch", lambda now_s, nonce: new_epoch(1.0, nonce))
        async with member(store, port=port):
            await until_linked(where, 1)
            (after,) = where.node.fleet.workers
            assert after.epoch < before.epoch


async def test_linked_workers_stay_when_the_store_forgets_them(store: HidingStore) -> None:
    """A linked worker stays when the store loses it, and leaves when its link is lost as well."""
    async with member(store, no_worker=True, start=False) as where:
        starting = asyncio.create_task(start_workers(where.node))
        async with member(store) as worker_node:
            await starting
            store.forgets = True
            await where.node.heartbeat.beat()
            assert ids(where) == ids(worker_node)
        await until(lambda: not where.node.fleet.serving)
        await where.node.heartbeat.beat()
        assert where.node.fleet.workers == ()
        async with client(where) as http:
            assert (await http.get("/ready")).json()["reason"] == "no worker is available"
            assert (await http.post(PATH, json=BODY)).status_code == 503
            assert (await http.get("/v1/models")).status_code == 200


async def test_workers_with_a_shorter_context_are_ignored(
    store: HidingStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The gateway logs a worker with a shorter context once and ignores it."""
    with caplog.at_level(logging.ERROR, "draftgate"):
        async with member(store) as where, member(store, max_model_len=100):
            for _ in range(3):
                await where.node.heartbeat.beat()
            assert len(where.node.fleet.workers) == 1
    reported = [record.draftgate_fields["why"] for record in caplog.records]
    assert reported == ["the worker's context is 100 tokens, not 8192"]


async def test_the_first_worker_determines_the_model_of_a_gateway(store: HidingStore) -> None:
    """A later worker with another model is no worker of the first model, even when none is left."""
    first, other = ScriptedBackend(), ScriptedBackend()
    other.card = replace(other.card, model_id="another")
    async with running(store=store, join=JOIN, no_worker=True, start=False) as where:
        async with member(store, backends=[first]) as worker_node:
            await start_workers(where.node)
            await worker_node.node.heartbeat.leave()
        async with member(store, backends=[other]):
            async with asyncio.timeout(PATIENCE_S):
                while where.node.fleet.workers:
                    await where.node.heartbeat.beat()
                    await asyncio.sleep(0.01)
            for _ in range(3):
                await where.node.heartbeat.beat()
                await asyncio.sleep(0.01)
            assert where.node.fleet.workers == ()
            assert where.node.fleet.card.model_id == "scripted"
        async with member(store, backends=[ScriptedBackend()]):
            await until_linked(where, 1)


async def test_a_stopping_node_ends_its_streams_at_once(
    store: HidingStore, scripted: ScriptedBackend
) -> None:
    """Each stream receives one error event, also on workers of other nodes."""
    body = {"prompt": [1] * 10, "max_tokens": 50, "stream": True}
    async with (
        member(store, backends=[scripted]),
        running(store=store, join=JOIN, no_worker=True) as where,
        client(where) as http,
    ):
        response_task = asyncio.create_task(http.post(PATH, json=body))
        scripted.emit(await scripted.submitted.get(), "one")
        await until(lambda: where.node.fleet.workers[0].usage.started == 1)
        begun_s = asyncio.get_running_loop().time()
        await where.node.stop()
        reported = events((await response_task).text)
        assert asyncio.get_running_loop().time() - begun_s < RECOVERY_S / 3
        assert sum("error" in event for event in reported if isinstance(event, dict)) == 1


async def test_a_link_that_is_refused_for_a_while_is_restored(
    store: HidingStore, scripted: ScriptedBackend
) -> None:
    """The gateway links a worker again after a temporary 404 response."""
    async with (
        member(store, backends=[scripted]) as worker_node,
        running(store=store, join=JOIN, no_worker=True) as where,
    ):
        (worker,) = where.node.fleet.workers
        access, worker_node.node.peer_access = worker_node.node.peer_access, None
        worker.backend._link.channel.close()
        await until(
            lambda: worker.backend.failure is not None and "secret" in worker.backend.failure
        )
        worker_node.node.peer_access = access
        await until(lambda: worker.backend.failure is None)
        await where.node.heartbeat.beat()
        assert where.node.fleet.workers == (worker,)


async def test_a_node_fails_with_its_own_worker_although_others_serve(
    store: HidingStore, scripted: ScriptedBackend
) -> None:
    """The node's requests continue on other nodes, and the node reports failure."""
    peer = ScriptedBackend()
    body = {"prompt": [1] * 10, "max_tokens": 5, "stream": True}
    async with (
        member(store, backends=[scripted]) as where,
        client(where) as http,
        member(store, backends=[peer]),
    ):
        response_task = asyncio.create_task(http.post(PATH, json=body))
        request = await scripted.submitted.get()  # The node has no other worker yet.
        await until_linked(where, 2)
        scripted.emit(request, "one")
        scripted.crash("device lost")
        resumed_request = await peer.submitted.get()
        assert [choice.output_ids for choice in resumed_request.resumed] == [(0,)]
        peer.emit(resumed_request, "two", last=True)
        assert events((await response_task).text)[-1] == "[DONE]"
        assert where.node.fleet.failure == "device lost"
        assert where.node.state is NodeState.FAILED


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"no_worker": True}, "--no-worker needs --join"),
        ({"join": JOIN, "no_worker": True, "loras": ("a=b",)}, "--lora cannot be combined with"),
        ({"backend": "peer", "upstream": at("http://x"), "join": JOIN}, "use --no-worker --join"),
        (
            {"backend": "openai", "upstream": at("http://x"), "join": JOIN, "no_worker": True},
            "--no-worker cannot be combined with --backend openai",
        ),
    ],
)
def test_contradicting_settings_are_refused(settings: dict[str, Any], complaint: str) -> None:
    """Contradicting settings raise an error before the node starts."""
    with pytest.raises(StartError, match=complaint):
        build_node(ServeConfig(**settings))


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({"host": "10.1.2.3"}, "http://10.1.2.3:8001"),
        ({"host": "node-7"}, "http://node-7:8001"),
        ({"host": "::1"}, "http://[::1]:8001"),
        ({"host": "0.0.0.0", "join": JOIN}, "http://127.0.0.1:8001"),
        ({"host": "0.0.0.0", "advertise": "https://far.example/"}, "https://far.example"),
    ],
)
async def test_a_node_advertises_an_address_that_others_can_reach(
    settings: dict[str, Any], url: str
) -> None:
    """A node advertises `--advertise`, its listen address, or its local address."""
    assert await advertised_url(ServeConfig(**settings), 8001) == url


async def test_an_unresolvable_store_does_not_prevent_an_address() -> None:
    """The machine's own name gives the address if the store's name does not resolve."""
    config = ServeConfig(host="0.0.0.0", join="redis://no-such-host.invalid")
    assert (await advertised_url(config, 8001)).endswith(":8001")


@pytest.mark.parametrize(
    ("url", "join", "local"),
    [
        ("http://127.0.0.1:1", "redis://10.0.0.1", True),
        ("http://127.0.0.1:1", "redis://127.0.0.1", False),
        ("http://10.0.0.2:1", "redis://10.0.0.1", False),
        ("http://localhost:1", "redis+cluster://10.0.0.1,10.0.0.2", True),
        ("http://127.0.0.1:1", "unix:///run/redis.sock", False),
    ],
)
def test_a_loopback_address_with_a_remote_store_is_detected(
    url: str, join: str, local: bool
) -> None:
    """The check detects a loopback address beside a remote store."""
    assert is_local(url, join) is local


async def test_upstreams_are_not_offered_to_other_nodes(store: HidingStore) -> None:
    """A node with upstreams publishes no address for other nodes."""
    async with member(store) as worker_node:
        settings = {"backend": "openai", "upstream": at(worker_node.url)}
        async with member(store, **settings) as where:
            reported = (await store.call(ListWorkers())).workers
            (report,) = [v.report for v in reported if v.worker_id != ids(worker_node)[0]]
            assert report.address == ""
            assert where.node.models[0].members is None
            await worker_node.node.heartbeat.beat()
            assert len(worker_node.node.fleet.workers) == 1


async def test_a_node_that_refuses_peers_publishes_no_address(store: HidingStore) -> None:
    """A node with API keys and no peer secret publishes no address."""
    async with member(store, api_keys=("k" * 20,)) as where:
        (view,) = (await store.call(ListWorkers())).workers
        assert view.report.address == ""
        assert where.node.peer_access is None
