"""Tests of API keys, quotas and limits that change while the node serves requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from draftgate.gateway import reloading
from draftgate.gateway.app import Listening
from draftgate.gateway.dispatch.quotas import quota_account
from draftgate.gateway.state.commands import ReadTotals
from tests.gateway.harness import ScriptedBackend, client, eventually, running

PATH = "/v1/completions"
BODY = {"prompt": "x", "max_tokens": 3, "ignore_eos": True}
STABLE = "  - {name: stable, key: sk-stable}\n"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file with one account."""
    path = tmp_path / "keys.yaml"
    path.write_text("keys:\n" + STABLE)
    return path


@pytest.fixture
async def gateway(keys: Path) -> AsyncIterator[Listening]:
    """A node with this file of keys."""
    async with running(api_keys_file=str(keys)) as gateway:
        yield gateway


async def change(gateway: Listening, keys: Path, text: str) -> None:
    """Replace the file as an editor does, and let the node notice the change."""
    other = keys.with_suffix(".new")
    other.write_text(text)
    other.replace(keys)
    await gateway.node.key_files.check(gateway.node.keys.use_file)


async def test_keys_change_under_load(gateway: Listening, keys: Path) -> None:
    """While keys are added and removed, every request with a stable key succeeds. An added key
    works at once, and a removed key is refused at once."""
    ended = asyncio.Event()

    async def load(http: httpx.AsyncClient) -> int:
        served = 0
        while not ended.is_set():
            stream = {**BODY, "stream": served % 2 == 0}
            response = await http.post(PATH, json=stream, headers=bearer("sk-stable"))
            assert response.status_code == 200, response.text
            served += 1
        return served

    async with client(gateway) as http:
        clients = [asyncio.create_task(load(http)) for _ in range(8)]
        for number in range(20):
            added = f"  - {{name: t{number}, key: sk-{number}}}\n"
            await change(gateway, keys, "keys:\n" + STABLE + added)
            new = await http.post(PATH, json=BODY, headers=bearer(f"sk-{number}"))
            old = await http.post(PATH, json=BODY, headers=bearer(f"sk-{number - 1}"))
            assert (new.status_code, old.status_code) == (200, 401)
        ended.set()
        served = await asyncio.gather(*clients)
    assert min(served) > 0
    account = quota_account("stable", gateway.node.fleet.model_id)
    assert (await gateway.node.store.call(ReadTotals(account))).open == 0


async def test_a_running_stream_survives_the_removal_of_its_key(
    keys: Path, scripted: ScriptedBackend
) -> None:
    """A stream ends normally although its key was removed, and the next request is refused."""
    other = "  - {name: other, key: sk-other}\n"
    settings = {"backends": [scripted], "api_keys_file": str(keys)}
    async with running(**settings) as gateway, client(gateway) as http:
        stream = http.post(PATH, json={**BODY, "stream": True}, headers=bearer("sk-stable"))
        pending = asyncio.create_task(stream)
        request = await scripted.submitted.get()
        await change(gateway, keys, "keys:\n" + other)
        scripted.emit(request, "the end", last=True)
        assert "[DONE]" in (await pending).text
        refused = await http.post(PATH, json=BODY, headers=bearer("sk-stable"))
    assert refused.status_code == 401


async def test_quotas_change_and_count_earlier_requests(gateway: Listening, keys: Path) -> None:
    """A raised quota admits the difference, because earlier requests count against it."""
    limited = "keys:\n  - {{name: stable, key: sk-stable, requests_per_minute: {}}}\n"
    await change(gateway, keys, limited.format(2))
    async with client(gateway) as http:

        async def statuses(requests: int) -> list[int]:
            return [
                (await http.post(PATH, json=BODY, headers=bearer("sk-stable"))).status_code
                for _ in range(requests)
            ]

        # The first two requests were sent under a quota of two.
        assert await statuses(3) == [200, 200, 429]
        await change(gateway, keys, limited.format(4))
        assert await statuses(3) == [200, 200, 429]


async def test_limits_of_a_key_apply_to_the_next_request(
    keys: Path, scripted: ScriptedBackend
) -> None:
    """A changed limit of a key applies to the next request."""
    text = "keys:\n  - {name: stable, key: sk-stable, least_ttft_ms: 500}\n"
    settings = {"backends": [scripted], "api_keys_file": str(keys)}
    async with running(**settings) as gateway, client(gateway) as http:
        for expected in (0.01, 0.5):
            headers = {**bearer("sk-stable"), "x-slo-ttft-ms": "10"}
            pending = asyncio.create_task(http.post(PATH, json=BODY, headers=headers))
            request = await scripted.submitted.get()
            assert request.service.ttft_s == expected
            scripted.emit(request, "x", last=True)
            assert (await pending).status_code == 200
            await change(gateway, keys, text)


@pytest.mark.parametrize(
    "text", ["keys: [", "keys: [{name: a}]", "keys: []", ""], ids=["yaml", "key", "none", "empty"]
)
async def test_invalid_files_leave_the_keys_as_they_are(
    gateway: Listening, keys: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    """The node keeps its keys if the file becomes invalid or has no keys, and logs the reason once.
    It never becomes open."""
    await change(gateway, keys, text)
    await gateway.node.key_files.check(gateway.node.keys.use_file)
    async with client(gateway) as http:
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("/v1/models", headers=bearer("sk-stable"))).status_code == 200
    assert len([r for r in caplog.records if "cannot reload" in r.getMessage()]) == 1
    assert "sk-stable" not in caplog.text


async def test_a_missing_file_leaves_the_keys_as_they_are(gateway: Listening, keys: Path) -> None:
    """The node keeps its keys while the file is missing, and reads the file when it is back."""
    await asyncio.to_thread(keys.unlink)
    await gateway.node.key_files.check(gateway.node.keys.use_file)
    async with client(gateway) as http:
        assert (await http.get("/v1/models", headers=bearer("sk-stable"))).status_code == 200
        await change(gateway, keys, "keys:\n  - {name: new, key: sk-new}\n")
        assert (await http.get("/v1/models", headers=bearer("sk-new"))).status_code == 200


async def test_the_node_checks_the_file_by_itself(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running node notices a changed file without any request."""
    monkeypatch.setattr(reloading, "CHECK_S", 0.01)
    async with running(api_keys_file=str(keys)) as gateway, client(gateway) as http:
        text = "keys:\n  - {name: new, key: sk-new}\n"
        await asyncio.to_thread(keys.write_text, text)

        async def accepted() -> bool:
            response = await http.get("/v1/models", headers=bearer("sk-new"))
            return response.status_code == 200

        await eventually(accepted)
