"""The running servers of the comparison, of which only some run at the same time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from subprocess import Popen
from types import TracebackType
from typing import Final, Self

from bench.cpu.arms import Arm, Family
from bench.harness.processes import free_port, start, stop, wait_until_up
from bench.harness.servers import Server

START_S: Final = 900.0
"""Timeout for a start. vLLM compiles the model at its first start, which takes minutes."""

STOP_S: Final = 30.0
_PORT_OPTIONS: Final = ("--host", "127.0.0.1", "--port")


class RunningServers:
    """Starts and stops servers, and stops all at the end of its context.

    Attributes:
        servers: the running servers by the name of their arm.
        failed: the reason for each rival that did not start or failed. It is not tried again.
    """

    def __init__(self, folder: Path, core: int | None) -> None:
        self.servers: dict[str, Server] = {}
        self.failed: dict[str, str] = {}
        self._processes: dict[str, Popen[bytes]] = {}
        self._logs: dict[str, Path] = {}
        self._folder = folder
        self._core = core

    def __enter__(self) -> Self:
        """Return the servers, of which none runs yet."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop all servers."""
        self.keep(())

    def keep(self, arms: Iterable[Arm]) -> None:
        """Stop all servers except those of some arms."""
        kept = {arm.name for arm in arms}
        for name in [name for name in self._processes if name not in kept]:
            self.servers.pop(name, None)
            stop(self._processes[name], STOP_S)
            del self._processes[name]

    def fail(self, name: str, reason: str) -> None:
        """Stop a server for good. The error in its log becomes part of the reason."""
        self.failed[name] = f"{reason}: {_last_error(self._logs[name])}"
        self.servers.pop(name, None)
        stop(self._processes.pop(name), STOP_S)

    def run(self, arm: Arm) -> Server | None:
        """Return the server of an arm, which starts if it does not run, or None if it cannot.

        Raises:
            RuntimeError: Draftgate does not start.
        """
        if arm.name in self.servers or arm.name in self.failed:
            return self.servers.get(arm.name)
        port = free_port()
        log = self._logs[arm.name] = self._folder / f"server-{port}.log"
        command = [*arm.command, *_PORT_OPTIONS, str(port)]
        process = self._processes[arm.name] = start(command, self._core, log, arm.variables)
        server = Server(process.pid, port)
        try:
            wait_until_up(process, server.url + arm.ready_path, None, START_S)
        except RuntimeError as error:
            if arm.family is Family.DRAFTGATE:
                raise RuntimeError(f"{arm.name}: {error}: {log.read_text()}") from error
            self.fail(arm.name, str(error))
            return None
        self.servers[arm.name] = server
        return server


def _last_error(log: Path) -> str:
    """Return the last line of a log that mentions an error, or else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["no output"])[-1][:300]
