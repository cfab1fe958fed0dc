"""The folder of everything that Draftgate keeps between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Return the folder of compiled operators, measurements and pulled models.

    It is `$XDG_CACHE_HOME/draftgate`, or `~/.cache/draftgate` without the variable.
    """
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "draftgate"
