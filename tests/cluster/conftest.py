"""Fixtures of the cluster's tests."""

from __future__ import annotations

import pytest

from tests.gateway.harness import ScriptedBackend


@pytest.fixture
async def scripted() -> ScriptedBackend:
    """A worker whose steps the test decides; not serving yet."""
    return ScriptedBackend()
