"""Latency targets and priority, from headers and body to the worker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from draftgate.backends.types import GenerationRequest
from draftgate.policies.types import ANYTIME, ServiceLevel
from tests.gateway.harness import ScriptedBackend, client, running

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES = {TEXT: {"prompt": "x"}, CHAT: {"messages": [{"role": "user", "content": "x"}]}}
TARGETS = {"x-slo-ttft-ms": "1500", "x-slo-tpot-ms": "12.5"}


async def arrived(
    backend: ScriptedBackend, path: str, headers: dict[str, str], **fields: Any
) -> GenerationRequest:
    """Return the request that a worker gets."""
    async with running(backends=[backend]) as where, client(where) as http:
        body = {**BODIES[path], "max_tokens": 5, **fields}
        asking = asyncio.ensure_future(http.post(path, json=body, headers=headers))
        request = await backend.submitted.get()
        backend.emit(request, "y", last=True)
        assert (await asking).status_code == 200
    return request


@pytest.mark.parametrize("path", BODIES)
async def test_targets_and_priority_reach_the_worker(scripted: ScriptedBackend, path: str) -> None:
    """On both endpoints, headers are milliseconds, and the body's priority is the request's."""
    request = await arrived(scripted, path, TARGETS, priority=-1)
    assert request.service == ServiceLevel(1.5, 0.0125, -1)


async def test_the_default_is_no_service_level(scripted: ScriptedBackend) -> None:
    """Without headers and priority a request has the default service level."""
    assert (await arrived(scripted, TEXT, {})).service == ANYTIME


async def test_a_large_body_keeps_its_headers(scripted: ScriptedBackend) -> None:
    """Targets survive parsing in a thread."""
    request = await arrived(scripted, TEXT, TARGETS, prompt="x", user="u" * 20_000, priority=None)
    assert request.service == ServiceLevel(1.5, 0.0125, 0)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("value", ["", "soon", "0", "-5", "nan", "inf", "1e999", "5ms"])
async def test_an_invalid_target_is_400_and_named(name: str, value: str) -> None:
    """An invalid header is refused by its name on both endpoints."""
    async with running() as where, client(where) as http:
        for path, body in BODIES.items():
            answer = await http.post(path, json=body, headers={name: value})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, name)
            assert "milliseconds" in error["message"]


@pytest.mark.parametrize("priority", [1.5, "high", True, 1 << 40, -(10**30)])
async def test_an_invalid_priority_is_400_and_named(priority: object) -> None:
    """A priority must be an integer within the limits."""
    async with running() as where, client(where) as http:
        for path, body in BODIES.items():
            answer = await http.post(path, json={**body, "priority": priority})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")


async def test_a_simulated_worker_gets_the_service_level() -> None:
    """A simulated worker's sequence has the requested service level."""
    body = {"prompt": "x", "max_tokens": 400, "stream": True, "ignore_eos": True}
    async with running() as where, client(where) as http:
        scheduler = where.node.fleet.workers[0].backend._worker._scheduler
        async with http.stream("POST", TEXT, json=body, headers=TARGETS) as answer:
            await anext(answer.aiter_lines())
            (sequence,) = scheduler.running
            assert sequence.request.service == ServiceLevel(1.5, 0.0125, 0)
            assert sequence.next_due_s is not None
        decided = where.node.decisions.latest(9)
    assert [decision.request.service for decision in decided] == [sequence.request.service]
