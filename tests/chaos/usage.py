"""Memory and open files of a process, as Linux counts them."""

from __future__ import annotations

import os
from pathlib import Path


def virtual_bytes(pid: int) -> int:
    """Return the size of the address space of a process."""
    return _statm(pid, 0)


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process, in MB."""
    return _statm(pid, 1) / 1e6


def open_files(pid: int) -> int:
    """Return the number of open files of a process, including sockets."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _statm(pid: int, field: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[field])
    return pages * os.sysconf("SC_PAGE_SIZE")
