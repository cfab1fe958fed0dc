"""The child processes of the tests."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def child_pids(of: int | str = "self") -> set[int]:
    """Return the running child processes of a process, by default of this one."""
    found: set[int] = set()
    for thread in Path(f"/proc/{of}/task").iterdir():
        with suppress(OSError):  # The thread has ended since it was listed.
            found |= set(map(int, (thread / "children").read_text().split()))
    return found
