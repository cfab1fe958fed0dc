"""The path of an installed Chromium, without a download."""

from __future__ import annotations

import shutil
from typing import Final

NAMES: Final = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """Return the path of the first installed browser, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)
