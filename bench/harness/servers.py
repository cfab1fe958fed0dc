"""A real server that a benchmark starts (Linux, from /proc)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final

from bench.harness.processes import cpu_s, resident_bytes

SERVE: Final = (sys.executable, "-m", "draftgate", "serve")


@dataclass(frozen=True, slots=True)
class Server:
    """A server process."""

    pid: int
    port: int

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the server so far."""
        return cpu_s(self.pid)

    @property
    def resident_bytes(self) -> int:
        """Main memory of the server now."""
        return resident_bytes(self.pid)
