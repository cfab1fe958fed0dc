"""A pool with workers of several backends, and proxies on all of its connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from draftgate.backends.checkpoints import SHIPPED_MODEL, SHIPPED_MODEL_ID
from tests.chaos.authority import Authority
from tests.chaos.machine import Machine, build_library
from tests.chaos.node import ChaosNode
from tests.chaos.requests import DEMO, SIMULATED, UPSTREAM
from tests.cluster.nodes import PATIENT, Cluster, eventually
from tests.gateway.certificates import Certificate
from tests.gateway.redis_server import RedisServer
from tests.gateway.tcp_proxy import TcpProxy, proxied
from tests.peer.harness import SLOW

SIM = ("--backend", "sim", "--profile", SLOW)
ENGINE = (SHIPPED_MODEL_ID, "--threads", "1", "--kv-bytes", "16MiB")
DRAIN = ("--drain-timeout-s", "60")

UPSTREAMS = 2
"""Servers outside the pool, so that one remains while the other one restarts."""


@dataclass(frozen=True)
class Size:
    """The numbers of nodes of each kind. Edges forward to the upstreams."""

    gateways: int = 4
    engines: int = 2
    simulated: int = 3
    edges: int = 1

    @property
    def models(self) -> frozenset[str]:
        """The names of the models that these nodes serve."""
        engines = {DEMO} if self.engines else set()
        return frozenset(engines | {UPSTREAM} | ({SIMULATED} if self.simulated else set()))


class RedisPair:
    """A Redis server and its replica.

    Attributes:
        machine: the clock of both.
        proxies: the proxies of the nodes, all of which forward to the primary.
    """

    def __init__(self, folder: Path, machine: Machine) -> None:
        self.machine = machine
        flags = ("--repl-diskless-sync-delay", "0")
        # This thread of Redis waits for a time of the real clock, so that it would never sleep.
        flags += ("--jemalloc-bg-thread", "no")
        self._servers = [
            RedisServer(folder, *flags, environment=machine.environment) for _ in range(2)
        ]
        self.proxies: list[TcpProxy] = []
        for server in self._servers:
            server.start()
        self._follow()

    @property
    def primary(self) -> RedisServer:
        """The server that the nodes use."""
        return self._servers[0]

    def kill_primary(self) -> None:
        """Kill the primary."""
        self.primary.kill()

    def restart_primary(self) -> None:
        """Start the primary with an empty memory."""
        self.primary.start()

    def fail_over(self) -> None:
        """Promote the replica, and let the killed primary follow it."""
        self._servers.reverse()
        self.primary.command("REPLICAOF", "NO", "ONE")
        for proxy in self.proxies:
            proxy.forward_to(self.primary.url)
        self._servers[1].start()
        self._follow()

    def close(self) -> None:
        """Kill both servers."""
        for server in self._servers:
            server.kill()

    def _follow(self) -> None:
        self._servers[1].command("REPLICAOF", "127.0.0.1", self.primary.port)


class ChaosPool(Cluster):
    """The nodes of a run.

    Attributes:
        groups: the nodes by the name of their group.
        redis: the servers of the state.
        authority: what signs the certificates of the gateways, or None if they serve HTTP.
    """

    def __init__(
        self,
        groups: dict[str, list[ChaosNode]],
        redis: RedisPair,
        authority: Authority | None,
    ) -> None:
        """Combine nodes that have not been started."""
        workers = [*groups["engine"], *groups["simulated"], *groups["edge"]]
        super().__init__([*groups["gateway"]], [*workers])
        self.groups = groups
        self.redis = redis
        self.authority = authority

    @property
    def all_nodes(self) -> list[ChaosNode]:
        """The nodes of the pool, and the upstreams."""
        return [node for nodes in self.groups.values() for node in nodes]

    @property
    def linked_ids(self) -> set[str]:
        """The ids of the workers that all gateways use."""
        return {node.worker_id for node in (*self.groups["engine"], *self.groups["simulated"])}

    @property
    def worker_ids(self) -> set[str]:
        """The ids of all workers, including the upstreams, which only their own node uses."""
        edges = [node.address for node in self.groups["edge"]]
        return self.linked_ids | {f"{edge}-{n}" for edge in edges for n in range(UPSTREAMS)}

    def urls_for(self, model: str) -> list[str]:
        """Return the addresses at which clients request a model."""
        nodes = self.groups["edge" if model == UPSTREAM else "gateway"]
        return [node.url for node in nodes]


@asynccontextmanager
async def chaos_pool(
    folder: Path,
    size: Size,
    seed: int,
    trees: tuple[Path | None, ...],
    *,
    oldest: bool = False,
    authority: Authority | None = None,
) -> AsyncIterator[ChaosPool]:
    """Start all nodes, and yield when all are ready.

    Args:
        folder: the folder of the logs.
        seed: seed of the versions with which nodes start.
        trees: the source trees of the versions, the present one first.
        oldest: whether all nodes start with the last version, instead of random ones.
        authority: what signs the certificates of the gateways, or None if they serve HTTP.
    """
    async with AsyncExitStack() as stack:
        library = build_library(folder)

        def machine(name: str) -> Machine:
            return Machine(library, folder / f"{name}.machine")

        redis = RedisPair(folder, machine("redis"))
        stack.callback(redis.close)
        rng = Random(f"versions/{seed}")

        async def node(name: str, *flags: str, certificate: Certificate | None = None) -> ChaosNode:
            proxy = await stack.enter_async_context(proxied(redis.primary.url))
            redis.proxies.append(proxy)
            joined = ("--join", f"redis://{proxy.url.partition('://')[2]}/0")
            made = ChaosNode(
                *(name, folder, *joined, *flags),
                machine=machine(name),
                redis=proxy,
                certificate=certificate,
                trees=trees,
            )
            made.version = len(made.trees) - 1 if oldest else rng.randrange(len(made.trees))
            stack.push_async_callback(made.close)
            return made

        async def worker(name: str, *flags: str) -> ChaosNode:
            made = await node(name, *flags, *DRAIN)
            made.advertise(await stack.enter_async_context(proxied(made.url)))
            return made

        async def gateway(name: str) -> ChaosNode:
            files = None if authority is None else authority.sign(folder / name)
            records = ("--decisions-file", str(folder / f"{name}.jsonl"))
            return await node(name, "--no-worker", *PATIENT, *records, certificate=files)

        outside = [
            ChaosNode(
                *(f"upstream{n}", folder, *SIM, "--served-model-name", UPSTREAM, *DRAIN),
                machine=machine(f"upstream{n}"),
            )
            for n in range(UPSTREAMS)
        ]
        for one in outside:
            stack.push_async_callback(one.close)
        to_upstreams = [flag for one in outside for flag in ("--upstream", one.url)]
        named = _renamed_model(folder / SIMULATED)
        groups = {
            "engine": [await worker(f"engine{n}", *ENGINE) for n in range(size.engines)],
            "simulated": [
                await worker(f"simulated{n}", str(named), *SIM, "--kv-bytes", "1GiB")
                for n in range(size.simulated)
            ],
            "gateway": [await gateway(f"gateway{n}") for n in range(size.gateways)],
            "edge": [
                await node(f"edge{n}", "--backend", "openai", *to_upstreams, *PATIENT)
                for n in range(size.edges)
            ],
            "upstream": outside,
        }
        pool = ChaosPool(groups, redis, authority)
        await _start(pool)
        yield pool


def _renamed_model(folder: Path) -> Path:
    """Return a folder with the shipped model, which has the name of the folder in a pool."""
    folder.mkdir(exist_ok=True)
    for file in SHIPPED_MODEL.iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).symlink_to(file)
    return folder


async def _start(pool: ChaosPool) -> None:
    """Start all nodes, a few at a time because a start needs a whole core."""
    for group in ("upstream", "engine", "simulated", "edge", "gateway"):
        for node in pool.groups[group]:
            await node.start()
        await asyncio.gather(*(node.until_ready() for node in pool.groups[group]))
    for gateway in pool.groups["gateway"]:

        async def knows_all(gateway: ChaosNode = gateway) -> bool:
            workers = (await gateway.json("/health"))["workers"]
            return pool.linked_ids == {one["id"] for one in workers if one["status"] == "ok"}

        await eventually(knows_all)
