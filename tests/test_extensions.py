"""Tests of the entry points of this package and of others."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from draftgate import extensions as module
from draftgate.extensions import extensions

COMMANDS = "draftgate.commands"


def test_checkout_without_metadata_has_its_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout that is not installed finds and loads its own commands."""
    monkeypatch.setattr(module, "entry_points", lambda group: ())
    found = extensions(COMMANDS)
    assert found.keys() == {"plan", "simulate"}
    assert all(isinstance(entry.load(), typer.Typer) for entry in found.values())


def test_project_file_of_another_package_adds_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An installed package ignores a file that another package left beside it."""
    monkeypatch.setattr(module, "entry_points", lambda group: ())
    monkeypatch.setattr(module, "PROJECT", tmp_path / "pyproject.toml")
    assert extensions(COMMANDS) == {}
    named = f'[project]\nname = "%s"\n[project.entry-points."{COMMANDS}"]\nplan = "other:plan"\n'
    module.PROJECT.write_text(named % "other")
    assert extensions(COMMANDS) == {}
    module.PROJECT.write_text(named % "draftgate")
    assert [entry.value for entry in extensions(COMMANDS).values()] == ["other:plan"]
