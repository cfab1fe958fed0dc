"""Models that the engine tests share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from draftgate.backends.checkpoints import SHIPPED_MODEL
from tests.engine.harness import Model


@pytest.fixture(scope="session")
def shipped() -> Model:
    """The shipped model."""
    return Model(SHIPPED_MODEL)


@pytest.fixture
def checkpoint_copy(tmp_path: Path) -> Path:
    """A copy of the shipped checkpoint that a test may damage."""
    return Path(shutil.copytree(SHIPPED_MODEL, tmp_path / "model"))
