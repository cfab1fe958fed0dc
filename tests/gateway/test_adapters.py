"""LoRA adapters over HTTP: names, texts, eviction, and endpoints that refuse them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftgate.backends.checkpoints import SHIPPED_MODEL_ID
from draftgate.gateway.config import ServeConfig
from tests.gateway.harness import client, is_idle, needs_engine, running, until

pytestmark = needs_engine

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
        await until(lambda: is_idle(gateway.node))


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


def test_only_the_engine_has_adapters() -> None:
    """A node with another backend refuses the flag at its start."""
    config = ServeConfig(backend="sim", loras=("a=b",))
    with pytest.raises(ValueError, match="--lora needs --backend engine"):
        config.worker_configs()


async def test_missing_adapter_is_an_error_of_its_requests(tmp_path: Path) -> None:
    """If the files of an adapter change after the start, its requests get an error that names it,
    and other requests run."""
    first, *_ = demo_adapters(tmp_path)
    async with running(loras=(f"a={first}",), **ENGINE) as gateway, client(gateway) as http:
        (first / "adapter_model.safetensors").unlink()
        response = await http.post("/v1/completions", json={**BODY, "model": "a"})
        assert response.status_code == 503
        assert str(first) in response.text
        await completed(http, SHIPPED_MODEL_ID)
