"""Fixtures of the gateway tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from draftgate.backends.tokenizer import Tokenizer
from draftgate.gateway.app import Listening
from draftgate.gateway.dispatch import kv_fetch
from draftgate.policies.kv_transfer import PullDecision, PullReason, PullView, decide_pull
from tests.gateway.clients import anthropic_client
from tests.gateway.harness import ScriptedBackend, client, running
from tests.gateway.redis_server import RedisServer, redis_running
from tests.gateway.tool_models import with_template
from tests.gateway.troubles import NEVER_S

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic


@pytest.fixture
def _always_pulls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pull whenever a worker holds KV blocks, however slow this machine is."""

    def decide(view: PullView) -> PullDecision:
        decision = decide_pull(view)
        if decision.reason is PullReason.NOTHING:
            return decision
        return replace(decision, reason=PullReason.FASTER, compute_s=NEVER_S)

    monkeypatch.setattr(kv_fetch, "decide_pull", decide)
    monkeypatch.setattr(kv_fetch, "ASK_S", NEVER_S)


@pytest.fixture
async def sim() -> AsyncIterator[Listening]:
    """A node with a simulated worker."""
    async with running() as gateway:
        yield gateway


@pytest.fixture
def node(sim: Listening) -> Listening:
    """The node under test, which modules replace."""
    return sim


@pytest.fixture
async def http(node: Listening) -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client of the node under test."""
    async with client(node) as opened:
        yield opened


@pytest.fixture
async def scripted() -> ScriptedBackend:
    """A backend whose steps the test decides, not started yet."""
    return ScriptedBackend()


@pytest.fixture
def qwen(scripted: ScriptedBackend, tmp_path: Path) -> ScriptedBackend:
    """A worker whose model has Qwen's template."""
    scripted.tokenizer = Tokenizer(with_template(tmp_path / "model", "qwen2_5"))
    scripted.kv_tokens = 1000
    return scripted


@pytest.fixture
async def anthropic_api(node: Listening) -> AsyncIterator[AsyncAnthropic]:
    """Anthropic's client of the node under test."""
    async with anthropic_client(node.url) as opened:
        yield opened


@pytest.fixture
async def qwen_node(qwen: ScriptedBackend) -> AsyncIterator[Listening]:
    """A node with the worker `qwen`."""
    async with running(backends=[qwen]) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis server that tests share if they leave it running."""
    with redis_running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_server(shared_redis: RedisServer) -> RedisServer:
    """The shared Redis server without data."""
    shared_redis.command("FLUSHALL")
    return shared_redis


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis server that a test may pause, kill and restart."""
    with redis_running(tmp_path) as server:
        yield server
