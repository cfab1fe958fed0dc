"""Saves work that Triton's interpreter does in vain, which takes half of its time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from triton.runtime import interpreter


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
