"""A rolling restart of the nodes of a pool under load, with and without moves."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from bench.gateway.moved_streams import Observed, dispatching, job_of, run_job, until
from bench.harness.processes import free_port, start, stop, wait_until_up
from bench.harness.servers import SERVE, fresh_cache, quantiles
from draftgate.backends.errors import BackendFailed
from draftgate.backends.peer.backend import static_peer
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.assembly import WaitingRules
from draftgate.gateway.dispatch.dispatcher import Dispatcher
from draftgate.gateway.fleet import Fleet, FleetWorker

NODES: Final = 3
DRAIN_S: Final = 1.0
OUTPUT_TOKENS: Final = 400
FLAGS: Final = (
    *("--backend", "engine", "--speculation", "off", "--threads", "1", "--log-level", "error"),
    *("--max-model-len", "8192", "--kv-bytes", str(320 << 20), "--drain-timeout-s", str(DRAIN_S)),
)


class Node:
    """A server process that restarts on the same port."""

    def __init__(self, folder: Path) -> None:
        """Choose a port without starting."""
        self._port = free_port()
        self._folder = folder
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start the server and wait until it responds."""
        command = [*SERVE, "--port", str(self._port), *FLAGS]
        log = self._folder / f"{self._port}.log"
        self.process = start(command, None, log, fresh_cache(self._folder))
        wait_until_up(self.process, f"{self.url}/v1/completions", b'{"prompt":"x","max_tokens":1}')

    def end(self) -> None:
        """Stop the server with SIGTERM, and wait until it has ended."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(60.0)

    def close(self) -> None:
        """Stop the server, if it runs."""
        if self.process is not None:
            stop(self.process)


async def measure_restart(
    tokens: int, streams: int, *, moves: bool, nodes: int = NODES
) -> dict[str, Any]:
    """Restart each node while streams run, and return what their clients saw.

    Args:
        tokens: context of each stream.
        streams: number of clients, each of which begins the next stream after the last one.
        moves: whether streams move.
    """
    observed: list[Observed] = []
    async with _pool(nodes, moves=moves) as (servers, fleet, dispatcher):
        loads = [
            asyncio.create_task(_send(dispatcher, number, tokens, observed))
            for number in range(streams)
        ]
        try:
            await until(lambda: sum(bool(one.times_s) for one in observed) >= streams, loads)
            for server, worker in zip(servers, fleet.workers, strict=True):
                await asyncio.to_thread(server.end)
                await asyncio.to_thread(server.start)
                await until(partial(_serves, worker))
        finally:
            for load in loads:
                load.cancel()
            ended = await asyncio.gather(*loads, return_exceptions=True)
    resumed = [one for one in observed if one.resumes]
    gaps = [gap for one in observed for gap in one.gaps_s()]
    return {
        "moves": moves,
        "tokens": tokens,
        "streams": streams,
        "failed": [str(one) for one in ended if isinstance(one, BackendFailed)],
        "resumed": len(resumed),
        "computed_tokens": sum(one.computed_tokens for one in resumed),
        "most_computed_tokens": max((one.computed_tokens for one in resumed), default=0),
        "delta_s": quantiles(gaps),
        "longest_gap_s": max(gaps),
        "ends": sorted(move.end.value for one in observed for move in one.moves),
    }


@asynccontextmanager
async def _pool(
    nodes: int, *, moves: bool
) -> AsyncIterator[tuple[Sequence[Node], Fleet, Dispatcher]]:
    """Run nodes, and a gateway for them in this process."""
    with TemporaryDirectory() as folder:
        servers = [Node(Path(folder)) for _ in range(nodes)]
        try:
            for server in servers:
                await asyncio.to_thread(server.start)
            configs = [WorkerConfig(upstream=one.url) for one in servers]
            rules = WaitingRules(admission="none", moves=moves)
            async with dispatching(static_peer, configs, rules) as (dispatcher, fleet):
                yield servers, fleet, dispatcher
        finally:
            for server in servers:
                server.close()


def _serves(worker: FleetWorker) -> bool:
    return worker.backend.failure is None


async def _send(dispatcher: Dispatcher, client: int, tokens: int, observed: list[Observed]) -> None:
    """Run one stream after the other."""
    number = 0
    while True:
        one = Observed()
        observed.append(one)
        job = job_of(tokens, 66_000_000 + 1000 * client + number, OUTPUT_TOKENS)
        await run_job(dispatcher, job, one)
        number += 1
