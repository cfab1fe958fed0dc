"""A node that serves the models that are ready while others load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from draftgate.backends.types import ModelCard
from draftgate.backends.worker_config import UpstreamSettings
from draftgate.gateway.app import Listening, start_workers
from draftgate.gateway.lifecycle import NodeState
from tests.gateway.harness import ScriptedBackend, accepted_request, client, running, until
from tests.gateway.upstreams import upstream, whole

TEXTS = "/v1/completions"
TEXT = {"prompt": "x", "max_tokens": 4}


class Loading(ScriptedBackend):
    """A worker that loads until the test opens its gate, and has no card before."""

    def __init__(self, name: str) -> None:
        self._card: ModelCard | None = None
        super().__init__()
        self._loaded = replace(self.card, model_id=name)
        self._card, self.progress = None, 0.0
        self.gate.clear()

    @property
    def card(self) -> ModelCard:
        if self._card is None:
            raise RuntimeError("the backend has not been started")
        return self._card

    @card.setter
    def card(self, card: ModelCard) -> None:
        self._card = card

    async def start(self) -> None:
        await super().start()
        self._card, self.progress = self._loaded, 1.0


@asynccontextmanager
async def loading(
    **settings: Any,
) -> AsyncIterator[tuple[Listening, httpx.AsyncClient, Loading, Loading]]:
    """Run a node whose models `first` and `second` load, in this order."""
    first, second = Loading("first"), Loading("second")
    async with (
        running(
            backends=[first],
            further={"second": second},
            served_model_name=("first",),
            start=False,
            **settings,
        ) as gateway,
        gateway.node.beating(),
        client(gateway) as http,
    ):
        starting = asyncio.create_task(start_workers(gateway.node))
        try:
            yield gateway, http, first, second
        finally:
            first.gate.set()
            second.gate.set()
            await starting
            assert gateway.node.state is NodeState.READY


async def is_loading(http: httpx.AsyncClient, **body: Any) -> bool:
    """Return whether a model is still loading, and check its error."""
    response = await http.post(TEXTS, json={**TEXT, **body})
    if response.status_code != 503:
        return False
    error = response.json()["error"]
    assert error["code"] == "model_loading"
    assert "loading" in error["message"]
    assert int(response.headers["retry-after"]) > 0
    return True


async def completed(http: httpx.AsyncClient, backend: Loading, **body: Any) -> int:
    sent = asyncio.create_task(http.post(TEXTS, json={**TEXT, **body}))
    backend.emit(await accepted_request(backend, sent), "ok", last=True)
    return (await sent).status_code


async def names(http: httpx.AsyncClient) -> list[str]:
    return [one["id"] for one in (await http.get("/v1/models")).json()["data"]]


async def test_each_model_serves_as_soon_as_it_is_loaded() -> None:
    """The first one answers while the second one loads, whose requests get 503 meanwhile."""
    async with loading() as (gateway, http, first, second):
        assert await is_loading(http, model="first")
        assert (await http.get("/ready")).status_code == 503
        first.gate.set()
        await until(lambda: gateway.node.state is NodeState.READY)
        assert await completed(http, first, model="first") == 200
        assert await completed(http, first) == 200
        assert await is_loading(http, model="second")
        assert await names(http) == ["first"]
        ready = await http.get("/ready")
        assert (ready.status_code, ready.json()["progress"]) == (200, 0.5)
        assert (await http.get("/health")).status_code == 200
        for path in ("/metrics", "/workers", "/openapi.json", "/decisions", "/usage"):
            assert (await http.get(path)).status_code == 200, path
        assert (await http.post(TEXTS, json={**TEXT, "model": "third"})).status_code == 404
        second.gate.set()
        await until(lambda: gateway.node.models[1].is_known)
        assert await completed(http, second, model="second") == 200
        assert await names(http) == ["first", "second"]
        assert "progress" not in (await http.get("/ready")).json()


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens", "/v1/embeddings"])
async def test_every_endpoint_says_that_the_model_loads(path: str) -> None:
    """Endpoints without an own task give the same answer."""
    async with loading() as (gateway, http, first, _):
        first.gate.set()
        await until(lambda: gateway.node.state is NodeState.READY)
        text = [{"role": "user", "content": "x"}]
        body = {"model": "second", "prompt": "x", "input": "x", "messages": text}
        response = await http.post(path, json=body)
        assert response.status_code == 503, response.text
        assert "retry-after" in response.headers
        assert "loading" in response.json()["error"]["message"]


async def test_models_of_upstreams_need_not_wait_for_own_ones() -> None:
    """Upstreams serve while all own models load, and requests without a name wait for these."""
    async with upstream(whole) as server:
        server.models = ("remote",)
        servers = (UpstreamSettings(url=server.url),)
        async with loading(upstream=servers) as (gateway, http, _first, _second):
            await until(lambda: gateway.node.state is NodeState.READY)
            assert await names(http) == ["remote"]
            reply = await http.post(TEXTS, json={**TEXT, "model": "remote"})
            assert reply.status_code == 200
            assert await is_loading(http, model="first")
            assert await is_loading(http, model="second")
            assert await is_loading(http)


async def test_fallback_answers_for_a_model_that_loads() -> None:
    """A model that is not loaded yet cannot respond, so the next one of its chain does."""
    async with loading(fallbacks=("second=first",)) as (gateway, http, first, _):
        first.gate.set()
        await until(lambda: gateway.node.state is NodeState.READY)
        sent = asyncio.create_task(http.post(TEXTS, json={**TEXT, "model": "second"}))
        first.emit(await accepted_request(first, sent), "ok", last=True)
        reply = await sent
        assert reply.status_code == 200
        assert reply.headers["x-draftgate-fallback"] == "overloaded"
        assert reply.headers["x-draftgate-model"] == "first"
