"""Tests that a call does not wait for the GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def forbid_synchronisation() -> Iterator[None]:
    """Make every call that waits for the GPU raise an error.

    The first use in a process warns that this mode is a prototype. Warnings are errors in the
    tests, so an unguarded warning would end the test and leave the mode on for all later tests.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
