"""Tests of failover between engines with the shipped model: injected errors and killed
processes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import pytest

from draftgate.gateway.app import Listening
from draftgate.gateway.lifecycle import NodeState
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.policies.resilience import liveness
from tests.gateway.harness import client, events, is_idle, needs_engine, running, until
from tests.processes import child_pids

pytestmark = needs_engine

TWO: dict[str, Any] = {
    "backend": "engine",
    "devices": (0, 1),
    "threads": 1,
    "kv_bytes": 16 << 20,
    "max_model_len": 512,
    "embedding_cache_bytes": 0,  # a cached text would need no engine
}
"""Settings of a node with two engines on one CPU."""

PROMPT = "def area(width, height):\n    "
CHAT = [{"role": "user", "content": "Describe the function add(a, b)."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "arguments": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA, "strict": True}}

TEXT = {"prompt": PROMPT, "max_tokens": 64, "seed": 5}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/completions", {**TEXT, "temperature": 0}),
    "seeded": ("/v1/completions", {**TEXT, "temperature": 0.9, "top_p": 0.95}),
    "drafted": (
        "/v1/completions",
        # With earlier outputs, the whole text would be drafted in fewer steps than the engine runs.
        {**TEXT, "temperature": 0, "speculation": {"mode": "ngram", "corpus": False}},
    ),
    "several": ("/v1/completions", {**TEXT, "prompt": [PROMPT, "import os\n"], "n": 2}),
    "penalties": ("/v1/completions", {**TEXT, "frequency_penalty": 0.7, "min_tokens": 30}),
    "logprobs": ("/v1/completions", {**TEXT, "logprobs": 2, "temperature": 0}),
    "echo": ("/v1/completions", {**TEXT, "echo": True, "logprobs": 2, "prompt_logprobs": 1}),
    "stop": ("/v1/completions", {**TEXT, "temperature": 0, "stop": ["\n\n"]}),
    "chat": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 64, "seed": 5}),
    "schema": (
        "/v1/chat/completions",
        {"messages": CHAT, "max_tokens": 120, "seed": 5, "response_format": FORMAT},
    ),
    "embedding": ("/v1/embeddings", {"input": [PROMPT * 8, "import os\n" * 20]}),
}
"""Path and body of one request of each kind."""

SEQUENCES = {"several": 4, "embedding": 2}
"""Number of sequences of each kind of request with several sequences."""


@dataclass
class StickyError:
    """A permanent device error, like that of a CUDA context: every later call fails too.

    Attributes:
        after_steps: the number of steps before the error, for each runner in the order of their
            first steps. Runners without a number do not fail.
        left: the remaining steps of each runner by its id, or None if the runner does not fail.
        may_run: an event that is set while steps may run.
    """

    after_steps: list[int] = field(default_factory=list)
    left: dict[int, int | None] = field(default_factory=dict)
    may_run: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_run.set()

    def check(self, runner: object) -> None:
        """Wait until steps may run, and raise an error if the runner has failed."""
        assert self.may_run.wait(60)
        if not self.after_steps and not self.left:
            return
        if id(runner) not in self.left:
            self.left[id(runner)] = self.after_steps.pop(0) if self.after_steps else None
        left = self.left[id(runner)]
        if left is None:
            return
        if left <= 0:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.left[id(runner)] = left - 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> StickyError:
    """The device errors of this process's engines."""
    from draftgate.backends.engine.runner import Runner

    sticky, execute = StickyError(), Runner.execute

    def checked(self: Runner, plan: Any) -> Any:
        sticky.check(self)
        return execute(self, plan)

    monkeypatch.setattr(Runner, "execute", checked)
    return sticky


def comparable(response: dict[str, Any]) -> Any:
    """Return the fields of a response that must not depend on workers."""
    kept = {
        key: value for key, value in response.items() if key not in {"id", "created", "metrics"}
    }
    kept["usage"].pop("prompt_tokens_details", None)  # cached tokens may differ
    return kept


async def send_request(http: httpx.AsyncClient, kind: str) -> dict[str, Any]:
    """Send a request of this kind and return its response."""
    path, body = REQUESTS[kind]
    response = await http.post(path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


@asynccontextmanager
async def two_engines(**settings: Any) -> AsyncIterator[tuple[Listening, httpx.AsyncClient]]:
    """Run a node with two engines and yield the node and its client."""
    async with running(**{**TWO, **settings}) as gateway, client(gateway) as http:
        yield gateway, http


@pytest.mark.parametrize(
    ("steps", "undisturbed"),
    [
        pytest.param(1, set(), marks=pytest.mark.long),
        # Drafts from the outputs before may end a greedy text in six steps.
        (3, {"stop", "schema", "embedding"}),
    ],
)
async def test_every_kind_of_request_survives_its_engine(
    device: StickyError, steps: int, undisturbed: set[str]
) -> None:
    """All responses stay bit-identical when an engine with every kind of request fails."""
    kinds = [kind for kind in REQUESTS for _ in range(2)]  # each engine gets every kind
    async with two_engines(routing="round_robin") as (gateway, http):
        node = gateway.node
        plain = {kind: comparable(await send_request(http, kind)) for kind in REQUESTS}
        await until(lambda: node.in_flight == 0)
        device.may_run.clear()
        pending = []
        for kind in kinds:
            pending.append(asyncio.create_task(send_request(http, kind)))
            sequences = sum(SEQUENCES.get(name, 1) for name in kinds[: len(pending)])
            await until(partial(is_placed, gateway, sequences))
        device.after_steps = [steps]
        device.may_run.set()
        responses = await asyncio.gather(*pending)
        for kind, response in zip(kinds, responses, strict=True):
            assert comparable(response) == plain[kind], kind
        lost = [worker.backend.failure for worker in gateway.node.fleet.workers]
        assert lost.count(None) == 1
        assert gateway.node.state is NodeState.READY
        resumes = [response.get("metrics", {}).get("resumes", []) for response in responses]
        disturbed = {kind for kind, found in zip(kinds, resumes, strict=True) if found}
        counted = gateway.node.metrics.scalar(metric.RESUMES, "failed", "same_class").value
        if counted > sum(map(len, resumes)):
            disturbed.add("embedding")  # the response of an embedding has no metrics
        assert disturbed >= set(REQUESTS) - undisturbed
        await until(lambda: node.in_flight == 0)


def is_placed(gateway: Listening, sequences: int) -> bool:
    """Return whether exactly this many sequences run on workers."""
    workers = gateway.node.fleet.workers
    return sum(worker.usage.sequences for worker in workers) == sequences


async def test_the_node_fails_with_its_second_engine(device: StickyError) -> None:
    """A stream that loses both engines ends with one error event, and the node fails."""
    async with two_engines() as (gateway, http):
        device.after_steps = [5, 5]
        response = await http.post("/v1/completions", json={**TEXT, "stream": True}, timeout=60)
        found = events(response.text)
        assert found[-1]["error"]["code"] == "worker_failed"
        assert "illegal memory access" in found[-1]["error"]["message"]
        assert sum("error" in event for event in found) == 1
        assert len(found) > 5
        assert gateway.node.state is NodeState.FAILED
        assert (await http.post("/v1/completions", json=TEXT)).status_code == 503


@pytest.mark.parametrize(
    "how",
    [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)],
    ids=["killed", "stopped"],
)
async def test_streams_survive_their_engine_process(
    how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts of two streams stay the same when one engine process is killed or paused."""
    if how is signal.SIGSTOP:
        monkeypatch.setattr(liveness, "LEAST_PATIENCE_S", 4.0)
    before = child_pids()
    body = {**TEXT, "max_tokens": 400, "stream": True, "ignore_eos": True}
    async with two_engines(own_process=True) as (gateway, http):
        alone = await http.post("/v1/completions", json=body, timeout=60)
        first, _second = sorted(child_pids() - before)
        pieces: list[str] = []

        async def stream() -> list[Any]:
            lines = []
            async with http.stream("POST", "/v1/completions", json=body, timeout=60) as response:
                async for line in response.aiter_lines():
                    lines.append(line)
                    pieces.append(line)
            return events("\n".join(lines))

        streams = [asyncio.create_task(stream()) for _ in range(2)]
        await until(lambda: len(pieces) > 40)
        os.kill(first, how)
        try:
            found = await asyncio.gather(*streams)
        finally:
            if how is signal.SIGSTOP:
                os.kill(first, signal.SIGCONT)
        expected = text_of(events(alone.text))
        assert [text_of(stream_events) for stream_events in found] == [expected] * 2
        assert [stream_events[-1] for stream_events in found] == ["[DONE]"] * 2
        resumes = [stream_events[-2]["metrics"].get("resumes", []) for stream_events in found]
        assert sorted(map(len, resumes)) == [0, 1]
        if how is signal.SIGSTOP:
            await until(lambda: not any(worker.hung for worker in gateway.node.fleet.workers))
            await until(lambda: is_idle(gateway.node))


def text_of(found: list[Any]) -> str:
    """Return the text of a completion's events."""
    return "".join(event["choices"][0]["text"] for event in found[:-1])
