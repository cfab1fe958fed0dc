"""Tests of the examples of property tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples


def _drawn() -> list[str]:
    """Return the texts that a deterministic property test gets."""
    texts = list[str]()

    @settings(derandomize=True, database=None, max_examples=examples(100))
    @given(st.text())
    def draw(text: str) -> None:
        texts.append(text)

    draw()
    return texts


def test_imported_modules_do_not_change_the_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deterministic test gets the same examples whichever modules other tests have imported."""
    before = _drawn()
    path = tmp_path / "constants.py"
    path.write_text("WORDS = (" + "".join(f"'word {i}', " for i in range(20)) + ")")
    spec = importlib.util.spec_from_file_location("constants", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "constants", module)
    spec.loader.exec_module(module)
    assert module.WORDS[0] == "word 0"
    assert _drawn() == before
