"""Tests of workers as actors of a real three-node Ray cluster with Redis and a gateway."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftgate.gateway.app import Listening, build_node, listening, start_workers
from draftgate.gateway.config import ServeConfig
from tests.gateway.harness import client, events, eventually
from tests.gateway.redis_server import RedisServer

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="no Ray: pip install 'draftgate[ray]'"
    ),
]

HOSTS = ("127.0.0.2", "127.0.0.3")
SECRET = "secret of this test cluster"
POOL = "of-ray"
PATIENCE_S = 120.0
BODY = {"prompt": "def f(x):", "max_tokens": 24, "seed": 3, "ignore_eos": True}
LONG = {**BODY, "max_tokens": 3000, "stream": True}
"""Body of a stream that lasts several seconds with steps of at least 6 ms."""

SLOW = ("--backend", "sim", "--profile", "h100-8b", "--drain-timeout-s", "60")


@dataclass
class RayCluster:
    """A cluster of a head without cores and two nodes with capacity for two workers each."""

    process: subprocess.Popen[str]
    home: Path
    address: str = ""

    def send_command(self, what: str, host: str) -> None:
        """Add or remove a node and wait for the result."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{what} {host}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == f"{what} {host}\n"


def _environment(home: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(part for part in sys.path if part),
        "RAY_TMPDIR": str(home),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    """A cluster for all tests. Only the last test changes its nodes."""
    home = Path(tempfile.mkdtemp(prefix="dg-ray-"))  # Ray requires short socket paths
    script = Path(__file__).with_name("ray_cluster.py")
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env=_environment(home),
        )  # fmt: skip
    cluster = RayCluster(process, home)
    try:
        assert process.stdout is not None
        cluster.address = process.stdout.readline().strip()
        assert cluster.address, (home / "log").read_text()
        for host in HOSTS:
            cluster.send_command("add", host)
        yield cluster
    finally:
        try:
            process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
            shutil.rmtree(home, ignore_errors=True)


@dataclass
class Command:
    """A running `draftgate ray` command and its output so far."""

    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)

    async def read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.lines.append(line.decode().rstrip())

    def states(self) -> dict[str, list[str]]:
        """Return the last state of each worker as a list of state, address and further words."""
        lines = (line.split() for line in self.lines if line.startswith(f"{POOL}/"))
        return {name: rest for name, *rest in lines}

    def addresses(self) -> dict[str, str]:
        """Return the addresses of the workers that have joined."""
        return {n: words[1] for n, words in self.states().items() if words[0] == "joined"}

    async def until(self, joined: int) -> None:
        """Wait until this number of workers has joined."""

        async def all_joined() -> bool:
            assert self.process.returncode is None, self.lines
            return len(self.addresses()) == joined

        await eventually(all_joined, PATIENCE_S)


@asynccontextmanager
async def draftgate(cluster: RayCluster, *words: str) -> AsyncIterator[Command]:
    """Run `draftgate ray ...` and kill the command at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "draftgate", "ray", *words,
        *("--address", cluster.address), stdin=DEVNULL, stdout=PIPE, stderr=STDOUT,
        env={**_environment(cluster.home), "CLUSTER_SECRET": SECRET, "COLUMNS": "200"},
    )  # fmt: skip
    command = Command(process)
    reading = asyncio.create_task(command.read())
    try:
        yield command
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading


async def run_to_end(cluster: RayCluster, *words: str) -> Command:
    """Run `draftgate ray ...` to its end."""
    async with draftgate(cluster, *words) as command, asyncio.timeout(PATIENCE_S):
        await command.process.wait()
    return command


def start_of(redis: RedisServer, workers: int, *more: str) -> tuple[str, ...]:
    given = ("--workers", str(workers), "--join", redis.url, "--pool", POOL)
    return ("start", *given, "--peer-secret-env", "CLUSTER_SECRET", *more)


@asynccontextmanager
async def gateway(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Listening]:
    """Run a gateway of the pool without its own worker."""
    monkeypatch.setenv("CLUSTER_SECRET", SECRET)
    config = ServeConfig(
        port=0, join=redis.url, pool=POOL, no_worker=True, peer_secret_env="CLUSTER_SECRET",
        routing="round_robin", log_level="error",
    )  # fmt: skip
    node = build_node(config)
    async with listening(node) as server:
        try:
            await start_workers(node)
            async with node.heartbeat.beating():
                yield server
        finally:
            await node.stop()
            await node.store.close()


def known(server: Listening) -> set[str]:
    """Return the addresses of the workers that a gateway uses."""
    return {f"http://{worker.worker_id[:-2]}" for worker in server.node.fleet.serving}


async def wait_for_workers(server: Listening, addresses: set[str]) -> None:
    """Wait until a gateway uses exactly these workers."""

    async def uses_workers() -> bool:
        return known(server) == addresses

    await eventually(uses_workers, PATIENCE_S)


async def read_stream(
    http: httpx.AsyncClient, body: dict[str, Any], begun: asyncio.Semaphore | None = None
) -> int:
    """Read a stream to its `[DONE]` and return its number of tokens."""
    request = {**body, "stream_options": {"include_usage": True}}
    text = ""
    async with http.stream("POST", "/v1/completions", json=request) as response:
        async for piece in response.aiter_text():
            if not text and begun is not None:
                begun.release()
            text += piece
    *_, last, done = events(text)
    assert done == "[DONE]"
    assert "error" not in last
    return int(last["usage"]["completion_tokens"])


async def open_streams(http: httpx.AsyncClient, number: int) -> list[asyncio.Task[int]]:
    """Open long streams and wait until all have started."""
    begun = asyncio.Semaphore(0)
    streams = [asyncio.create_task(read_stream(http, LONG, begun)) for _ in range(number)]
    for _ in streams:
        await begun.acquire()
    assert not any(stream.done() for stream in streams)
    return streams


async def count_resumes(http: httpx.AsyncClient) -> float:
    """Return the number of resumed requests of a gateway."""
    text = (await http.get("/metrics")).text
    return sum(
        float(n) for n in re.findall(r"^draftgate_resumes_total{[^}]*} (\S+)$", text, re.MULTILINE)
    )


def child_of(address: str) -> int:
    """Return the id of the process that listens on a local address."""
    host, port = address.removeprefix("http://").split(":")
    octets = "".join(f"{int(part):02X}" for part in reversed(host.split(".")))
    address_in_hex = f"{octets}:{int(port):04X}"
    rows = (row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:])
    inode = next(row[9] for row in rows if row[1] == address_in_hex and row[3] == "0A")
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if str(link.readlink()) == f"socket:[{inode}]":
                return int(link.parts[2])
        except OSError:
            continue
    raise AssertionError(f"no process listens on {address}")


def actor_of(pid: int) -> int:
    """Return the id of the parent of a process."""
    return int(
        re.search(r"^PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[1]
    )


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def test_workers_spread_serve_restart_and_drain(
    ray_cluster: RayCluster, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray spreads workers over nodes, and the loss or stop of a worker interrupts no stream."""
    async with draftgate(ray_cluster, *start_of(redis_server, 3, *SLOW)) as launcher:
        await launcher.until(joined=3)
        before = launcher.addresses()
        assert {address.split(":")[1] for address in before.values()} == {f"//{h}" for h in HOSTS}
        async with gateway(redis_server, monkeypatch) as server, client(server) as http:
            http.timeout = PATIENCE_S
            await wait_for_workers(server, set(before.values()))

            # An actor dies during open streams. The streams continue, and Ray restarts the worker.
            streams = await open_streams(http, 3)
            name, address = next(iter(before.items()))
            child = child_of(address)
            os.kill(actor_of(child), signal.SIGKILL)

            async def has_new_address() -> bool:
                return launcher.addresses().get(name, address) != address

            await eventually(has_new_address, PATIENCE_S)
            assert await asyncio.gather(*streams) == [LONG["max_tokens"]] * 3
            assert await count_resumes(http) >= 1
            assert is_gone(child)
            now = set(launcher.addresses().values())
            await wait_for_workers(server, now)
            assert "(restarted)" in " ".join(launcher.states()[name])

            # The launcher stops during open streams, which run to their end.
            streams = await open_streams(http, 3)
            launcher.process.terminate()
            async with asyncio.timeout(PATIENCE_S):
                assert await asyncio.gather(*streams) == [LONG["max_tokens"]] * 3
                assert await launcher.process.wait() == 0, launcher.lines
    assert {words[0] for words in launcher.states().values()} == {"stopped"}
    assert redis_server.command("ZRANGE", f"draftgate:{{{POOL}}}:hb", 0, -1) == []
    assert list(ray_cluster.home.rglob("raylet.out"))  # contains Ray's logs and state
    leaks = [p for p in ray_cluster.home.rglob("*") if p.is_file() and SECRET in _text(p)]
    assert not leaks
    assert SECRET not in "\n".join(launcher.lines)


def _text(path: Path) -> str:
    return path.read_bytes().decode(errors="replace")


async def test_detached_workers_outlive_their_launcher(
    ray_cluster: RayCluster, redis_server: RedisServer
) -> None:
    """Detached workers outlive their launcher until `ray stop` drains them."""
    sim = ("--backend", "sim", "--detach")
    try:
        for _ in range(2):
            started = await run_to_end(ray_cluster, *start_of(redis_server, 1, *sim))
            assert started.process.returncode == 0, started.lines
        shown = await run_to_end(ray_cluster, "status", "--pool", POOL)
        assert shown.process.returncode == 0, shown.lines
        assert set(shown.addresses()) == {f"{POOL}/0", f"{POOL}/1"}
    finally:
        stopped = await run_to_end(ray_cluster, "stop", "--pool", POOL)
    assert stopped.process.returncode == 0, stopped.lines
    assert {words[0] for words in stopped.states().values()} == {"stopped"}
    nothing = await run_to_end(ray_cluster, "status", "--pool", POOL)
    assert nothing.process.returncode == 1
    assert nothing.lines[-1] == f"draftgate: the pool {POOL!r} has no workers in this Ray cluster"


async def test_workers_that_cannot_start_are_given_up(
    ray_cluster: RayCluster, redis_server: RedisServer
) -> None:
    """The launcher prints why workers cannot start, and Ray does not retry."""
    wrong = ("--backend", "sim", "/nowhere/model")
    failed = await run_to_end(ray_cluster, *start_of(redis_server, 2, *wrong))
    assert failed.process.returncode == 1
    assert any("failed" in line and "/nowhere/model" in line for line in failed.lines)
    left = await run_to_end(ray_cluster, "status", "--pool", POOL)
    assert "has no workers" in left.lines[-1]


async def test_the_loss_of_a_node_affects_only_its_workers(
    ray_cluster: RayCluster, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The streams of a lost node continue on other workers, and Ray starts replacements."""
    fixed = ("--port", "18400")
    async with draftgate(ray_cluster, *start_of(redis_server, 2, *SLOW, *fixed)) as launcher:
        await launcher.until(joined=2)
        lost = next(a for a in launcher.addresses().values() if f"//{HOSTS[0]}:" in a)
        kept = set(launcher.addresses().values()) - {lost}
        child = child_of(lost)
        async with gateway(redis_server, monkeypatch) as server, client(server) as http:
            http.timeout = PATIENCE_S
            await wait_for_workers(server, {lost, *kept})
            streams = await open_streams(http, 4)
            await asyncio.to_thread(ray_cluster.send_command, "remove", HOSTS[0])
            assert await asyncio.gather(*streams) == [LONG["max_tokens"]] * 4
            assert await count_resumes(http) >= 1

            async def is_over() -> bool:
                return is_gone(child)

            await eventually(is_over, PATIENCE_S)
            await launcher.until(joined=2)  # the second node has capacity for both workers
            await wait_for_workers(server, set(launcher.addresses().values()))
            assert {a.rpartition(":")[2] for a in known(server)} == {"18400", "18401"}
            assert await read_stream(http, LONG | BODY) == 24
        launcher.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(PATIENCE_S):
            assert await launcher.process.wait() == 0, launcher.lines
