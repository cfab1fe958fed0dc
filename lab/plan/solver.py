"""The solver of the extra `plan`, HiGHS."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from draftgate.gateway.cli.options import BAD_USAGE, fail


def require_solver() -> None:
    """Exit if the extra `plan` is not installed."""
    if find_spec("scipy") is None:
        fail("scipy is not installed: pip install 'draftgate[plan]'", BAD_USAGE)


@contextmanager
def silent_solver() -> Iterator[None]:
    """Discard what is written to stdout, because HiGHS writes a line there in rare cases."""
    sys.stdout.flush()
    stdout, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(nowhere)
