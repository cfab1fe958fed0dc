"""Fixtures of the gateway's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from gateway.app import Listening
from tests.gateway.harness import ScriptedBackend, client, running


@pytest.fixture
async def sim() -> AsyncIterator[Listening]:
    """A node with the simulator behind it."""
    async with running() as where:
        yield where


@pytest.fixture
async def http(sim: Listening) -> AsyncIterator[httpx.AsyncClient]:
    """A plain client of `sim`."""
    async with client(sim) as opened:
        yield opened


@pytest.fixture
async def scripted() -> ScriptedBackend:
    """A backend whose steps the test decides; not serving yet."""
    return ScriptedBackend()
