"""LoRA adapters over HTTP: names, texts, eviction, and endpoints that refuse them."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftgate.backends.adapter_card import AdapterCard
from draftgate.backends.checkpoints import SHIPPED_MODEL_ID
from draftgate.backends.types import Capabilities, GenerationRequest
from draftgate.gateway.banner import banner
from draftgate.gateway.config import ServeConfig
from tests.gateway.harness import (
    ScriptedBackend,
    accepted_request,
    client,
    is_idle,
    needs_engine,
    running,
    until,
)

ENGINE: dict[str, Any] = {
    "backend": "engine",
    "device": "cpu",
    "threads": 1,
    "kv_bytes": 16 << 20,
    "max_model_len": 512,
}
BODY = {"prompt": "def area(width, height):\n", "max_tokens": 12, "seed": 3, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "seed": 3}


def demo_adapters(directory: Path) -> list[Path]:
    """Write three random adapters of the shipped model."""
    from tests.engine.random_adapters import write_demo_adapters  # imports torch

    return write_demo_adapters(directory)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return demo_adapters(tmp_path_factory.mktemp("adapters"))


async def completed(http: httpx.AsyncClient, model: str) -> dict[str, Any]:
    response = await http.post("/v1/completions", json={**BODY, "model": model})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@needs_engine
async def test_adapters_are_requested_by_name(adapters: list[Path]) -> None:
    """Each adapter is listed with its model, and answers under its own name. Three adapters share
    one place in memory, and concurrent requests get the texts that they get alone."""
    loras = tuple(f"{name}={path}" for name, path in zip("abc", adapters, strict=True))
    async with running(loras=loras, max_loras=1, **ENGINE) as gateway, client(gateway) as http:
        listed = {entry["id"]: entry for entry in (await http.get("/v1/models")).json()["data"]}
        assert set(listed) == {SHIPPED_MODEL_ID, "a", "b", "c"}
        assert listed[SHIPPED_MODEL_ID]["parent"] is None
        assert listed["b"]["parent"] == SHIPPED_MODEL_ID
        assert listed["b"]["root"] == str(adapters[1])
        assert (await http.get("/v1/models/c")).json() == listed["c"]
        assert "adapters     a, b, c" in banner(gateway)

        alone = {name: await completed(http, name) for name in listed}
        assert len({one["choices"][0]["text"] for one in alone.values()}) == 4
        assert len({one["metrics"]["numerics_class"] for one in alone.values()}) == 4
        for name, reply in alone.items():
            assert reply["model"] == name
            assert ("/lora-" in reply["metrics"]["numerics_class"]) == (name in "abc")
        names = [*listed] * 3
        together = await asyncio.gather(*(completed(http, name) for name in names))
        for name, reply in zip(names, together, strict=True):
            assert reply["choices"] == alone[name]["choices"]
        chat = (await http.post("/v1/chat/completions", json={**CHAT, "model": "a"})).json()
        assert chat["model"] == "a"
        page = (await http.get("/metrics")).text
        series = f'adapter="a",model_name="{SHIPPED_MODEL_ID}",outcome="finished"'
        assert f"draftgate_adapter_requests_total{{{series}}} 5.0" in page
        await until(lambda: is_idle(gateway.node))


@needs_engine
async def test_other_names_and_tasks_are_refused(adapters: list[Path]) -> None:
    """An unknown name is a 404 that lists the adapters, and adapters only generate text."""
    async with (
        running(loras=(f"a={adapters[0]}",), **ENGINE) as gateway,
        client(gateway) as http,
    ):
        response = await http.post("/v1/completions", json={**BODY, "model": "b"})
        assert response.status_code == 404
        assert "'a'" in response.json()["error"]["message"]
        response = await http.post("/v1/embeddings", json={"input": "x", "model": "a"})
        assert response.status_code == 400
        assert "a is a LoRA adapter" in response.json()["error"]["message"]


def with_adapter() -> ScriptedBackend:
    """Return a worker that runs one sequence at a time and has the adapter `a`."""
    backend = ScriptedBackend()
    able = Capabilities(adapters=(AdapterCard("a", "0a", "folder"),))
    backend.card = dataclasses.replace(backend.card, capabilities=able)
    backend.max_sequences = 1
    return backend


async def test_requests_pass_one_that_waits_for_its_only_worker() -> None:
    """A request with an adapter waits for the worker that has it, while later requests use another
    one. Once its worker is free, it precedes them."""
    able, other = with_adapter(), ScriptedBackend()
    other.max_sequences = 1
    async with running(backends=[able, other]) as gateway, client(gateway) as http:
        queue, tasks = gateway.node.dispatcher.queue, list[asyncio.Task[httpx.Response]]()

        async def send(model: str, backend: ScriptedBackend | None) -> GenerationRequest | None:
            """Send a request, and return it if a worker gets it at once."""
            task = asyncio.create_task(http.post("/v1/completions", json=BODY | {"model": model}))
            tasks.append(task)
            waiting = len(queue)
            if backend is not None:
                return await accepted_request(backend, task)
            await until(lambda: len(queue) == waiting + 1)
            return None

        first = await send("a", able)
        await send("a", None)
        plain = await send("scripted", other)
        await send("scripted", None)
        assert first is not None
        assert plain is not None
        able.emit(first, "ok", last=True)
        second = await accepted_request(able, tasks[1])
        assert [one.adapter for one in (first, plain, second)] == ["0a", "", "0a"]
        other.emit(plain, "ok", last=True)
        last = await accepted_request(other, tasks[3])
        able.emit(second, "ok", last=True)
        other.emit(last, "ok", last=True)
        assert [(await task).status_code for task in tasks] == [200] * 4


async def test_request_returns_to_the_only_worker_with_its_adapter() -> None:
    """A worker without the adapter is no alternative to one that has dropped the stream."""
    able, other = with_adapter(), ScriptedBackend()
    async with running(backends=[able, other]) as gateway, client(gateway) as http:
        task = asyncio.create_task(http.post("/v1/completions", json={**BODY, "model": "a"}))
        dropped = await accepted_request(able, task)
        able.sinks.fail("cut off", request_id=dropped.request_id)
        able.emit(await accepted_request(able, task), "ok", last=True)
        assert (await task).status_code == 200


async def test_requests_fail_when_the_last_worker_with_their_adapter_fails() -> None:
    """A queued request does not wait for a worker that is gone, and other requests run."""
    able, other = with_adapter(), ScriptedBackend()
    async with running(backends=[able, other]) as gateway, client(gateway) as http:
        bodies = [{**BODY, "model": "a"}] * 2
        tasks = [asyncio.create_task(http.post("/v1/completions", json=body)) for body in bodies]
        await until(lambda: len(gateway.node.dispatcher.queue) == 1)
        able.crash("a fault")
        responses = await asyncio.gather(*tasks)
        assert [response.status_code for response in responses] == [503, 503]
        assert "LoRA adapter" in responses[0].text + responses[1].text
        task = asyncio.create_task(http.post("/v1/completions", json=BODY))
        other.emit(await accepted_request(other, task), "ok", last=True)
        assert (await task).status_code == 200


def test_only_the_engine_has_adapters() -> None:
    """A node with another backend refuses the flag at its start."""
    config = ServeConfig(backend="sim", loras=("a=b",))
    with pytest.raises(ValueError, match="--lora needs --backend engine"):
        config.worker_configs()


@needs_engine
async def test_missing_adapter_is_an_error_of_its_requests(tmp_path: Path) -> None:
    """While the files of an adapter are missing, each of its requests gets an error that names it,
    and other requests run. The worker is not to blame, so equal requests may still use it."""
    first, *_ = demo_adapters(tmp_path)
    weights, away = first / "adapter_model.safetensors", tmp_path / "away"
    async with running(loras=(f"a={first}",), **ENGINE) as gateway, client(gateway) as http:
        weights.rename(away)
        for _ in range(3):
            response = await http.post("/v1/completions", json={**BODY, "model": "a"})
            assert response.status_code == 503
            message = response.json()["error"]["message"]
            assert message.startswith(f"the LoRA adapter is unavailable: {first}: cannot read")
        await completed(http, SHIPPED_MODEL_ID)
        away.rename(weights)
        await completed(http, "a")
