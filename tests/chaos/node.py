"""Nodes whose log, memory, files and version a run controls."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
from contextlib import suppress
from pathlib import Path

from tests.chaos.machine import Machine
from tests.cluster.nodes import NodeProcess
from tests.gateway.certificates import Certificate
from tests.gateway.tcp_proxy import TcpProxy

PIPE_BYTES = 4096
"""Size of the pipe of a log, the smallest that Linux has."""


class ChaosNode(NodeProcess):
    """A node process for a run.

    Attributes:
        proxy: the proxy through which other nodes reach it, or None.
        machine: its clock and its disk.
        redis: the proxy through which it reaches Redis, or None.
        certificate: its certificate for HTTPS, or None.
        trees: the source trees between which an upgrade changes, the present one first.
        logs: whether its log is read. Otherwise its writes to stderr block.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        *flags: str,
        machine: Machine,
        redis: TcpProxy | None = None,
        certificate: Certificate | None = None,
        trees: tuple[Path | None, ...] = (None,),
    ) -> None:
        """Prepare a node with these flags of `serve`."""
        super().__init__(name, folder, *flags)
        self.machine = machine
        self._environment |= machine.environment
        self.certificate = certificate
        if certificate is not None:
            files = ("--tls-certfile", str(certificate.cert), "--tls-keyfile", str(certificate.key))
            self._command = (*self._command, *files)
            self.url = self.url.replace("http:", "https:")
        self.proxy: TcpProxy | None = None
        self.redis = redis
        self.trees = trees
        self.version = 0
        self._log_pipe: int | None = None
        self._stuffed: int | None = None  # write end of the pipe while the log is not read

    @property
    def worker_id(self) -> str:
        """The id of the node's worker in the pool."""
        return f"{self.address}-0"

    @property
    def address(self) -> str:
        """Host and port at which other nodes reach it."""
        return (self.url if self.proxy is None else self.proxy.url).partition("://")[2]

    def advertise(self, proxy: TcpProxy) -> None:
        """Let other nodes reach it through a proxy, from the next start on."""
        self.proxy = proxy
        self._command = (*self._command, "--advertise", proxy.url)

    async def start(self) -> None:
        """Start the process with its present version."""
        self._close_log()
        reading, writing = os.pipe()
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(reading, False)
        self._log_pipe = reading
        asyncio.get_running_loop().add_reader(reading, self._copy_log)
        try:
            await self._spawn(writing, self.trees[self.version])
        finally:
            os.close(writing)

    def upgrade(self) -> None:
        """Use the other version from the next start on."""
        self.version = (self.version + 1) % len(self.trees)

    def stop_reading_log(self) -> None:
        """Let every write of the process to its log block."""
        assert self._log_pipe is not None
        asyncio.get_running_loop().remove_reader(self._log_pipe)
        # A second description of the pipe, because the process shares the first one.
        self._stuffed = os.open(f"/proc/{self.pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
        with suppress(BlockingIOError):
            while True:
                os.write(self._stuffed, b"\n")

    def read_log_again(self) -> None:
        """Read what has been written meanwhile."""
        if self._stuffed is not None:
            os.close(self._stuffed)
            self._stuffed = None
        if self._log_pipe is not None:
            asyncio.get_running_loop().add_reader(self._log_pipe, self._copy_log)

    def limit(self, kind: int, most: int | None) -> None:
        """Set a soft limit of the running process, or remove it (None)."""
        _, hard = resource.prlimit(self.pid, kind)
        resource.prlimit(self.pid, kind, (hard if most is None else most, hard))

    async def close(self) -> None:
        """Kill the process if it was started."""
        await super().close()
        self._close_log()

    def _copy_log(self) -> None:
        assert self._log_pipe is not None
        try:
            data = os.read(self._log_pipe, 1 << 16)
        except BlockingIOError:
            return
        if data:
            with self._log.open("ab") as log:
                log.write(data.lstrip(b"\n"))
        else:
            self._close_log()

    def _close_log(self) -> None:
        if self._stuffed is not None:
            os.close(self._stuffed)
            self._stuffed = None
        if self._log_pipe is not None:
            asyncio.get_running_loop().remove_reader(self._log_pipe)
            os.close(self._log_pipe)
            self._log_pipe = None
