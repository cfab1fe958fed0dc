"""What other packages and `draftgate.lab` add by name: their entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def extensions(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name."""
    found = {entry.name: entry for entry in entry_points(group=group)}
    return found | {
        name: EntryPoint(name, value, group) for name, value in _declared().get(group, {}).items()
    }


def _declared() -> dict[str, dict[str, str]]:
    """Return the entry points of this checkout, or nothing in an installed package.

    A checkout may run without an installation, and an editable installation keeps the entry points
    of the commit from which it was made.
    """
    if not PROJECT.exists():
        return {}
    import tomllib

    project = tomllib.loads(PROJECT.read_text(encoding="utf-8")).get("project", {})
    declared: dict[str, dict[str, str]] = project.get("entry-points", {})
    # Another package may have left its pyproject.toml in site-packages.
    return declared if project.get("name") == "draftgate" else {}
