"""Checks of the paths that a command writes at its end, before its work."""

from __future__ import annotations

import os
from pathlib import Path


def check_output_file(path: Path) -> None:
    """Check that a file can be written, whose folder exists.

    Raises:
        ValueError: the path is a folder, its folder does not exist, or it may not be written.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder")
    if not path.parent.is_dir():
        raise ValueError(f"the folder {path.parent} does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{path} may not be written")


def check_output_folder(path: Path) -> None:
    """Check that a folder can be made and written to, without making it.

    Raises:
        ValueError: the path or one of its folders is a file, or may not be written.
    """
    nearest = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not nearest.is_dir():
        raise ValueError(f"{nearest} is not a folder")
    if not os.access(nearest, os.W_OK):
        raise ValueError(f"the folder {nearest} may not be written")
