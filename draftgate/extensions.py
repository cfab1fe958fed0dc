"""What other packages and `draftgate.lab` add by name: their entry points."""

from __future__ import annotations

import logging
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"

_log = logging.getLogger(__name__)
_reported: set[tuple[str, str, type[BaseException]]] = set()


def extensions(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name."""
    found = {entry.name: entry for entry in entry_points(group=group)}
    return found | {
        name: EntryPoint(name, value, group) for name, value in _declared().get(group, {}).items()
    }


def is_own(entry: EntryPoint) -> bool:
    """Return whether an entry point is Draftgate's own."""
    return entry.value.startswith("draftgate.")


def report_failure(what: str, method: str, error: BaseException) -> None:
    """Log that an extension failed, once for each method and type of error.

    Args:
        what: the kind and the name of the extension.
    """
    kind = what, method, type(error)
    if kind not in _reported:
        _reported.add(kind)
        _log.warning("%s failed in %s: %r", what, method, error, exc_info=error)


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
