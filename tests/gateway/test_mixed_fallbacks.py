"""Fallbacks between a node's own models and those of its upstreams, in any order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from draftgate.backends.errors import (
    AdapterFailed,
    BackendFailed,
    RequestRejected,
    UpstreamFailed,
)
from draftgate.backends.types import Capabilities, Task
from draftgate.backends.worker_config import UpstreamSettings
from draftgate.gateway.app import Listening
from draftgate.gateway.dispatch.upstreams.fallbacks import reason_of
from draftgate.gateway.errors import (
    ContextTooLong,
    Draining,
    Forbidden,
    InvalidRequest,
    ModelNotFound,
    NotOffered,
    Overloaded,
    PreviousResponseNotFound,
    QueueTimeout,
    QuotaExceeded,
    Starting,
    Unsupported,
    UnsupportedTask,
    WorkerFailed,
)
from draftgate.gateway.http import stream
from tests.gateway.harness import (
    ScriptedBackend,
    accepted_request,
    client,
    events,
    is_idle,
    running,
)
from tests.gateway.test_fallbacks import FAILURES, OPENAI_LONG
from tests.gateway.upstreams import (
    DONE,
    LAST,
    TOKEN,
    Handler,
    ScriptedUpstream,
    after,
    refusal,
    stream_of,
    upstream,
    whole,
)

TEXTS = "/v1/completions"
CHAT = "/v1/chat/completions"


def named(name: str, **fields: Any) -> ScriptedBackend:
    """Return a worker of a model."""
    backend = ScriptedBackend()
    backend.card = replace(backend.card, model_id=name, **fields)
    return backend


class Mixed:
    """A node with the own models `first` and `second`, and an upstream with `remote` and `far`."""

    def __init__(
        self, gateway: Listening, http: httpx.AsyncClient, server: ScriptedUpstream
    ) -> None:
        self.gateway, self.http, self.server = gateway, http, server
        self.first, self.second = (
            gateway.node.model_named(name).fleet.workers[0].backend for name in ("first", "second")
        )

    async def answered_by(
        self, backend: ScriptedBackend, path: str = TEXTS, **body: Any
    ) -> httpx.Response:
        """Send a request that a worker answers with one text, and return the response."""
        text = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
        sent = asyncio.create_task(self.http.post(path, json={**text, "max_tokens": 4, **body}))
        backend.emit(await accepted_request(backend, sent), "ok", last=True)
        return await sent


@asynccontextmanager
async def mixed(
    *fallbacks: str,
    remote: Handler = whole,
    first: ScriptedBackend | None = None,
    second: ScriptedBackend | None = None,
    **settings: Any,
) -> AsyncIterator[Mixed]:
    async with upstream(remote) as server:
        server.models = ("remote", "far")
        own = [first or named("first")]
        further = {"second": second or named("second")}
        async with (
            running(
                backends=own,
                further=further,
                upstream=(UpstreamSettings(url=server.url),),
                fallbacks=fallbacks,
                served_model_name=("first", "also-first"),
                **settings,
            ) as gateway,
            client(gateway) as http,
        ):
            yield Mixed(gateway, http, server)


@pytest.mark.parametrize("stream_it", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("failure", FAILURES)
async def test_own_model_gets_what_an_upstream_cannot_answer(failure: str, stream_it: bool) -> None:
    """A worker of the node responds, and headers, metrics, decision and record say why."""
    handler, reason = FAILURES[failure]
    async with mixed("remote=first", remote=handler) as node:
        reply = await node.answered_by(node.first, CHAT, model="remote", stream=stream_it)
        assert reply.status_code == 200, reply.text
        assert "ok" in reply.text
        assert reply.headers["x-draftgate-fallback"] == reason
        assert reply.headers["x-draftgate-model"] == "first"
        metrics = (await node.http.get("/metrics")).text
        labels = f'reason="{reason}",requested="remote",used="first"'
        (series,) = [one for one in metrics.splitlines() if labels in one]
        assert series.endswith(" 1.0")
        decision = (await node.http.get("/decisions")).json()["decisions"][0]
        assert decision["fallback"] == reason
        (record,) = (await node.http.get("/records")).json()["records"]
        assert (record["model"], record["requested_model"]) == ("first", "remote")
        assert record["fallback"] == reason
        for model in ("first", "remote"):
            found = (await node.http.get("/records", params={"model": model})).json()
            assert (len(found["records"]), found["models"]) == (1, ["first", "remote"])
        assert is_idle(node.gateway.node)


@pytest.mark.parametrize("stream_it", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("target", ["remote", "second"])
@pytest.mark.parametrize("failure", ["crash", "too long", "unsupported"])
async def test_another_model_gets_what_an_own_model_cannot_answer(
    failure: str, target: str, stream_it: bool
) -> None:
    """A worker that fails or lacks what a request needs leaves it to the next model."""
    first = named("first")
    if failure == "too long":
        first.kv_tokens = 2
    elif failure == "unsupported":
        tasks = Capabilities(tasks=(Task.EMBED,), embedding_size=4)
        first.card = replace(first.card, capabilities=tasks)
    answer = stream_of(TOKEN, LAST, DONE) if stream_it else whole
    reasons = {"crash": "failed", "too long": "context_too_long"}
    async with mixed(f"first={target}", first=first, remote=answer) as node:
        body = {"model": "also-first", "prompt": "x", "max_tokens": 4, "stream": stream_it}
        sent = asyncio.create_task(node.http.post(TEXTS, json=body))
        if failure == "crash":
            await accepted_request(first, sent)
            first.crash("the device is lost")
        if target == "second":
            node.second.emit(await accepted_request(node.second, sent), "ok", last=True)
        reply = await sent
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-draftgate-fallback"] == reasons.get(failure, failure)
        assert reply.headers["x-draftgate-model"] == target
        if target == "remote":
            assert [json.loads(one)["model"] for one in node.server.bodies] == ["remote"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (QueueTimeout("", 1.0), "overloaded"),
        (Overloaded("", 1.0), "overloaded"),
        (Starting(""), "overloaded"),
        (WorkerFailed(""), "failed"),
        (BackendFailed(""), "failed"),
        (UpstreamFailed(""), "failed"),
        (AdapterFailed(""), "failed"),
        (ContextTooLong(""), "context_too_long"),
        (RequestRejected("", "prompt", 5), "context_too_long"),
        (ModelNotFound("m"), "unsupported"),
        (NotOffered(""), "unsupported"),
        (UnsupportedTask(""), "unsupported"),
        (RequestRejected("this model has no chat template", "messages"), "unsupported"),
        (QuotaExceeded("", 1.0), None),
        (Draining(""), None),
        (Forbidden(""), None),
        (InvalidRequest("n: must be at least 1", "n"), None),
        (PreviousResponseNotFound("r"), None),
        (Unsupported("logit_bias"), None),
        (RuntimeError(""), None),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Exception) else str(one),
)
def test_reasons_of_errors(error: Exception, reason: str | None) -> None:
    """Errors of the model lead to the next one, and errors of the client or the node do not."""
    assert reason_of(error) == reason


async def test_chain_goes_from_upstreams_to_own_models_and_back() -> None:
    """Each model gets its turn in the order of the chain, and the last one responds."""
    first = named("first")
    first.kv_tokens = 2

    async def only_far(request: Any) -> Any:
        body = json.loads(await request.read())
        return await (whole if body["model"] == "far" else refusal(500))(request)

    async with mixed("remote=first", "remote=far", first=first, remote=only_far) as node:
        reply = await node.http.post(TEXTS, json={"model": "remote", "prompt": "x"})
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-draftgate-fallback"] == "context_too_long"
        assert reply.headers["x-draftgate-model"] == "far"
        assert [json.loads(one)["model"] for one in node.server.bodies] == ["remote", "far"]


async def test_error_of_the_last_model_passes() -> None:
    """The client gets the error of the model at the end of the chain, whatever its kind."""
    first = named("first")
    first.kv_tokens = 2
    async with mixed("first=remote", first=first, remote=refusal(400, OPENAI_LONG)) as node:
        reply = await node.http.post(TEXTS, json={"model": "first", "prompt": "x"})
        assert (reply.status_code, reply.content) == (400, OPENAI_LONG)
    first = named("first")
    first.kv_tokens = 2
    async with mixed("remote=first", first=first, remote=refusal(503)) as node:
        reply = await node.http.post(TEXTS, json={"model": "remote", "prompt": "x"})
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "context_length_exceeded"


async def test_name_that_nothing_serves_may_stand_for_own_models() -> None:
    """A chain may begin with a name of its own."""
    async with mixed("best=nobody", "best=second") as node:
        reply = await node.answered_by(node.second, model="best")
        assert reply.status_code == 200
        assert reply.headers["x-draftgate-fallback"] == "unsupported"
        reply = await node.http.post(TEXTS, json={"model": "worst", "prompt": "x"})
        assert reply.status_code == 404


async def test_errors_about_the_request_use_no_other_model() -> None:
    """An invalid parameter is an error of the first model."""
    async with mixed("first=remote") as node:
        for fields in ({"n": 0}, {"temperature": -1}, {"max_tokens": "x"}):
            reply = await node.http.post(TEXTS, json={"model": "first", "prompt": "x", **fields})
            assert reply.status_code == 400
            assert "x-draftgate-fallback" not in reply.headers
        assert node.server.bodies == []


async def test_stream_that_has_begun_uses_no_other_model() -> None:
    """A worker that fails after its first token ends the stream with an error event."""
    async with mixed("first=remote") as node:
        body = {"model": "first", "prompt": "x", "max_tokens": 4, "stream": True}
        async with node.http.stream("POST", TEXTS, json=body) as reply:
            lines = reply.aiter_lines()
            first = asyncio.create_task(anext(lines))
            node.first.emit(await node.first.submitted.get(), "word")
            await first
            node.first.crash("the device is lost")
            found = events("\n".join([line async for line in lines]))
        assert found[-1]["error"]["code"] == "worker_failed"
        assert node.server.bodies == []


@pytest.mark.parametrize("target", ["first", "broken"])
async def test_stream_with_comments_continues_with_the_next_model(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comments are no part of the response, so the next model responds on the same stream."""
    monkeypatch.setattr(stream, "KEEPALIVE_S", 0.005)
    gate = asyncio.Event()
    first = named("first")
    if target == "broken":
        first.kv_tokens = 2
    async with mixed("remote=first", remote=after(gate, refusal(503)), first=first) as node:
        body = {"model": "remote", "prompt": "x", "max_tokens": 4, "stream": True}
        async with node.http.stream("POST", TEXTS, json=body) as reply:
            lines = reply.aiter_lines()
            assert (await anext(lines)).startswith(":")
            gate.set()
            if target == "first":
                first.emit(await first.submitted.get(), "ok", last=True)
            found = events("\n".join([line async for line in lines]))
        if target == "first":
            assert found[0]["choices"][0]["text"] == "ok"
            assert found[-1] == "[DONE]"
        else:
            assert found[-1]["error"]["code"] == "context_length_exceeded"
        assert is_idle(node.gateway.node)
