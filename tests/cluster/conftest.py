"""Fixtures of the cluster's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.harness import ScriptedBackend
from tests.gateway.redis_server import RedisServer, redis_running


@pytest.fixture
async def scripted() -> ScriptedBackend:
    """A worker whose steps the test decides; not serving yet."""
    return ScriptedBackend()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis server that a test may pause, kill and start again."""
    with redis_running(tmp_path) as server:
        yield server
