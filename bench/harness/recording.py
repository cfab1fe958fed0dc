"""What a recorded result says of how it came about. Needs no torch."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path


def command_line(program: str, arguments: Sequence[str]) -> str:
    """Return a command as it is recorded: files of this machine without their folders."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in arguments]
    return " ".join([program, *words])


def commit() -> str:
    """Return the commit that this code is of, with `-dirty` behind it if it was edited."""
    command = ["git", "describe", "--always", "--dirty"]
    here = Path(__file__).parent
    # A constant command.
    done = subprocess.run(command, capture_output=True, text=True, cwd=here, check=False)  # noqa: S603
    return done.stdout.strip() or "unknown"
