"""Tests of refusals after admission: status 429 before the headers, and one error event later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import httpx
import pytest
from msgspec import structs

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.token_ids import compact
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.assembly import WaitingRules
from draftgate.gateway.dispatch import queue
from draftgate.gateway.dispatch.admission import Bounds
from draftgate.gateway.dispatch.dispatcher import Dispatcher
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.errors import QueueTimeout, TooMany
from draftgate.gateway.http import stream
from draftgate.lab.simulate.cluster import running_dispatcher
from draftgate.policies.types import WorkerLoad, WorkerSpeed
from tests.gateway.harness import (
    ScriptedBackend,
    accepted_request,
    client,
    events,
    is_idle,
    running,
    until,
)
from tests.gateway.troubles import DeviceFault, run_job, run_scenario, simulated
from tests.gateway.upstreams import after, forwarding, refusal, upstream

TIMEOUT_S = 60.0
TOKENS = 1000
BREAKS_S = 1.0
CONFIG = WorkerConfig(profile="h100-8b", max_num_seqs=2, speculation="off")

MESSAGES = [{"role": "user", "content": "x"}]
PATHS = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 9}),
    "text": ("/v1/completions", {"prompt": "x", "max_tokens": 9}),
    "responses": ("/v1/responses", {"input": "x", "max_output_tokens": 9}),
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}),
}


def job(number: int) -> Job:
    """Return a job that occupies a sequence for several seconds."""
    ids = compact(Tokenizer(SHIPPED_MODEL).encode("import os\n"))
    sampling = SamplingParams(TOKENS, seed=number, ignore_eos=True)
    return Job(f"r{number}", (ids,), sampling, TOKENS, fingerprint=number + 1)


@dataclass(frozen=True)
class Refusal:
    """A refusal with its time in seconds after the request."""

    error: TooMany
    after_s: float


async def refusals_of(policy: str, requests: int) -> list[Refusal]:
    """Send requests at once to two workers, of which one breaks, and return their refusals."""
    loop = asyncio.get_running_loop()
    factory = simulated({1: DeviceFault(breaks=lambda _plan: loop.time() > BREAKS_S)})
    configs = [structs.replace(CONFIG, device_index=index) for index in range(2)]
    rules = WaitingRules(admission=policy, bounds=Bounds(timeout_s=TIMEOUT_S))
    refusals = []

    async def send(dispatcher: Dispatcher, number: int) -> None:
        begun_s = loop.time()
        try:
            await run_job(dispatcher, job(number))
        except TooMany as error:
            refusals.append(Refusal(error, loop.time() - begun_s))

    async with running_dispatcher(factory, configs, rules) as dispatcher:
        await run_job(dispatcher, replace(job(0), max_tokens=8))  # the worker learns its speed
        await asyncio.gather(*(send(dispatcher, 1 + number) for number in range(requests)))
    return refusals


@pytest.mark.parametrize("policy", ["deadline", "bounded", "none"])
def test_request_that_would_time_out_is_refused_before_the_first_heartbeat(policy: str) -> None:
    """Every refused request gets its refusal before the headers of its stream are sent.

    The node admits the requests for two workers. Later, one worker has to serve all of them.
    """
    refusals = run_scenario(refusals_of(policy, 24))
    late = [refusal for refusal in refusals if refusal.after_s > 0]
    assert late
    assert all(refusal.after_s < stream.KEEPALIVE_S for refusal in refusals)
    assert not any(isinstance(refusal.error, QueueTimeout) for refusal in refusals)
    assert all(refusal.error.retry_after_s >= 1.0 for refusal in late)


def test_request_that_starts_in_time_is_not_refused() -> None:
    """The node serves all requests if one worker can start them within the timeout."""
    assert run_scenario(refusals_of("deadline", 12)) == []


class KnownBackend(ScriptedBackend):
    """A scripted worker with one sequence, a known speed and a backlog of prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.max_sequences = 1
        self.prompt_tokens = 0

    def load(self) -> WorkerLoad:
        speed = WorkerSpeed(tpot_s=0.01, prompt_token_s=0.01)
        return structs.replace(super().load(), speed=speed, prompt_tokens=self.prompt_tokens)


@asynccontextmanager
async def queued_stream(kind: str, **settings: object) -> AsyncIterator[Queued]:
    """Send a stream that waits in the queue of a node, because another request occupies it."""
    backend = KnownBackend()
    path, body = PATHS[kind]
    async with running(backends=[backend], **settings) as gateway, client(gateway) as http:
        first = asyncio.create_task(http.post("/v1/completions", json=PATHS["text"][1]))
        request = await accepted_request(backend, first)
        waiting = asyncio.create_task(http.post(path, json={**body, "stream": True}))
        await until(lambda: len(gateway.node.dispatcher.queue) == 1 or waiting.done())
        try:
            yield Queued(backend, waiting)
        finally:
            backend.emit(request, "end", last=True)
            assert (await first).status_code == 200
        await until(lambda: is_idle(gateway.node))


@dataclass
class Queued:
    """A queued stream, and the worker that it waits for."""

    backend: KnownBackend
    response: asyncio.Task[httpx.Response]


@pytest.mark.parametrize("kind", PATHS)
async def test_forecast_of_a_queued_stream_becomes_status_429(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queued stream gets 429 and Retry-After if its worker first computes long prompts."""
    monkeypatch.setattr(queue, "RECONSIDER_S", 0.05)
    async with queued_stream(kind, queue_timeout_s=60.0) as queued:
        queued.backend.prompt_tokens = 10_000
        response = await queued.response
    assert response.status_code == 429
    error = response.json()["error"]
    assert error["type"] == "rate_limit_error"
    assert error.get("code", "overloaded") == "overloaded"
    assert int(response.headers["retry-after"]) >= error["retry_after_s"] > 0


@pytest.mark.parametrize("kind", PATHS)
async def test_timeout_after_the_headers_is_one_typed_error_event(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that times out after its headers ends with the error of a 429 and its delay."""
    monkeypatch.setattr(stream, "KEEPALIVE_S", 0.005)
    async with queued_stream(kind, queue_timeout_s=0.2, admission="bounded") as queued:
        response = await queued.response
    assert response.status_code == 200
    sent = [event for event in events(response.text) if event != "[DONE]"]
    (error,) = filter(None, (event.get("response", event).get("error") for event in sent))
    assert error["type"] == "rate_limit_error"
    assert error.get("code", "queue_timeout") == "queue_timeout"
    assert error["retry_after_s"] > 0


async def test_upstream_refusal_after_the_headers_has_its_retry_delay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error event of a refusal by the upstream has the delay that the upstream requests."""
    monkeypatch.setattr(stream, "KEEPALIVE_S", 0.005)
    begin = asyncio.Event()
    refuse = refusal(429, b'{"error": {"message": "busy", "code": "x"}}', Retry_After="30")
    async with upstream(after(begin, refuse)) as engine, forwarding(engine) as gateway:
        body = {"prompt": "a", "stream": True}
        async with client(gateway) as http, http.stream("POST", "/v1/completions", json=body) as r:
            lines = r.aiter_lines()
            assert await anext(lines) == ": waiting"
            begin.set()
            (event,) = events("\n".join([line async for line in lines]))
    assert event["error"] == {"message": "busy", "code": "x", "retry_after_s": 30.0}
