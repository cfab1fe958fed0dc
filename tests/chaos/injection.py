"""The faults on real processes, connections and files."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import redis

from tests.chaos.checker import Death
from tests.chaos.faults import SLOW_WRITE_S, Fault, Kind, faults_of
from tests.chaos.node import ChaosNode
from tests.chaos.pool import ChaosPool
from tests.chaos.requests import UPSTREAM
from tests.chaos.usage import virtual_bytes
from tests.cluster.redis_troubles import FLUSH_EVERY_S

EVICTION_BYTES = 64 << 10
"""Memory that Redis may use beyond its own while it evicts keys."""

FREE_BYTES = 1 << 20
"""Address space that a process may still take when its memory is limited."""


@dataclass
class Injection:
    """A source of faults that records what it has done.

    Attributes:
        events: time in seconds, kind and node of each fault.
        failures: descriptions of nodes that did not behave as promised.
        deaths: kills of gateways and upstreams.
    """

    pool: ChaosPool
    now_s: Callable[[], float]
    deaths: list[Death]
    events: list[tuple[float, str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    async def run_lane(self, name: str, seed: int, part: int, over: asyncio.Event) -> None:
        """Cause the faults of a lane one after another until `over` is set."""
        for fault in faults_of(name, seed, part):
            with suppress(TimeoutError):
                async with asyncio.timeout(fault.after_s):
                    await over.wait()
            if over.is_set():
                return
            await self.cause(fault)

    async def cause(self, fault: Fault) -> None:
        """Cause a fault, and return when what it has disturbed works again."""
        if fault.group == "redis":
            self._note(fault.kind, "redis")
            await _REDIS_FAULTS[fault.kind](self, fault)
            return
        nodes = self.pool.groups[fault.group]
        node = nodes[int(fault.place * len(nodes))]
        if not node.is_running:  # another lane restarts it
            return
        self._note(fault.kind, node.name)
        await _NODE_FAULTS[fault.kind](self, node, fault)

    async def cause_upgrade(self, node: ChaosNode) -> None:
        """Upgrade a node, and return when it is ready."""
        self._note(Kind.UPGRADE, node.name)
        node.upgrade()
        await self._restart(node)

    async def kill(self, node: ChaosNode, fault: Fault) -> None:
        """Kill a node and start it again."""
        if node in self.pool.groups["gateway"]:
            self.deaths.append(Death(node.url, self.now_s()))
        if node in self.pool.groups["upstream"]:
            self.deaths.append(Death(UPSTREAM, self.now_s()))
        await node.kill()
        await asyncio.sleep(fault.hold_s)
        await self._start(node)

    async def pause(self, node: ChaosNode, fault: Fault) -> None:
        """Pause a node and resume it."""
        node.freeze()
        await asyncio.sleep(fault.hold_s)
        node.thaw()

    async def restart(self, node: ChaosNode, fault: Fault) -> None:
        """Restart a node, which must exit with status 0."""
        await self._restart(node)

    async def upgrade(self, node: ChaosNode, fault: Fault) -> None:
        """Restart a node with the other version."""
        node.upgrade()
        await self._restart(node)

    async def partition(self, node: ChaosNode, fault: Fault) -> None:
        """Lose all packets between a worker and the gateways."""
        assert node.proxy is not None
        node.proxy.freeze()
        await asyncio.sleep(fault.hold_s)
        node.proxy.thaw()

    async def reset(self, node: ChaosNode, fault: Fault) -> None:
        """Reset all connections between a worker and the gateways."""
        assert node.proxy is not None
        node.proxy.cut()

    async def memory(self, node: ChaosNode, fault: Fault) -> None:
        """Give a process no more memory, and start it again if it fails."""
        node.limit(resource.RLIMIT_AS, virtual_bytes(node.pid) + FREE_BYTES)
        await asyncio.sleep(fault.hold_s)
        if node.is_running:
            with suppress(ProcessLookupError):
                node.limit(resource.RLIMIT_AS, None)
        if not await self._serves(node):
            await node.kill()
            await self._start(node)

    async def slow_log(self, node: ChaosNode, fault: Fault) -> None:
        """Let the writes of a node to its log block."""
        node.stop_reading_log()
        await asyncio.sleep(fault.hold_s)
        node.read_log_again()

    async def full_disk(self, node: ChaosNode, fault: Fault) -> None:
        """Let all writes of a node to files fail."""
        node.limit(resource.RLIMIT_FSIZE, 0)
        await asyncio.sleep(fault.hold_s)
        if node.is_running:
            with suppress(ProcessLookupError):
                node.limit(resource.RLIMIT_FSIZE, None)

    async def slow_disk(self, node: ChaosNode, fault: Fault) -> None:
        """Let each write of a node to a file take long."""
        node.machine.slow_writes(SLOW_WRITE_S)
        await asyncio.sleep(fault.hold_s)
        node.machine.slow_writes(0.0)

    async def clock_step(self, node: ChaosNode, fault: Fault) -> None:
        """Change the clock of a node."""
        node.machine.set_clock(fault.clock_s)

    async def certificate(self, node: ChaosNode, fault: Fault) -> None:
        """Let the certificate of a gateway expire, and renew it."""
        assert self.pool.authority is not None
        assert node.certificate is not None
        path, sign = node.certificate.cert.with_suffix(""), self.pool.authority.sign
        await asyncio.to_thread(sign, path, expired=True)
        await asyncio.sleep(fault.hold_s)
        await asyncio.to_thread(sign, path)

    async def no_redis(self, node: ChaosNode, fault: Fault) -> None:
        """Lose all packets between a node and Redis."""
        assert node.redis is not None
        node.redis.freeze()
        await asyncio.sleep(fault.hold_s)
        node.redis.thaw()

    async def redis_pause(self, fault: Fault) -> None:
        """Let Redis hang."""
        await self._redis("CLIENT", "PAUSE", round(fault.hold_s * 1e3), "ALL")
        await asyncio.sleep(fault.hold_s)

    async def redis_kill(self, fault: Fault) -> None:
        """Kill Redis and start it with an empty memory."""
        self.pool.redis.kill_primary()
        await asyncio.sleep(fault.hold_s)
        await asyncio.to_thread(self.pool.redis.restart_primary)

    async def redis_failover(self, fault: Fault) -> None:
        """Kill Redis, and promote its replica some seconds later."""
        self.pool.redis.kill_primary()
        await asyncio.sleep(fault.hold_s)
        self.pool.redis.fail_over()

    async def redis_flush(self, fault: Fault) -> None:
        """Flush the memory of Redis repeatedly."""
        for _ in range(round(fault.hold_s / FLUSH_EVERY_S)):
            await self._redis("FLUSHALL")
            await asyncio.sleep(FLUSH_EVERY_S)

    async def redis_eviction(self, fault: Fault) -> None:
        """Let Redis evict keys."""
        info = await self._redis("INFO", "memory")
        used = int(info["used_memory"]) if isinstance(info, dict) else 1 << 20
        await self._redis("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        for _ in range(round(fault.hold_s)):  # below the present use, so that keys leave
            await self._redis("CONFIG", "SET", "maxmemory", max(1 << 20, used - EVICTION_BYTES))
            await asyncio.sleep(0.5)
            await self._redis("CONFIG", "SET", "maxmemory", 0)
            await asyncio.sleep(0.5)
        await self._redis("CONFIG", "SET", "maxmemory-policy", "noeviction")

    async def redis_clock_step(self, fault: Fault) -> None:
        """Change the clocks of both servers."""
        machine = self.pool.redis.machine
        machine.set_clock(machine.clock_ahead_s + fault.clock_s)

    async def _redis(self, *words: object) -> object:
        with suppress(redis.RedisError):
            return await asyncio.to_thread(self.pool.redis.primary.command, *words)
        return None

    async def _restart(self, node: ChaosNode) -> None:
        status = await node.stop()
        if status != 0:
            self.failures.append(
                f"{node.name} exited with status {status}: {node.log_text[-2000:]}"
            )
        await self._start(node)

    async def _start(self, node: ChaosNode) -> None:
        await node.start()
        await node.until_ready()

    async def _serves(self, node: ChaosNode) -> bool:
        """Return whether a node is healthy, after the time that a failed node needs to exit."""
        with suppress(TimeoutError):
            async with asyncio.timeout(10.0):
                return await node.status("/ready") == 200
        return False

    def _note(self, kind: Kind, name: str) -> None:
        self.events.append((round(self.now_s(), 2), kind.value, name))


_NODE_FAULTS: dict[Kind, Callable[[Injection, ChaosNode, Fault], Awaitable[None]]] = {
    Kind.KILL: Injection.kill,
    Kind.PAUSE: Injection.pause,
    Kind.RESTART: Injection.restart,
    Kind.UPGRADE: Injection.upgrade,
    Kind.PARTITION: Injection.partition,
    Kind.RESET: Injection.reset,
    Kind.MEMORY: Injection.memory,
    Kind.SLOW_LOG: Injection.slow_log,
    Kind.FULL_DISK: Injection.full_disk,
    Kind.SLOW_DISK: Injection.slow_disk,
    Kind.CLOCK_STEP: Injection.clock_step,
    Kind.CERTIFICATE: Injection.certificate,
    Kind.NO_REDIS: Injection.no_redis,
}

_REDIS_FAULTS: dict[Kind, Callable[[Injection, Fault], Awaitable[None]]] = {
    Kind.REDIS_PAUSE: Injection.redis_pause,
    Kind.REDIS_KILL: Injection.redis_kill,
    Kind.REDIS_FAILOVER: Injection.redis_failover,
    Kind.REDIS_FLUSH: Injection.redis_flush,
    Kind.REDIS_EVICTION: Injection.redis_eviction,
    Kind.REDIS_CLOCK_STEP: Injection.redis_clock_step,
}
