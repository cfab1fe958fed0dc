"""The engine on a machine without a GPU, where triton is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")

SERVED = ("draftgate.backends.engine.load", "draftgate.backends.engine.backend")


@pytest.mark.parametrize("module", SERVED)
def test_the_engine_can_be_imported_without_triton(module: str) -> None:
    """Only the kernels of a GPU import triton, when a model for a GPU is built."""
    code = f"import sys; sys.modules['triton'] = None; import {module}"
    subprocess.run([sys.executable, "-c", code], check=True)
