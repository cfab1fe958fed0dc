"""A node with each backend, and OpenAI's own client of the node."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from draftgate.gateway.app import Listening
from tests.gateway.clients import openai_client
from tests.gateway.harness import needs_engine, running
from tests.upstream_settings import at

ENGINE = pytest.param(
    "engine",
    marks=needs_engine,
)

FORWARDED = "openai"
"""Parameter for a node that forwards to a node with the simulator."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["sim", ENGINE, FORWARDED])
async def gateway(request: pytest.FixtureRequest) -> AsyncIterator[Listening]:
    """A node with each backend."""
    own = "sim" if request.param == FORWARDED else request.param
    async with running(backend=own, kv_bytes=32 << 20, threads=1) as listening:
        if request.param != FORWARDED:
            yield listening
            return
        async with running(backend="openai", upstream=at(listening.url)) as forwarding:
            yield forwarding


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(gateway: Listening) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's client of the node."""
    async with openai_client(gateway.url) as client:
        yield client


@pytest.fixture
def sampled(gateway: Listening) -> Listening:
    """The node, if its backend samples tokens from logits."""
    if gateway.node.config.backend in {"sim", FORWARDED}:
        pytest.skip("the simulator has no logits")
    return gateway


@pytest.fixture
def model(gateway: Listening) -> str:
    """The model's name for clients."""
    return gateway.node.models[0].name
