"""Where this machine's browser is. Never downloads one."""

from __future__ import annotations

import shutil
from typing import Final

NAMES: Final = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """The path of the first that is installed, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)
