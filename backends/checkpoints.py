"""Where a checkpoint lies: a directory of this machine."""

from __future__ import annotations

from pathlib import Path

from backends.errors import CheckpointError
from backends.shipped import SHIPPED_MODEL


def find_checkpoint(name: str | None) -> Path:
    """Return the directory of a checkpoint; None is the shipped model.

    Raises:
        CheckpointError: there is none of that name.
    """
    if name is None:
        return SHIPPED_MODEL
    directory = Path(name).expanduser()
    if not directory.is_dir():
        raise CheckpointError(f"no checkpoint: {directory} is not a directory")
    return directory
