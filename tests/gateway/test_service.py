"""What a client wants of time: headers and priority, from the wire to the worker."""

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
    """Return what a worker gets of a request."""
    async with running(backends=[backend]) as where, client(where) as http:
        body = {**BODIES[path], "max_tokens": 5, **fields}
        asking = asyncio.ensure_future(http.post(path, json=body, headers=headers))
        request = await backend.submitted.get()
        backend.emit(request, "y", last=True)
        assert (await asking).status_code == 200
    return request


@pytest.mark.parametrize("path", BODIES)
async def test_targets_and_priority_reach_the_worker(scripted: ScriptedBackend, path: str) -> None:
    """On both endpoints headers are milliseconds, and the body's priority is the request's."""
    request = await arrived(scripted, path, TARGETS, priority=-1)
    assert request.service == ServiceLevel(1.5, 0.0125, -1)


async def test_who_asks_for_nothing_gets_no_service_level(scripted: ScriptedBackend) -> None:
    """Without headers and priority a request is like any other."""
    assert (await arrived(scripted, TEXT, {})).service == ANYTIME


async def test_a_large_body_keeps_its_headers(scripted: ScriptedBackend) -> None:
    """What is parsed in a thread brings its targets along."""
    request = await arrived(scripted, TEXT, TARGETS, prompt="x", user="u" * 20_000, priority=None)
    assert request.service == ServiceLevel(1.5, 0.0125, 0)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("value", ["", "soon", "0", "-5", "nan", "inf", "1e999", "5ms"])
async def test_a_target_that_is_no_time_is_400_and_named(name: str, value: str) -> None:
    """A header that cannot be kept is refused by its name, on both endpoints."""
    async with running() as where, client(where) as http:
        for path, body in BODIES.items():
            answer = await http.post(path, json=body, headers={name: value})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, name)
            assert "milliseconds" in error["message"]


@pytest.mark.parametrize("priority", [1.5, "high", True, 1 << 40, -(10**30)])
async def test_a_priority_that_is_no_class_is_400_and_named(priority: object) -> None:
    """Classes are whole numbers that fit any wire."""
    async with running() as where, client(where) as http:
        for path, body in BODIES.items():
            answer = await http.post(path, json={**body, "priority": priority})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")


async def test_the_simulators_worker_serves_by_it() -> None:
    """Behind HTTP a simulated worker's sequence has the service level that was asked for."""
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
