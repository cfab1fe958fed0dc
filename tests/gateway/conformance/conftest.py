"""A node with each backend, used by OpenAI's own client."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.gateway.app import Listening
from tests.gateway.harness import running

ENGINE = pytest.param(
    "engine",
    marks=pytest.mark.skipif(
        importlib.util.find_spec("torch") is None
        or not (SHIPPED_MODEL / "model.safetensors").is_file(),
        reason="needs torch and the shipped model",
    ),
)


FORWARDED = "openai"
"""A node in front of a node with the simulator."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["sim", ENGINE, FORWARDED])
async def where(request: pytest.FixtureRequest) -> AsyncIterator[Listening]:
    """A node with each backend."""
    own = "sim" if request.param == FORWARDED else request.param
    async with running(backend=own, kv_bytes=32 << 20, threads=1) as listening:
        if request.param != FORWARDED:
            yield listening
            return
        async with running(backend="openai", upstream=(listening.url,)) as forwarding:
            yield forwarding


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(where: Listening) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's client, pointed at the node."""
    async with AsyncOpenAI(base_url=f"{where.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def sampled(where: Listening) -> Listening:
    """The node, if its tokens are sampled from logits."""
    if where.node.config.backend in {"sim", FORWARDED}:
        pytest.skip("the simulator has no logits")
    return where


@pytest.fixture
def model(where: Listening) -> str:
    """The model's name for clients."""
    return where.node.model_name
