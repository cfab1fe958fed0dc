"""The clock and the disk of a process, which a run can change.

A small library (`machine.c`) gives the process another time, and delays its writes to files.
"""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("machine.c")
MICROSECONDS = 1_000_000


def build_library(folder: Path) -> Path:
    """Compile the library, and return its path."""
    library = folder / "machine.so"
    command = ["cc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, SOURCE]
    subprocess.run(command, check=True)
    return library


class Machine:
    """The machine of one process, or of some whose clocks agree.

    Attributes:
        environment: variables for the processes.
    """

    def __init__(self, library: Path, state: Path) -> None:
        """Start with the true time and a fast disk.

        Args:
            state: a new file, which the processes map.
        """
        self._state = state
        self._clock_ahead_s = 0
        self._write_s = 0.0
        state.write_bytes(bytes(16))
        self.environment = {"LD_PRELOAD": str(library), "CHAOS_MACHINE": str(state)}

    @property
    def clock_ahead_s(self) -> int:
        """How far the clock is ahead, in seconds."""
        return self._clock_ahead_s

    def set_clock(self, ahead_s: int) -> None:
        """Let the clock step."""
        self._clock_ahead_s = ahead_s
        self._store()

    def slow_writes(self, write_s: float) -> None:
        """Let each write to a file take this time."""
        self._write_s = write_s
        self._store()

    def _store(self) -> None:
        values = self._clock_ahead_s * MICROSECONDS, round(self._write_s * MICROSECONDS)
        file = os.open(self._state, os.O_WRONLY)  # without truncation, because it is mapped
        try:
            os.pwrite(file, struct.pack("=qq", *values), 0)
        finally:
            os.close(file)
