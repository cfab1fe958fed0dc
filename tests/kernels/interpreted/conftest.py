"""Settings of all tests in Triton's interpreter: less work in vain, and expected warnings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

EXPECTED_WARNINGS = (
    # Triton 3.6 interprets loop bounds in a way that NumPy 2.3 deprecates (and 2.4 refuses).
    "Conversion of an array with ndim > 0",
    # Attention leaves padding rows undefined. What was in their memory may be infinite or not a
    # number, and no other row reads it.
    "(overflow|invalid value|All-NaN slice) encountered",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore the expected warnings in the tests of this folder."""
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents:
            for message in EXPECTED_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{message}"))


@pytest.fixture(autouse=True, scope="session")
def _less_work() -> Iterator[None]:
    """Patch Triton's language once per function, and leave out checks for overflow.

    Triton patches all members of its language at each call of a device function, even of `tl.sum`.
    The patches are always the same, and this process only interprets. Without Triton's debug mode,
    the result of a check for overflow is computed and ignored.
    """
    patch_language, builder = interpreter._patch_lang, interpreter.interpreter_builder

    @cache
    def patch_once(function: Any) -> SimpleNamespace:
        patch_language(function)
        return SimpleNamespace(restore=lambda: None)

    assert not builder.options.debug
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield


@pytest.fixture(autouse=True, scope="session")
def _undefined_memory_is_not_a_number() -> Iterator[None]:
    """Fill new tensors with NaN, so that a test notices when a result depends on undefined memory.

    Without it, such memory mostly holds zeros or old results, which hide the fault.
    """
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
