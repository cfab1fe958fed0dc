"""The child processes of the tests."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def child_pids() -> set[int]:
    """Return the running child processes of this process."""
    found: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # The thread has ended since it was listed.
            found |= set(map(int, (thread / "children").read_text().split()))
    return found
