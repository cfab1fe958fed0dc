"""A real server that a study starts, and its resource use (Linux, from /proc)."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, Final

from bench.harness.processes import cpu_s, free_port, start, stop, wait_until_up
from draftgate.loadgen.measuring.metrics import percentile

SERVE: Final = (sys.executable, "-m", "draftgate", "serve")
_PROC: Final = Path("/proc")
_PAGE_BYTES: Final = resource.getpagesize()
_BEGUN: Final = json.dumps({"prompt": "x", "max_tokens": 1}).encode()

SAMPLE_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Server:
    """A server process with the same limit of open files as this process."""

    pid: int
    port: int

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def rss_bytes(self) -> int:
        """Resident memory of the server."""
        return int((_PROC / str(self.pid) / "statm").read_text().split()[1]) * _PAGE_BYTES

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the server so far."""
        return cpu_s(self.pid)


@contextmanager
def run_server(
    flags: Sequence[str],
    folder: Path,
    core: int | None = None,
    *,
    backend: str = "sim",
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Server]:
    """Run `draftgate serve` on a free port, by default with the simulator.

    Args:
        flags: options of `draftgate serve`.
        folder: folder for the log, whose name contains the port.
        variables: environment variables besides those of this process.

    Raises:
        RuntimeError: the server does not start. The message contains the log.
    """
    port = free_port()
    log = folder / f"server-{port}.log"
    command = [*SERVE, "--backend", backend, "--port", str(port), "--log-level", "error", *flags]
    process = start(command, core, log, variables)
    try:
        try:
            wait_until_up(process, f"http://127.0.0.1:{port}/v1/completions", _BEGUN)
        except RuntimeError as error:
            raise RuntimeError(f"{error}: {log.read_text()}") from error
        yield Server(process.pid, port)
    finally:
        stop(process)


def fresh_cache(folder: Path) -> dict[str, str]:
    """Return the variable that places the start-up cache of servers into a folder.

    The first server then measures its steps, and the others use its measurements. Measurements of
    an earlier start may come from a busy machine.
    """
    return {"XDG_CACHE_HOME": str(folder / "cache")}


def allow_many_files(wanted: int) -> None:
    """Raise the limit of open files of this process and its future children.

    Raises:
        RuntimeError: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise RuntimeError(
            f"{wanted} open files are needed, but the hard limit is {hard}. Raise it with ulimit -n"
        )
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def kernel_tcp_bytes() -> int:
    """Return the bytes in all TCP queues of this machine.

    The result includes both ends of a local connection.
    """
    for line in (_PROC / "net/sockstat").read_text().splitlines():
        if line.startswith("TCP:"):
            words = line.split()
            return int(words[words.index("mem") + 1]) * _PAGE_BYTES
    return 0


def shaped_profile(folder: Path, **fields: object) -> Path:
    """Write the profile of a device whose steps take the given times, and return its path."""
    instant = Path(__file__).with_name("instant.json")
    path = folder / "shaped.json"
    profile = json.loads(instant.read_text(encoding="utf-8")) | fields
    path.write_text(json.dumps(profile), encoding="utf-8")
    return path


@dataclass(slots=True)
class ResourceUse:
    """Resource use of a server, and the response time of its event loop.

    Attributes:
        rss_bytes, kernel_bytes: samples, `SAMPLE_S` apart.
        health_s: duration of `GET /health` at each sample. A blocked event loop responds late.
        cpu_share: CPU seconds per second.
    """

    rss_bytes: list[int] = field(default_factory=list)
    kernel_bytes: list[int] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)
    cpu_share: float = 0.0

    def metrics(self) -> dict[str, Any]:
        """Return the metrics as JSON values."""
        return {
            "rss_bytes": {"p50": median(self.rss_bytes), "max": max(self.rss_bytes)},
            "kernel_tcp_bytes": {"p50": median(self.kernel_bytes), "max": max(self.kernel_bytes)},
            "health_s": quantiles(self.health_s),
            "in_flight": {"p50": median(self.in_flight), "max": max(self.in_flight)},
            "cpu_share": self.cpu_share,
        }


@asynccontextmanager
async def watch_server(server: Server) -> AsyncIterator[ResourceUse]:
    """Watch a server while the context lasts."""
    found = ResourceUse()
    task = asyncio.create_task(_watch(server, found))
    began_s, cpu_s_before = time.perf_counter(), server.cpu_s
    try:
        yield found
    finally:
        found.cpu_share = (server.cpu_s - cpu_s_before) / (time.perf_counter() - began_s)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _watch(server: Server, found: ResourceUse) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        while True:
            began_s = time.perf_counter()
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
            health = json.loads(await reader.readexactly(length))
            found.health_s.append(time.perf_counter() - began_s)
            found.in_flight.append(health["in_flight"])
            found.rss_bytes.append(server.rss_bytes)
            found.kernel_bytes.append(kernel_tcp_bytes())
            await asyncio.sleep(SAMPLE_S)
    finally:
        writer.close()


async def live_samples(server: Server) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the node's samples of the last minutes, and then a sample each second."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(b"GET /live HTTP/1.0\r\nHost: localhost\r\n\r\n")
        while line := await reader.readline():
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))
    finally:
        writer.close()


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return median, 99th percentile and maximum of a non-empty sequence."""
    ordered = sorted(values)
    return {
        "p50": percentile(ordered, 0.5),
        "p99": percentile(ordered, 0.99),
        "max": ordered[-1],
    }
