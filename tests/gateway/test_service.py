"""Tests of latency targets and priority from the request to the worker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from draftgate.backends.types import GenerationRequest
from draftgate.policies.types import ANYTIME, ServiceLevel
from tests.gateway.harness import ScriptedBackend, client, open_stream, running

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES = {TEXT: {"prompt": "x"}, CHAT: {"messages": [{"role": "user", "content": "x"}]}}
TARGETS = {"x-slo-ttft-ms": "1500", "x-slo-tpot-ms": "12.5"}


async def submit(
    backend: ScriptedBackend, path: str, headers: dict[str, str], **fields: Any
) -> GenerationRequest:
    """Send a request and return the request that the worker receives."""
    async with running(backends=[backend]) as gateway, client(gateway) as http:
        body = {**BODIES[path], "max_tokens": 5, **fields}
        pending = asyncio.ensure_future(http.post(path, json=body, headers=headers))
        request = await backend.submitted.get()
        backend.emit(request, "y", last=True)
        assert (await pending).status_code == 200
    return request


@pytest.mark.parametrize("path", BODIES)
async def test_targets_and_priority_reach_the_worker(scripted: ScriptedBackend, path: str) -> None:
    """The worker receives the targets from the headers in seconds and the priority from the
    body."""
    request = await submit(scripted, path, TARGETS, priority=-1)
    assert request.service == ServiceLevel(1.5, 0.0125, -1)


async def test_the_default_is_no_service_level(scripted: ScriptedBackend) -> None:
    """A request without headers and priority has the default service level."""
    assert (await submit(scripted, TEXT, {})).service == ANYTIME


async def test_a_large_body_keeps_its_headers(scripted: ScriptedBackend) -> None:
    """A request whose body is parsed in a thread keeps its latency targets."""
    request = await submit(scripted, TEXT, TARGETS, prompt="x", user="u" * 20_000, priority=None)
    assert request.service == ServiceLevel(1.5, 0.0125, 0)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("value", ["", "soon", "0", "-5", "nan", "inf", "1e999", "5ms"])
async def test_an_invalid_target_is_400_and_named(name: str, value: str) -> None:
    """The server rejects an invalid target with 400 and names the header."""
    async with running() as gateway, client(gateway) as http:
        for path, body in BODIES.items():
            response = await http.post(path, json=body, headers={name: value})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, name)
            assert "milliseconds" in error["message"]


@pytest.mark.parametrize("priority", [1.5, "high", True, 1 << 40, -(10**30)])
async def test_an_invalid_priority_is_400_and_named(priority: object) -> None:
    """The server rejects a priority that is not an integer within the limits."""
    async with running() as gateway, client(gateway) as http:
        for path, body in BODIES.items():
            response = await http.post(path, json={**body, "priority": priority})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "priority")


async def test_a_simulated_worker_gets_the_service_level() -> None:
    """The sequence of a simulated worker has the requested service level."""
    body = {"prompt": "x", "max_tokens": 400, "stream": True, "ignore_eos": True}
    async with running() as gateway, client(gateway) as http:
        scheduler = gateway.node.fleet.workers[0].backend._worker._scheduler
        async with open_stream(http, TEXT, body, TARGETS):
            (sequence,) = scheduler.running
            assert sequence.request.service == ServiceLevel(1.5, 0.0125, 0)
            assert sequence.due_in_s(0.0) is not None
        decided = gateway.node.decisions.latest(9)
    assert [decision.request.service for decision in decided] == [sequence.request.service]
