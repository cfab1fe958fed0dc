"""Reader of compose files with Compose's rules for variables."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]

_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<rest>[^}]*))?\}")


def read(name: str = "compose.yaml", environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return a compose file with its variables substituted.

    Args:
        name: the file, relative to the repository.
        environ: the values of the variables. None sets only the required variables.

    Raises:
        KeyError: if a required variable is not set.
    """
    return _substitute(yaml.safe_load((ROOT / name).read_text(encoding="utf-8")), environ)


def services() -> dict[str, Any]:
    """Return the services of `compose.yaml` by name."""
    return dict(read()["services"])


def entry_point() -> list[str]:
    """Return the entry point of the project's images from the Dockerfile."""
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (found,) = re.findall(r"^ENTRYPOINT (.*)$", dockerfile, re.MULTILINE)
    return list(json.loads(found))


def seconds(duration: str) -> float:
    """Convert a duration such as `1m30s` to seconds."""
    units = {"h": 3600, "m": 60, "s": 1}
    parts = re.findall(r"(\d+)([hms])", duration)
    assert "".join(map("".join, parts)) == duration, duration
    return sum(int(number) * units[unit] for number, unit in parts)


def _substitute(value: Any, environ: Mapping[str, str] | None) -> Any:
    if isinstance(value, dict):
        return {key: _substitute(item, environ) for key, item in value.items()}
    if isinstance(value, list):
        return [_substitute(item, environ) for item in value]
    if isinstance(value, str):
        return _VARIABLE.sub(lambda match: _value(match, environ), value)
    return value


def _value(match: re.Match[str], environ: Mapping[str, str] | None) -> str:
    found = (environ or {}).get(match["name"])
    if found:
        return found
    if match["kind"] == "?":
        if environ is not None:
            raise KeyError(f"{match['name']} {match['rest']}")
        return 4 * match["name"]  # secrets have a minimum length
    return match["rest"] or ""
