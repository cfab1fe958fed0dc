"""Failover between engines with the shipped model: injected errors and killed processes."""

from __future__ import annotations

import asyncio
import importlib.util
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

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.gateway.app import Listening
from draftgate.gateway.lifecycle import NodeState
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.policies.resilience import liveness
from tests.gateway.harness import client, events, is_idle, running, until
from tests.processes import child_pids

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None
    or not (SHIPPED_MODEL / "model.safetensors").is_file(),
    reason="needs torch and the shipped model",
)

TWO: dict[str, Any] = {
    "backend": "engine",
    "devices": (0, 1),
    "threads": 1,
    "kv_bytes": 16 << 20,
    "max_model_len": 512,
}
"""Two engines on one CPU."""

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
ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/completions", {**TEXT, "temperature": 0}),
    "seeded": ("/v1/completions", {**TEXT, "temperature": 0.9, "top_p": 0.95}),
    "drafted": ("/v1/completions", {**TEXT, "temperature": 0, "speculation": {"mode": "ngram"}}),
    "several": ("/v1/completions", {**TEXT, "prompt": [PROMPT, "import os\n"], "n": 2}),
    "penalties": ("/v1/completions", {**TEXT, "frequency_penalty": 0.7, "min_tokens": 30}),
    "logprobs": ("/v1/completions", {**TEXT, "logprobs": 2, "temperature": 0}),
    "stop": ("/v1/completions", {**TEXT, "temperature": 0, "stop": ["\n\n"]}),
    "chat": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 64, "seed": 5}),
    "schema": (
        "/v1/chat/completions",
        {"messages": CHAT, "max_tokens": 120, "seed": 5, "response_format": FORMAT},
    ),
    "embedding": ("/v1/embeddings", {"input": [PROMPT * 8, "import os\n" * 20]}),
}
"""One of each kind."""

SEQUENCES = {"several": 4, "embedding": 2}
"""Kinds of requests with more than one answer."""


@dataclass
class StickyError:
    """A device that fails for good, like a CUDA context: every later call fails as well.

    Attributes:
        after_steps: number of steps of each runner before the error, by the order of their first
            steps; runners without a number do not fail.
        goes_on: while it is not set, no step runs.
    """

    after_steps: list[int] = field(default_factory=list)
    left: dict[int, int | None] = field(default_factory=dict)
    goes_on: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.goes_on.set()

    def check(self, runner: object) -> None:
        """Raise if the runner has failed."""
        assert self.goes_on.wait(60)
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
    """Controls the devices of this process's engines."""
    from draftgate.backends.engine.runner import Runner

    sticky, execute = StickyError(), Runner.execute

    def checked(self: Runner, plan: Any) -> Any:
        sticky.check(self)
        return execute(self, plan)

    monkeypatch.setattr(Runner, "execute", checked)
    return sticky


def told(answer: dict[str, Any]) -> Any:
    """The part of an answer that clients can compare."""
    kept = {key: value for key, value in answer.items() if key not in {"id", "created", "metrics"}}
    kept["usage"].pop("prompt_tokens_details", None)  # cached tokens may differ
    return kept


async def ask(http: httpx.AsyncClient, kind: str) -> dict[str, Any]:
    """The answer to one kind of request."""
    path, body = ASKS[kind]
    answer = await http.post(path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@asynccontextmanager
async def two_engines(**settings: Any) -> AsyncIterator[tuple[Listening, httpx.AsyncClient]]:
    """A node of two engines and a client of it."""
    async with running(**{**TWO, **settings}) as where, client(where) as http:
        yield where, http


@pytest.mark.parametrize(
    ("steps", "undisturbed"), [(1, set()), (6, {"stop", "schema", "embedding"})]
)
async def test_every_kind_of_request_survives_its_engine(
    device: StickyError, steps: int, undisturbed: set[str]
) -> None:
    """An engine fails with every kind of request on it; all answers are bit-identical."""
    kinds = [kind for kind in ASKS for _ in range(2)]  # one on each engine
    async with two_engines(routing="round_robin") as (where, http):
        dispatcher = where.node.dispatcher
        plain = {kind: told(await ask(http, kind)) for kind in ASKS}
        await until(lambda: dispatcher.in_flight == 0)
        device.goes_on.clear()
        asking = []
        for kind in kinds:
            asking.append(asyncio.create_task(ask(http, kind)))
            sequences = sum(SEQUENCES.get(one, 1) for one in kinds[: len(asking)])
            await until(partial(is_placed, where, sequences))
        device.after_steps = [steps]
        device.goes_on.set()
        answers = await asyncio.gather(*asking)
        for kind, answer in zip(kinds, answers, strict=True):
            assert told(answer) == plain[kind], kind
        lost = [worker.backend.failure for worker in where.node.fleet.workers]
        assert lost.count(None) == 1
        assert where.node.state is NodeState.READY
        resumes = [answer.get("metrics", {}).get("resumes", []) for answer in answers]
        disturbed = {kind for kind, found in zip(kinds, resumes, strict=True) if found}
        counted = where.node.metrics.scalar(metric.RESUMES, "failed", "same_class").value
        if counted > sum(map(len, resumes)):
            disturbed.add("embedding")  # an answer without metrics
        assert disturbed >= set(ASKS) - undisturbed
        await until(lambda: dispatcher.in_flight == 0)


def is_placed(where: Listening, sequences: int) -> bool:
    """Whether this many sequences are on workers."""
    workers = where.node.fleet.workers
    return sum(worker.usage.sequences for worker in workers) == sequences


async def test_the_node_fails_with_its_second_engine(device: StickyError) -> None:
    """A stream that loses both engines ends with one error event, and the node fails."""
    async with two_engines() as (where, http):
        device.after_steps = [5, 5]
        answer = await http.post("/v1/completions", json={**TEXT, "stream": True}, timeout=60)
        found = events(answer.text)
        assert found[-1]["error"]["code"] == "worker_failed"
        assert "illegal memory access" in found[-1]["error"]["message"]
        assert sum("error" in event for event in found) == 1
        assert len(found) > 5
        assert where.node.state is NodeState.FAILED
        assert (await http.post("/v1/completions", json=TEXT)).status_code == 503


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_streams_survive_their_engine_process(
    how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine process is killed or paused during its streams; both texts are unchanged."""
    if how is signal.SIGSTOP:
        monkeypatch.setattr(liveness, "LEAST_PATIENCE_S", 4.0)
    before = child_pids()
    body = {**TEXT, "max_tokens": 400, "stream": True, "ignore_eos": True}
    async with two_engines(own_process=True) as (where, http):
        alone = await http.post("/v1/completions", json=body, timeout=60)
        first, _second = sorted(child_pids() - before)
        pieces: list[str] = []

        async def stream() -> list[Any]:
            lines = []
            async with http.stream("POST", "/v1/completions", json=body, timeout=60) as answer:
                async for line in answer.aiter_lines():
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
        assert [text_of(one) for one in found] == [expected] * 2
        assert [one[-1] for one in found] == ["[DONE]"] * 2
        resumes = [one[-2]["metrics"].get("resumes", []) for one in found]
        assert sorted(map(len, resumes)) == [0, 1]
        if how is signal.SIGSTOP:
            await until(lambda: not any(worker.hung for worker in where.node.fleet.workers))
            await until(lambda: is_idle(where.node))


def text_of(found: list[Any]) -> str:
    """The text of a completion's events."""
    return "".join(event["choices"][0]["text"] for event in found[:-1])
