"""LoRA adapters of a pool: requests run only on workers that have their adapter."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx

from draftgate.backends.checkpoints import SHIPPED_MODEL_ID
from draftgate.gateway.app import drain_and_close
from draftgate.gateway.state.memory.store import MemoryStore
from tests.cluster.test_models_of_a_pool import member, worker_ids
from tests.gateway.harness import client, needs_engine, until
from tests.gateway.test_adapters import BODY, ENGINE, demo_adapters

pytestmark = needs_engine

WEIGHTS = "adapter_model.safetensors"
LONG_PROMPT = "def area(width, height):\n    return width * height\n" * 6


async def completed(http: httpx.AsyncClient, model: str, **fields: Any) -> dict[str, Any]:
    response = await http.post("/v1/completions", json={**BODY, "model": model, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def test_requests_run_on_workers_that_have_their_adapter(tmp_path: Path) -> None:
    """Each of two nodes has an adapter that only it has, and both give one name to different
    contents. A gateway without a worker lists all names. Requests never take KV blocks of another
    adapter, although all of them have the same prompt. After the node of an adapter has left, the
    name of the adapter is unknown."""
    store = MemoryStore()
    first, second, third = demo_adapters(tmp_path)
    async with (
        member(store, loras=(f"a={first}", f"both={first}"), **ENGINE) as one,
        member(store, no_worker=True) as gateway,
        client(gateway) as http,
        AsyncExitStack() as stack,
    ):
        two = await stack.enter_async_context(
            member(store, loras=(f"b={second}", f"both={third}"), **ENGINE)
        )
        fleet = gateway.node.models[0].fleet
        await until(lambda: len(fleet.serving) == 2 and len(fleet.adapters()) == 3)
        listed = (await http.get("/v1/models")).json()["data"]
        assert [entry["id"] for entry in listed] == [SHIPPED_MODEL_ID, "a", "both", "b"]
        places = {"a": worker_ids(one), "b": worker_ids(two)}
        texts = {}
        for name, workers in places.items():
            for _ in range(3):
                reply = await completed(http, name, prompt=LONG_PROMPT)
                assert reply["metrics"]["worker_id"] == workers[SHIPPED_MODEL_ID]
                texts.setdefault(name, reply["choices"][0]["text"])
                assert reply["choices"][0]["text"] == texts[name]
            assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        plain = await completed(http, SHIPPED_MODEL_ID, prompt=LONG_PROMPT)
        assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        # Each node serves its own adapter under the shared name.
        async with client(one) as of_one, client(two) as of_two:
            replies = await asyncio.gather(
                *(completed(of, "both", prompt=LONG_PROMPT) for of in (of_one, of_two))
            )
        assert replies[0]["choices"][0]["text"] == texts["a"]
        assert replies[1]["choices"][0]["text"] not in texts.values()
        assert replies[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        await drain_and_close(two)
        await two.node.leave()
        await until(lambda: len(fleet.workers) == 1 and not gateway.node.may_miss_models)
        response = await http.post("/v1/completions", json={**BODY, "model": "b"})
        assert response.status_code == 404


async def test_requests_leave_a_node_that_cannot_load_their_adapter(tmp_path: Path) -> None:
    """If both nodes have lost the files, each request gets an error that names them, also when it
    is repeated. If one node has them, requests run on this node."""
    store = MemoryStore()
    first, *_ = demo_adapters(tmp_path)
    copy = Path(shutil.copytree(first, tmp_path / "copy"))
    async with (
        member(store, loras=(f"a={first}",), **ENGINE),
        member(store, loras=(f"a={copy}",), **ENGINE) as two,
        member(store, no_worker=True) as gateway,
        client(gateway) as http,
    ):
        fleet = gateway.node.models[0].fleet
        await until(lambda: len(fleet.serving) == 2 and len(fleet.adapters()) == 1)
        for folder in (first, copy):
            (folder / WEIGHTS).rename(folder / "away")
        for _ in range(3):
            response = await http.post("/v1/completions", json={**BODY, "model": "a"})
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (503, "adapter_unavailable")
            assert str(first) in error["message"] or str(copy) in error["message"]
        (copy / "away").rename(copy / WEIGHTS)
        replies = [await completed(http, "a") for _ in range(4)]
        assert {reply["metrics"]["worker_id"] for reply in replies} == {*worker_ids(two).values()}
        assert any(reply["metrics"].get("resumes") for reply in replies)
