"""Whether other users may change the files that a node trusts, such as its API keys.

Whoever may write such a file can add a key of their own. A writable folder is as bad, because the
file in it can be replaced.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from draftgate.gateway.logs import log

_OTHERS: Final = ((stat.S_IWGRP, "its group"), (stat.S_IWOTH, "every user"))


def check_writers(paths: Iterable[Path], *, strict: bool) -> None:
    """Warn about files that other users may change.

    Missing files are ignored, because reading them is an error anyway.

    Args:
        strict: whether such a file is an error.

    Raises:
        ValueError: other users may change a file, and `strict` is set.
    """
    for path in paths:
        for found in _writers(path):
            if strict:
                raise ValueError(f"{found}; use chmod or chown, or omit --strict")
            log(logging.WARNING, "other users may change a file that this node trusts", why=found)


def _writers(path: Path) -> Iterator[str]:
    """Yield each way in which users other than root and this one may change a file.

    A symbolic link is as safe as its folder, and the folder and the file that it leads to.
    """
    real = path.resolve()
    for place in dict.fromkeys((real, path.absolute().parent, real.parent)):
        try:
            status = place.stat()
        except OSError:
            continue
        if status.st_uid not in {0, os.geteuid()}:
            yield f"{place} belongs to the user {status.st_uid}"
        if place != real and status.st_mode & stat.S_ISVTX:
            continue  # others may create files in the folder, but not replace this one
        writers = [who for bit, who in _OTHERS if status.st_mode & bit]
        if writers:
            mode = stat.S_IMODE(status.st_mode)
            yield f"{place} may be written by {writers[-1]} (mode {mode:04o})"
