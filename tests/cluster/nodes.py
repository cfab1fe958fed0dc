"""Nodes as processes that tests kill, pause and restart (`draftgate serve --join`)."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from draftgate.backends.checkpoints import SHIPPED_MODEL_ID
from tests.gateway.redis_server import free_port

START_S = 300.0
"""Timeout of a start or an end, long enough for a busy machine."""

PATIENT = ("--queue-timeout-s", "300", "--drain-timeout-s", "300")
"""Flags of gateways, with long timeouts because the test machine may be slow."""

COMMAND = (sys.executable, "-m", "draftgate", "serve")


class NodeProcess:
    """A node that can start several times at the same address."""

    def __init__(self, name: str, folder: Path, *flags: str) -> None:
        """Prepare a node with these flags of `serve`."""
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = (*COMMAND, "--port", str(self.port), *flags)
        self._log = folder / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    @property
    def worker_id(self) -> str:
        """The id of the node's worker in the pool."""
        return f"127.0.0.1:{self.port}-0"

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._running.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not exited."""
        return self._running.returncode is None

    @property
    def log_text(self) -> str:
        """The log of the node over all starts."""
        return self._log.read_text(errors="replace")

    async def start(self) -> None:
        """Start the process."""
        with self._log.open("ab") as log:
            await self._spawn(log.fileno())

    async def until_ready(self) -> None:
        """Wait until the node is ready."""

        async def serves() -> bool:
            assert self._running.returncode is None, self.log_text[-4000:]
            return await self.status("/ready") == httpx.codes.OK

        await eventually(serves)

    async def kill(self) -> None:
        """Kill the process with SIGKILL."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> int:
        """Stop the process with SIGTERM and return its exit status."""
        return await self._end(signal.SIGTERM)

    async def exit_status(self) -> int:
        """Wait until the process exits, and return its exit status."""
        async with asyncio.timeout(START_S):
            return await self._running.wait()

    def freeze(self) -> None:
        """Pause the process with SIGSTOP, which keeps its connections open."""
        self._running.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume the process after `freeze`."""
        self._running.send_signal(signal.SIGCONT)

    async def status(self, path: str) -> int:
        """Return the status code of a response, or 0 without a response."""
        async with httpx.AsyncClient(base_url=self.url, verify=False, timeout=START_S) as http:
            try:
                return (await http.get(path)).status_code
            except httpx.HTTPError:
                return 0

    async def in_flight(self) -> int:
        """Return the number of the node's requests in flight, from clients and other nodes."""
        return int((await self.json("/health"))["in_flight"])

    async def json(self, path: str) -> Any:
        """Return the JSON of a response."""
        async with httpx.AsyncClient(base_url=self.url, verify=False, timeout=START_S) as http:
            return (await http.get(path)).json()

    async def metric_sum(self, name: str) -> float:
        """Return the sum over all series of a metric."""
        async with httpx.AsyncClient(base_url=self.url, verify=False, timeout=START_S) as http:
            page = (await http.get("/metrics")).text
        return sum(map(float, re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)))

    async def close(self) -> None:
        """Kill the process if it was started."""
        if self._process is not None:
            await self.kill()

    async def _spawn(self, output: int, folder: Path | None = None) -> None:
        """Start the process with this file descriptor as its output.

        Args:
            folder: the source tree that the process imports, or None for the present one.
        """
        command, environment = list(self._command), dict(self._environment)
        if folder is not None:  # 0.1.0 refuses this variable, and the name of its default model
            environment.pop("DRAFTGATE_NO_ACCEPTANCE_CACHE", None)
            command = [part for part in command if part != SHIPPED_MODEL_ID]
        self._process = await asyncio.create_subprocess_exec(
            *command, stdout=output, stderr=output, cwd=folder, env=environment
        )

    @property
    def _running(self) -> asyncio.subprocess.Process:
        assert self._process is not None
        return self._process

    async def _end(self, signal_number: signal.Signals) -> int:
        process = self._running
        if process.returncode is None:
            process.send_signal(signal_number)
        async with asyncio.timeout(START_S):
            return await process.wait()


class Cluster:
    """The gateways and workers of a pool."""

    def __init__(self, gateways: list[NodeProcess], workers: list[NodeProcess]) -> None:
        self.gateways = gateways
        self.workers = workers

    @property
    def nodes(self) -> list[NodeProcess]:
        """All nodes of the pool."""
        return [*self.workers, *self.gateways]

    async def at_rest(self) -> bool:
        """Return whether no node has a request in flight and no worker keeps sequences or
        blocks."""
        leftovers = [
            await node.metric_sum(f"draftgate_{name}")
            for node in self.workers
            for name in ("running_sequences", "waiting_sequences", "kv_cache_usage_ratio")
        ]
        return not any(leftovers) and not any([await node.in_flight() for node in self.nodes])


@asynccontextmanager
async def cluster(
    folder: Path,
    address: str,
    *flags: str,
    gateways: int = 2,
    workers: int = 3,
    gateway_flags: Sequence[str] = (),
) -> AsyncIterator[Cluster]:
    """Start nodes that join a Redis, and yield when all are ready.

    Args:
        folder: the folder of the log files.
        address: the URL of the Redis server.
        flags: flags of the workers.
        gateway_flags: additional flags of the gateways.
    """
    joined = ("--join", address)
    nodes_of_pool = Cluster(
        [
            NodeProcess(f"gateway{n}", folder, *joined, "--no-worker", *PATIENT, *gateway_flags)
            for n in range(gateways)
        ],
        [NodeProcess(f"worker{n}", folder, *joined, *flags) for n in range(workers)],
    )
    try:
        for node in nodes_of_pool.nodes:
            await node.start()
        await asyncio.gather(*(node.until_ready() for node in nodes_of_pool.nodes))
        for gateway in nodes_of_pool.gateways:
            await until_known(gateway, workers)
        yield nodes_of_pool
    finally:
        await asyncio.gather(*(node.close() for node in nodes_of_pool.nodes))


async def until_known(gateway: NodeProcess, workers: int) -> None:
    """Wait until a gateway is linked to this many healthy workers."""

    async def known() -> bool:
        health = await gateway.json("/health")
        return [worker["status"] for worker in health["workers"]].count("ok") == workers

    await eventually(known)


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Poll until a condition holds, and fail after `START_S`."""
    async with asyncio.timeout(START_S):
        while not await condition():  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.1)
